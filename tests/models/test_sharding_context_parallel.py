"""Decoders with context parallelism match a single device, and each device holds only its shard."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jattn
from jattn.models.loading.pretrained import load, load_shapes
from jattn.parallel import cache_partition_specs
from jattn.serving import Engine
from tests.conftest import GOLDEN
from tests.subprocesses import run_module

HF = GOLDEN / "hf"
LLAMA = HF / "llama"


def mesh_of(tp, cp):
    """Return an abstract mesh whose devices are all one device, for argument checks."""
    return Mesh(np.array([jax.devices()[0]] * tp * cp).reshape(tp, cp), ("tp", "cp"))


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("checks", "lines"),
    [
        pytest.param(
            "families",
            ["bloom: ", "gpt_oss: ", "llama4: ", "mpt: ", "phi3small: ", "qwen2_moe: "],
            marks=pytest.mark.slow,
        ),
        pytest.param("other_families", ["gemma: ", "phi: "], marks=pytest.mark.slow),
        (
            "engine features",
            [
                *("tp 1, cp 2: 2 executables", "tp 2, cp 4: 2 executables", "4/2 heads of 32"),
                *("int8 cache, scales per token", "int8 cache, scales per channel", "preempted", "drafts"),
                *("four", "cascades", "groups", "scales"),
            ],
        ),
    ],
)
def test_decoders_match_across_meshes(checks, lines):
    done = run_module("tests.models.context_parallel_decoders", *checks.split())
    assert done.returncode == 0, done.stderr
    assert [line for line in lines if line not in done.stdout] == []


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
def test_each_rank_stores_its_tokens_of_a_block(layout):
    """A device's part of each array has the shape of a cache with smaller blocks."""
    sizes = {"num_kv_heads": 4, "head_dim": 16, "layout": layout, "quantization": "int8_token_head"}
    cache_spec_of = lambda **more: jattn.CacheSpec(num_blocks=5, **{**sizes, **more})
    whole, part = (
        jax.eval_shape(lambda spec=spec: jattn.PagedCache.create(spec))
        for spec in (cache_spec_of(block_size=32), cache_spec_of(block_size=8, num_kv_heads=2))
    )
    mesh = jax.sharding.AbstractMesh((2, 4), ("tp", "cp"))
    shards = jax.tree.map(
        lambda array, spec: jax.NamedSharding(mesh, spec).shard_shape(array.shape),
        whole,
        cache_partition_specs(whole),
    )
    assert jax.tree.leaves(shards, is_leaf=lambda x: type(x) is tuple) == [
        x.shape for x in jax.tree.leaves(part)
    ]


class TestRefusals:
    def model(self):
        return load_shapes(LLAMA, mesh=mesh_of(1, 2), cp_kv_cache_interleave_size=4)

    def test_block_size_must_be_a_multiple_of_the_interleave(self):
        with pytest.raises(ValueError, match=r"block_size must be a multiple of 2 ranks x .*\(4\), got 12"):
            self.model().cache_specs(9, block_size=12)
        with pytest.raises(ValueError, match=r"block_size must be a multiple of cp_.*_size \(4\), got 6\."):
            Engine(self.model(), num_blocks=9, block_size=6)

    @pytest.mark.parametrize("interleave", [load, load_shapes])
    @pytest.mark.parametrize("mesh", [None, mesh_of(1, 1), mesh_of(1, 2)], ids=["no mesh", "one", "two"])
    def test_interleave_must_be_a_positive_int(self, interleave, mesh, types_unchecked):
        for value, rule in (
            (0, "be positive, got 0"),
            (-1, "be positive, got -1"),
            (1.5, "be an int, got 1.5"),
        ):
            with pytest.raises(ValueError, match=f"cp_kv_cache_interleave_size must {rule}"):
                interleave(LLAMA, mesh=mesh, cp_kv_cache_interleave_size=value)

    @pytest.mark.parametrize("load_model", [load, load_shapes])
    def test_alibi_is_refused(self, load_model):
        with pytest.raises(NotImplementedError, match="cp_kv_cache_interleave_size=2 with ALiBi: "):
            load_model(HF / "bloom", mesh=mesh_of(1, 2), cp_kv_cache_interleave_size=2)

    def test_a_step_mask_is_refused(self):
        model = self.model()
        metadata = jattn.build_batch_metadata([4], [4], np.ones((1, 1), np.int32))
        caches = jax.eval_shape(lambda: load_shapes(LLAMA).create_caches(4))
        plan = lambda **options: jax.eval_shape(
            lambda caches: model.plan(metadata, caches, **options), caches
        )
        with pytest.raises(
            NotImplementedError, match="mask=Sinks with cp: the KV cache of a request is split over 2"
        ):
            plan(mask=jattn.masks.Sinks(4))
