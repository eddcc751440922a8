"""varlen_prefill over 8-bit keys, which it dequantizes: contract and refusals, on a CPU and a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jattn
from jattn.batch.bucket import Bucket
from jattn.implementations.layer_config import CacheFormat, LayerConfig, RegionSizes
from jattn.implementations.mosaic_gpu import choose_kernel
from jattn.implementations.mosaic_gpu.kernel_plans import kernel_plan_key
from pallas_kernels.shared.score import Score
from pallas_kernels.support import KERNELS
from pallas_kernels.varlen_prefill import PrefillSizes, default_sizes, varlen_prefill
from pallas_kernels.varlen_prefill import sizes as sizes_module
from tests import assertions, contract
from tests.contract import Problem, case_id, mark_every_second_slow
from tests.covering_array import covering_array, select_each_value
from tests.pallas_kernels.varlen_prefill.split_everywhere import MOST, split_every_tile
from tests.pallas_kernels.varlen_prefill.test_entry import FACTORS, FAST, LONG, attend
from tests.pallas_kernels.varlen_prefill.test_pack_gqa import HEADS, packed_sizes
from tests.regions import attend_region, kernel_for

STORED = [
    "fp8_scalar", "fp8_head", "int8_scalar", "int8_token_head", "fp8_token_head", "fp8e5_scalar",
    "int8_static_v",
]  # fmt: skip
OF_8_BITS = {
    "stored": STORED,
    "kv": ["NHD", "HND"],
    "head_dim": list(KERNELS["varlen_prefill"].eight_bit_head_dims),
    "heads": HEADS,
}
FEW_FACTORS = FAST | OF_8_BITS | {"heads": [(2, 1), (4, 1), (3, 1)], "head_dim": [64, 96]}


@pytest.fixture(autouse=True)
def _long_regions(monkeypatch):
    monkeypatch.setattr(contract, "REGIONS", contract.REGIONS | LONG)


def cases(factors):
    always = {"sparsity": None, "padded": False}
    return [case | always for case in covering_array(factors)]


def sizes_of(case, **changes):
    """Use few thread blocks, so that each has several tiles, with packed GQA heads up to the group size,
    or one.
    """
    is_wide = case["causal"] or case["head_dim"] > 64
    sizes = PrefillSizes(tile_kv=64 if is_wide else 128, stages=2, ctas=3)
    q_heads, kv_heads = case["heads"]
    return dataclasses.replace(sizes if q_heads // kv_heads % 2 else packed_sizes(case, sizes), **changes)


class TestContract:
    @pytest.mark.parametrize("case", mark_every_second_slow(cases(FEW_FACTORS)[2::8]), ids=case_id)
    def test_prefill_equals_float64_for_combinations_of_features(self, case):
        problem = Problem(case)
        problem.check(*attend(problem, plgpu.InterpretGPUParams(), sizes_of(case)))

    @pytest.mark.parametrize("case", cases(FEW_FACTORS)[11::12], ids=case_id)
    def test_splits_equal_float64(self, case, monkeypatch):
        split_every_tile(monkeypatch)
        problem = Problem(case)
        problem.check(*attend(problem, plgpu.InterpretGPUParams(), sizes_of(case, max_splits=MOST)))

    @pytest.mark.slow
    @pytest.mark.parametrize("case", cases(FACTORS | OF_8_BITS)[::2], ids=case_id)
    def test_prefill_equals_float64_for_every_head_dim_and_block_size(self, case):
        problem = Problem(case)
        problem.check(*attend(problem, plgpu.InterpretGPUParams(), sizes_of(case)))

    def test_prefill_has_no_races(self):
        """TMA, the dequantizing warpgroups, and those that compute."""
        draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        k, v = (draw(seed, 26, 16, 1, 64).astype(jnp.float8_e4m3fn) for seed in (1, 2))
        run = functools.partial(
            varlen_prefill, draw(0, 64, 4, 64), k, v, jnp.asarray([0, 64]), jnp.asarray([400]),
            score=Score(scale=0.1), block_table=jnp.arange(25)[None] + 1,
            k_scale=jnp.ones((26, 1, 16)), v_scale=jnp.ones((26, 1, 16)),
            sizes=PrefillSizes(tile_kv=64, stages=2, ctas=2, pack_gqa=4),
            interpret=plgpu.InterpretGPUParams(detect_races=True),
        )  # fmt: skip
        with assertions.assert_no_races(num_kernels=1):
            jax.block_until_ready(jax.jit(run)())

    @pytest.mark.parametrize("stored", ["fp8_head", "int8_token_head"])
    def test_scales_of_the_cache_reach_the_kernel(self, stored, monkeypatch):
        split_every_tile(monkeypatch)
        monkeypatch.setattr(contract, "REGIONS", {"groups": ([20, 0, 3, 17, 5], [90, 0, 130, 70, 250], 1)})
        few = {k: dataclasses.replace(sizes, ctas=2) for k, sizes in sizes_module.QUANTIZED_TABLE.items()}
        monkeypatch.setattr(sizes_module, "QUANTIZED_TABLE", few)
        plain = {factor: values[0] for factor, values in contract.FACTORS.items()}
        plain |= {"head_dim": 64, "block_size": 16, "dtype": "bfloat16", "region": "groups"}
        problem = Problem(plain | {"heads": (4, 1), "stored": stored})
        query, metadata, spec = jnp.asarray(problem.query), problem.metadata.prefill_region, problem.spec
        assert kernel_for(query, problem.kv, metadata, spec).dequantizes
        run = functools.partial(attend_region, spec=spec, interpret=plgpu.InterpretGPUParams())
        problem.check(*jax.jit(run)(query, problem.kv, metadata))


class TestRefusals:
    def run(self, stored="int8", head_dim=64, **changes):
        kv = jnp.zeros((3, 16, 1, head_dim), stored)
        arguments = {
            "query": jnp.zeros((8, 2, head_dim), jnp.bfloat16), "key": kv, "value": kv,
            "query_start_loc": jnp.asarray([0, 8]), "seq_lens": jnp.asarray([20]),
            "block_table": jnp.asarray([[1, 2]]),
        }  # fmt: skip
        return varlen_prefill(**(arguments | changes), score=Score(scale=1.0))

    def test_inconsistent_shapes_and_sizes_are_rejected(self):
        with pytest.raises(ValueError, match="k_scale must be None with keys of bfloat16, got"):
            self.run("bfloat16", k_scale=jnp.ones(()))
        with pytest.raises(ValueError, match="v_scale's shape must be one of"):
            self.run(v_scale=jnp.ones((2,)))
        with pytest.raises(ValueError, match="warpgroups must be at most 2 with an 8-bit KV cache, got 3"):
            self.run(sizes=PrefillSizes(warpgroups=3, tile_kv=64))
        with pytest.raises(ValueError, match="tile_kv must be at most 64 with an 8-bit KV cache, got 128"):
            self.run(head_dim=128, sizes=PrefillSizes())
        with pytest.raises(
            ValueError, match="stages=4 leaves no shared memory for the tiles of an 8-bit KV cache"
        ):
            self.run(head_dim=128, sizes=PrefillSizes(tile_kv=64, stages=4))
        for name in ("has_lists", "batch_invariant"):
            with pytest.raises(ValueError, match=f"{name} must be False with an 8-bit KV cache, got True"):
                default_sizes(128, is_quantized=True, **{name: True})

    def test_unsupported_features_are_rejected(self):
        with pytest.raises(
            NotImplementedError, match="head_dim=256 is not supported by the kernel's dequantization"
        ):
            self.run(head_dim=256)
        with pytest.raises(NotImplementedError, match="cache dtype=bfloat16 is not supported"):
            self.run(value=jnp.zeros((3, 16, 1, 64), jnp.bfloat16))
        packed = jnp.zeros((20, 1, 64), jnp.int8)
        with pytest.raises(NotImplementedError, match="keys of int8 are not supported with bfloat16 queries"):
            self.run(key=packed, value=packed, block_table=None, kv_start_loc=jnp.asarray([0]))


class TestChoice:
    LAYER = jattn.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)

    FP8 = ("float8_e4m3fn", "float8_e5m2")

    def kernel(self, spec=LAYER, *, max_kv=65536, tokens=512, dtypes=FP8, scales=("static", "static")):
        cache = CacheFormat("NHD", tuple(map(jnp.dtype, dtypes)), scales)
        layer = LayerConfig(
            spec=spec, query_dtype=jnp.dtype(jnp.bfloat16), cache=cache, has_aligned_keys=True
        )
        bucket = Bucket(max_decodes=0, max_prefills=4, max_prefill_tokens=tokens)
        return choose_kernel(layer, RegionSizes("prefill", bucket, max_kv // 16, 16), None)

    def test_kernel_dequantizes_few_queries_over_many_keys(self):
        kernel = self.kernel()
        assert str(kernel) == "varlen_prefill over 8 bits"
        assert (kernel.dequantizes, kernel.uses_cache_read) == (True, False)
        assert (kernel.sizes.pack_gqa, kernel.sizes.max_splits) == (4, 16)
        assert kernel.tiles == "128 x 64 keys, 3 stages, 4 heads of 32 tokens each"
        assert kernel_plan_key(kernel, self.LAYER) is not None  # layers share their schedule
        for changed in (
            self.kernel(tokens=516),  # 129 a request
            self.kernel(tokens=8192),
            self.kernel(max_kv=2048),
            self.kernel(dataclasses.replace(self.LAYER, batch_invariant=True)),
            self.kernel(dataclasses.replace(self.LAYER, head_dim=256)),
            self.kernel(dtypes=("int8", "bfloat16")),
            self.kernel(dtypes=("int8", "float8_e4m3fn")),  # more work a number: 64 tokens a request, not 128
            self.kernel(scales=("static", "token_head")),
            self.kernel(dtypes=("int8", "int8"), tokens=260),
        ):
            assert str(changed) == "cache_read, varlen_prefill"
            assert (changed.dequantizes, changed.uses_cache_read) == (False, True)
        for changed in (
            self.kernel(dtypes=("int8", "int8"), tokens=256),
            self.kernel(scales=("token_head", "static"), tokens=256),
        ):
            assert str(changed) == "varlen_prefill over 8 bits"


@pytest.mark.gpu
class TestOnGpu:
    WITH_SPLITS = tuple(case | {"splits": n} for case in cases(FACTORS | OF_8_BITS) for n in (1, MOST))

    @pytest.mark.parametrize(
        "case", select_each_value(WITH_SPLITS, pairs_of=("splits", "stored")), ids=case_id
    )
    def test_prefill_equals_float64(self, case, monkeypatch):
        split_every_tile(monkeypatch)
        problem = Problem(case)
        sizes = default_sizes(problem.spec.head_dim, is_quantized=True)
        q_heads, kv_heads = case["heads"]
        sizes = sizes if q_heads // kv_heads % 2 else packed_sizes(case, sizes)
        problem.check(*attend(problem, sizes=dataclasses.replace(sizes, max_splits=case["splits"])))
