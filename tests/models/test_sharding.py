"""Sharded decoders match a single device, and no device holds more than its shard."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

import jattn
from jattn.masks import shard_mask
from jattn.models import DecoderConfig, load, save
from jattn.models.loading.pretrained import load_shapes, read_config
from jattn.models.sharding import check_divides, partition_spec
from jattn.parallel import check_mesh, make_mesh
from jattn.serving import Engine
from tests.conftest import GOLDEN
from tests.masks.mask_rules import tiling
from tests.subprocesses import run_module

HF = GOLDEN / "hf"
LLAMA = HF / "llama"  # 6 query heads, 2 kv heads, 192 wide inside, 320 tokens


def mesh_of(tp, cp=1, names=("tp", "cp")):
    """Return an abstract mesh whose devices are all one device, for argument checks."""
    return Mesh(np.array([jax.devices()[0]] * tp * cp).reshape(tp, cp), names)


def changed(**changes):
    return DecoderConfig.from_hf(read_config(LLAMA).to_hf() | changes)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("checks", "lines"),
    [
        (
            "families masks",
            [
                *("bloom on 2: ", "gpt_oss on 2: ", "llama4 on 2: ", "phi3small on 2: "),
                *("masked: strides by kv heads", "masked: some heads", "patterns"),
            ],
        ),
        pytest.param(
            "other_families",
            ["gemma on 2: ", "phi on 2: ", "gpt_oss on 6: ", "mpt on 3: "],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "replicas",
            ["new weights of replicas", "saved and", "fp8 cache on 4", "cascades on 4"],
            marks=pytest.mark.slow,
        ),
        (
            "training engine features",
            [
                "trained: ",
                *("tp 2: 2 executables", "tp 4: 2 executables", "drafts: ", "2/1 heads of 32"),
                "int8 cache, scales per token and head on 2",
                "batch_invariant on 2",
                "saved and",
                "without caches",
                "decode_loop on 2",
            ],
        ),
    ],
)
def test_decoders_match_across_meshes(checks, lines):
    done = run_module("tests.models.sharded_decoders", *checks.split())
    assert done.returncode == 0, done.stderr
    assert [line for line in lines if line not in done.stdout] == []


@pytest.mark.kernels
def test_a_mesh_of_one_device_serves_the_same_tokens():
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_blocks": 17}
    buckets = [jattn.Bucket(max_decodes=2, max_prefills=2, max_prefill_tokens=16, max_blocks=4)]
    engines = [
        Engine(load(LLAMA, mesh=mesh, progress=False), **sizes, max_model_len=64, buckets=buckets)
        for mesh in (None, make_mesh())
    ]
    actual, expected = (engine.generate([[1, 2, 3], [5] * 20], max_tokens=6) for engine in engines)
    assert [result.token_ids for result in actual] == [result.token_ids for result in expected]


class TestMakeMesh:
    def test_mesh_has_both_axes(self):
        mesh = make_mesh(tp=1, cp=1)
        assert dict(mesh.shape) == {"tp": 1, "cp": 1}

    def test_mesh_must_not_exceed_the_devices(self):
        count = len(jax.devices())
        with pytest.raises(
            ValueError, match=rf"tp \* cp must be .*\({count}\), got {count} \* 2 = {2 * count}"
        ):
            make_mesh(tp=count, cp=2)

    @pytest.mark.parametrize(("sizes", "actual"), [({"tp": 0}, "0"), ({"cp": -1}, "-1")])
    def test_mesh_sizes_must_be_positive(self, sizes, actual):
        (name,) = sizes
        with pytest.raises(ValueError, match=f"{name} must be positive, got {actual}"):
            make_mesh(**sizes)

    def test_mesh_sizes_must_be_ints(self, types_unchecked):
        with pytest.raises(ValueError, match=r"tp must be an int, got 2\.0"):
            make_mesh(tp=2.0)


class TestRefusals:
    def test_mesh_must_be_a_mesh(self, types_unchecked):
        with pytest.raises(ValueError, match=r"mesh must be a Mesh .*got int: 2"):
            load(LLAMA, mesh=2)

    def test_mesh_must_have_the_axes_tp_and_cp(self):
        with pytest.raises(ValueError, match=r"mesh\.axis_names must be \('tp', 'cp'\), got \('x', 'y'\)"):
            check_mesh(mesh_of(2, names=("x", "y")))

    @pytest.mark.parametrize("load_model", [load, load_shapes])
    def test_mesh_axes_must_be_auto(self, load_model):
        """jax.make_mesh makes Explicit axes, with which prompt_logprobs would fail inside JAX."""
        rule = r"mesh\.axis_types must be Auto for all axes \(.*make_mesh\), got \('Explicit', 'Explicit'\)"
        with pytest.raises(ValueError, match=rule):
            load_model(LLAMA, mesh=jax.make_mesh((1, 1), ("tp", "cp")))

    @pytest.mark.parametrize("load_model", [load, load_shapes])
    def test_query_heads_must_be_a_multiple_of_tp(self, load_model):
        with pytest.raises(ValueError, match=r"num_attention_heads must be a multiple .*\(4\), got 6"):
            load_model(LLAMA, mesh=mesh_of(4))

    def test_kv_heads_must_be_a_multiple_or_divisor_of_tp(self):
        rule = r"num_key_value_heads must be a multiple or a divisor of the mesh's tp \(3\), got 2"
        with pytest.raises(ValueError, match=rule):
            load(LLAMA, mesh=mesh_of(3))

    def test_widths_must_be_a_multiple_of_tp(self):
        with pytest.raises(ValueError, match=r"intermediate_size must be a multiple .*\(2\), got 191"):
            check_divides(changed(intermediate_size=191), mesh_of(2))
        with pytest.raises(ValueError, match=r"must be a multiple of the mesh's tp \* cp \(4\), got 190"):
            check_divides(changed(intermediate_size=190), mesh_of(2, cp=2))

    def test_width_of_a_shared_expert_must_be_a_multiple_of_tp(self):
        hf = read_config(HF / "qwen2_moe").to_hf() | {"shared_expert_intermediate_size": 41}
        with pytest.raises(ValueError, match=r"intermediate_size must be a multiple .*\(2\), got 41"):
            check_divides(DecoderConfig.from_hf(hf), mesh_of(2))

    def test_a_model_over_several_processes_cannot_be_saved(self, tmp_path, monkeypatch):
        monkeypatch.setattr(Mesh, "is_multi_process", True)
        model = load_shapes(LLAMA, mesh=mesh_of(2))
        with pytest.raises(
            NotImplementedError, match=r"save of a model over several processes: .*in one process"
        ):
            save(model, tmp_path / "saved")
        assert not (tmp_path / "saved").exists()

    def test_patterns_per_device_have_no_kernel(self):
        mask = shard_mask(jattn.LocalStrided(), "tp", 8, (32, 8))
        assert "masks that differ between devices" in mask.why_no_kernel(tiling())
        assert shard_mask(jattn.LocalStrided(), "tp", 4, (32, 8)).why_no_kernel(tiling()) is None

    def test_a_pattern_shared_by_all_devices_is_a_single_device_s(self):
        phi = jattn.LocalStrided()  # its shifts are 1, and stripes 8 blocks apart
        for tp in (2, 4):
            assert shard_mask(phi, "tp", tp, (32, 8)) == jattn.LocalStrided(tp_size=tp)
        assert isinstance(shard_mask(phi, "tp", 8, (32, 8)), jattn.masks.ShardedMask)
        same = jattn.LocalStrided(homo_head=True)
        assert shard_mask(same, "tp", 8, (32, 8)) is same

    def test_a_draft_model_on_another_mesh_is_rejected(self):
        model, draft = load_shapes(LLAMA, mesh=make_mesh()), load_shapes(LLAMA)
        with pytest.raises(
            ValueError, match=r"The draft model is on the mesh None, but the model is on Mesh"
        ):
            Engine(model, num_blocks=9, speculative=draft)


SMALL = ("router", "shared_expert_gate", "embed_positions")  # matrices that every device has


@pytest.mark.kernels
@pytest.mark.parametrize(
    "name", sorted(path.name for path in HF.iterdir() if (path / "config.json").exists())
)
def test_every_matrix_of_every_family_is_sharded(name):
    config = read_config(HF / name)
    model = nnx.eval_shape(lambda: jattn.models.Decoder(config, rngs=nnx.Rngs(0)))
    whole, num_cut = [], 0
    for path, value in nnx.to_flat_state(nnx.state(model)):
        partition = partition_spec(path, len(value.shape))
        assert len(partition) <= len(value.shape), path
        is_cut = "tp" in partition or ("tp", "cp") in partition
        num_cut += is_cut
        if not is_cut and len(value.shape) > 1:
            whole.append(path)
    assert num_cut > 4 * config.num_hidden_layers
    assert [path for path in whole if path[-2] not in (*SMALL, "down_proj")] == []
    assert [path for path in whole if path[-2] == "down_proj" and path[-1] != "bias"] == []
