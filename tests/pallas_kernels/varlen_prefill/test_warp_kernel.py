"""The prefill kernel of GPUs without wgmma: contract, splits and packed heads, sizes and compilation."""

import dataclasses

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import target
from pallas_kernels.architectures import ARCHITECTURES
from pallas_kernels.shared.memory import HEAD_DIMS, head_chunks
from pallas_kernels.varlen_prefill import CallBounds, MaskBlocks, PrefillSizes, default_sizes
from pallas_kernels.varlen_prefill.sizes import COLUMN_BYTES, CTA_BYTES, MAX_SPLITS
from tests import aot, contract
from tests.contract import Problem, case_id
from tests.covering_array import select_each_value
from tests.pallas_kernels.varlen_prefill.prefill_aot_cases import STORED, aot_cases
from tests.pallas_kernels.varlen_prefill.split_everywhere import MOST, split_every_tile
from tests.pallas_kernels.varlen_prefill.test_entry import FACTORS, LONG, attend, cases, plain_case

WITHOUT_WGMMA = [gpu for gpu, architecture in ARCHITECTURES.items() if not architecture.has_wgmma]
SMALL = PrefillSizes(
    tile_kv=64, stages=1, warpgroups=1, query_buffers=1, ctas=3, per_warp_mma=True, gpu="8.0"
)


@pytest.fixture(autouse=True)
def _long_regions(monkeypatch):
    monkeypatch.setattr(contract, "REGIONS", contract.REGIONS | LONG)


def cases_of_older_architectures():
    """Return cases with every head_dim, for which 8.0 and 8.9 have different tiles."""
    on_each = [case | {"gpu": gpu} for case in cases(FACTORS) for gpu in ("8.0", "8.9")]
    return select_each_value(on_each, pairs_of=("gpu", "head_dim"))


def check(case, **changes):
    problem = Problem(case)
    problem.check(*attend(problem, plgpu.InterpretGPUParams(), dataclasses.replace(SMALL, **changes)))


class TestContract:
    def test_one_warpgroup_with_one_stage_over_a_paged_cache(self):
        check(plain_case(region="behind", window=(20, 0), sinks=True, block_size=8))

    def test_two_warpgroups_with_two_stages_over_packed_keys(self):
        case = plain_case(region="behind", kv="no_cache", alibi="linear", head_dim=80, dtype="float16")
        check(case, warpgroups=2, stages=2)

    def test_warps_of_32_rows(self):
        check(plain_case(region="behind", window=(20, 0), sinks=True, block_size=16), warp_rows=32)

    def test_splits_of_packed_heads_of_warps_of_32_rows(self, monkeypatch):
        split_every_tile(monkeypatch)
        case = plain_case(region="behind", heads=(4, 1), sinks=True, alibi="linear")
        check(case, max_splits=MOST, pack_gqa=2, warp_rows=32)

    @pytest.mark.slow
    @pytest.mark.parametrize("case", cases(FACTORS)[::2], ids=case_id)
    def test_combinations_of_features(self, case):
        tile_kv = 64 if case["head_dim"] > 128 or case["causal"] else 128
        check(case, warpgroups=1 if case["sinks"] else 2, stages=2 if case["alibi"] else 1, tile_kv=tile_kv)

    @pytest.mark.slow
    def test_splits_of_packed_heads(self, monkeypatch):
        split_every_tile(monkeypatch)
        case = plain_case(region="behind", heads=(4, 1), sinks=True, alibi="linear")
        check(case, max_splits=MOST, pack_gqa=2, warpgroups=2)


class TestSizes:
    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    @pytest.mark.parametrize("gpu", WITHOUT_WGMMA)
    def test_tiles_fit_shared_memory(self, gpu, head_dim):
        sizes, architecture = default_sizes(head_dim, gpu=gpu), ARCHITECTURES[gpu]
        needed = sizes.shared_memory(head_chunks(head_dim).padded_dim) + COLUMN_BYTES + CTA_BYTES
        assert (sizes.per_warp_mma, sizes.gpu) == (True, gpu)
        assert sizes.ctas // architecture.num_sms * needed <= architecture.smem_bytes + CTA_BYTES

    @pytest.mark.parametrize(
        ("gpu", "head_dim", "warp_rows", "tile_q", "ctas_per_sm"),
        [("8.0", 128, 32, 128, 2), ("8.6", 64, 32, 128, 2), ("8.9", 128, 16, 64, 2), ("8.0", 192, 16, 64, 2),
         ("8.0", 256, 16, 128, 1), ("12.0", 256, 16, 64, 1)],
    )  # fmt: skip
    def test_two_thread_blocks_run_per_sm_if_they_fit(self, gpu, head_dim, warp_rows, tile_q, ctas_per_sm):
        sizes = default_sizes(head_dim, gpu=gpu)
        ctas = ctas_per_sm * ARCHITECTURES[gpu].num_sms
        assert (sizes.warp_rows, sizes.tile_q, sizes.ctas) == (warp_rows, tile_q, ctas)

    def test_few_queries_get_splits_and_packed_heads(self):
        bounds = CallBounds(num_tokens=256, reqs=1, q_heads=32, kv_heads=8, max_kv=65536)
        sizes = default_sizes(128, bounds=bounds, gpu="8.0")
        assert (sizes.max_splits, sizes.pack_gqa) == (MAX_SPLITS, 4)
        assert default_sizes(128, bounds=bounds, batch_invariant=True, gpu="8.0").max_splits == 1
        many = bounds._replace(num_tokens=65536)
        assert default_sizes(128, bounds=many, gpu="8.0") == default_sizes(128, gpu="8.0")

    def test_tiles_do_not_cut_the_blocks_of_a_mask(self):
        blocks = MaskBlocks(queries=(64,), keys=(64,))
        assert default_sizes(128, has_lists=True, blocks=blocks, gpu="8.0").tile_q == 64
        assert default_sizes(128, has_lists=True, blocks=MaskBlocks((128,), (64,)), gpu="8.0").tile_q == 128

    @pytest.mark.parametrize(
        ("change", "message"),
        [({"warpgroups": 3}, "warpgroups must be one of 1, 2, got 3"),
         ({"query_buffers": 2}, "query_buffers must be one of 1, got 2"),
         ({"stages": 0}, "stages must be positive"),
         ({"warp_rows": 64}, "warp_rows must be one of 16, 32, got 64"),
         ({"per_warp_mma": False, "warpgroups": 2, "stages": 2}, "per_warp_mma must be True without wgmma"),
         ({"gpu": "7.5"}, "gpu must be one of '8.0'")],
    )  # fmt: skip
    def test_invalid_sizes_are_refused(self, change, message):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(SMALL, **change)


class TestAheadOfTime:
    def check(self, names, gpu, max_spilled_bytes=lambda name: 0):
        aot.require_plugin()
        reports = aot.compile_all("tests.pallas_kernels.varlen_prefill.prefill_aot_cases", names, gpu)
        for name, kernels in reports.items():
            assert kernels, name
            assert max(kernel.spilled_bytes for kernel in kernels) <= max_spilled_bytes(name), name

    @pytest.mark.parametrize(
        ("gpu", "max_spilled_bytes"),
        [("8.0", {"d128-plain-packed-bfloat16": 160, "d64-cap_alibi-HND256-bfloat16": 0}),
         ("12.0", {"d128-window_sinks-NHD8-bfloat16": 0})],
        ids=["8.0", "12.0"],
    )  # fmt: skip
    def test_a_sample_compiles_with_few_spills(self, gpu, max_spilled_bytes):
        self.check(list(max_spilled_bytes), gpu, max_spilled_bytes.get)

    @pytest.mark.slow
    @pytest.mark.parametrize("gpu", WITHOUT_WGMMA)
    def test_all_shipped_kernels_compile_and_spill_little(self, gpu):
        """Stores and loads are counted.

        Accumulators of 16 rows and 256 columns, or of 32 rows and 128 columns, take half of a thread's
        registers. The loop over unmasked tiles of 32 rows spills nothing without a soft cap and ALiBi; of its
        instructions at most 2 % are spills, with a sqrt-ALiBi of packed heads.
        """
        names = [name for name in aot_cases() if not any(f"-{stored}-" in name for stored in STORED)]

        def max_spilled_bytes(name):
            head_dim = int(name[1 : name.index("-")])
            columns, rows = head_chunks(head_dim).padded_dim, default_sizes(head_dim, gpu=gpu).warp_rows
            return {(256, 16): 400, (128, 32): 1000}.get((columns, rows), 64)

        self.check(names, gpu, max_spilled_bytes)


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("case", cases_of_older_architectures(), ids=case_id)
    def test_prefill_of_an_older_architecture_equals_float64(self, case):
        problem = Problem(case)
        with target(case["gpu"]):
            problem.check(*attend(problem))
