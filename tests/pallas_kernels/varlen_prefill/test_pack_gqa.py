"""Query tiles with packed GQA heads: contract and refusals, on a CPU and a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.score import Score
from pallas_kernels.varlen_backward import BackwardSizes
from pallas_kernels.varlen_prefill import (
    CallBounds,
    PrefillSizes,
    default_sizes,
    make_schedule,
    varlen_prefill,
)
from tests import assertions, contract
from tests.contract import Problem, case_id, mark_every_second_slow
from tests.covering_array import select_each_value
from tests.pallas_kernels.varlen_prefill.split_everywhere import MOST, split_every_tile
from tests.pallas_kernels.varlen_prefill.test_entry import (
    FACTORS,
    FAST,
    LONG,
    attend,
    cases,
    packed,
    sizes_of,
)

# Groups of 6 and 12 share tiles by 2 and by 4 of their heads.
HEADS = [(2, 1), (4, 1), (8, 1), (4, 2), (8, 2), (6, 1), (12, 1)]
FEW_FACTORS = FAST | {"heads": [(2, 1), (4, 1), (8, 1), (6, 1)]}


@pytest.fixture(autouse=True)
def _long_regions(monkeypatch):
    monkeypatch.setattr(contract, "REGIONS", contract.REGIONS | LONG)


def packed_sizes(case, sizes, **changes):
    """Return sizes with as many packed heads as the case's group allows."""
    q_heads, kv_heads = case["heads"]
    together = max(n for n in (2, 4, 8) if q_heads // kv_heads % n == 0)
    return dataclasses.replace(sizes, pack_gqa=together, **changes)


class TestContract:
    @pytest.mark.parametrize("case", mark_every_second_slow(cases(FEW_FACTORS)[::6]), ids=case_id)
    def test_prefill_equals_float64_for_combinations_of_features(self, case):
        problem = Problem(case)
        problem.check(*attend(problem, plgpu.InterpretGPUParams(), packed_sizes(case, sizes_of(case))))

    @pytest.mark.parametrize("case", cases(FEW_FACTORS)[3:4], ids=case_id)
    def test_splits_equal_float64(self, case, monkeypatch):
        split_every_tile(monkeypatch)
        problem = Problem(case)
        sizes = packed_sizes(case, sizes_of(case), max_splits=MOST)
        problem.check(*attend(problem, plgpu.InterpretGPUParams(), sizes))

    @pytest.mark.slow
    @pytest.mark.parametrize("splits", [1, MOST])
    @pytest.mark.parametrize("case", cases(FACTORS | {"heads": HEADS})[::2], ids=case_id)
    def test_prefill_equals_float64_for_every_head_dim_and_block_size(self, case, splits, monkeypatch):
        split_every_tile(monkeypatch)
        problem = Problem(case)
        sizes = packed_sizes(case, sizes_of(case), max_splits=splits)
        problem.check(*attend(problem, plgpu.InterpretGPUParams(), sizes))

    @pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.slow), 3])
    def test_prefill_has_no_races(self, splits, monkeypatch):
        split_every_tile(monkeypatch)
        draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        sizes = PrefillSizes(tile_kv=64, ctas=2, pack_gqa=4, max_splits=splits)
        args = draw(0, 64, 4, 64), draw(1, 200, 1, 64), draw(2, 200, 1, 64)
        with assertions.assert_no_races(num_kernels=1 if splits == 1 else 2):
            run = packed([64], [200], *args, score=Score(scale=0.1), sizes=sizes, detect_races=True)
            jax.block_until_ready(run)


def test_tokens_per_tile_are_divided_by_the_packed_heads():
    starts, lens = jnp.asarray([0, 100]), jnp.asarray([1000])
    options = {"num_tokens": 104, "score": Score(scale=1.0)}
    alone, shared = (
        make_schedule(starts, lens, **options, sizes=PrefillSizes(pack_gqa=n)).num_valid[0] for n in (1, 4)
    )
    assert (alone, shared) == (2, 5)  # 100 tokens and 4 of padding, in tiles of 128 and of 32


def test_unsupported_packing_is_rejected():
    x, lens = jnp.zeros((8, 6, 64), jnp.bfloat16), (jnp.asarray([0, 8]), jnp.asarray([8]))
    run = lambda n: varlen_prefill(
        x, x[:, ::3], x[:, ::3], *lens,
        score=Score(scale=1.0), kv_start_loc=jnp.asarray([0]), sizes=PrefillSizes(pack_gqa=n),
    )  # fmt: skip
    with pytest.raises(ValueError, match="pack_gqa must divide the 3 query heads per KV head, got 2"):
        run(2)
    with pytest.raises(ValueError, match="pack_gqa must be one of"):
        run(3)
    with pytest.raises(ValueError, match=r"dq_sizes\.pack_gqa must be 1, got 2"):
        BackwardSizes(dq_sizes=PrefillSizes(pack_gqa=2))


class TestChoice:
    @pytest.mark.parametrize(("heads", "together"), [(32, 4), (64, 4), (48, 2), (8, 1), (24, 1), (128, 4)])
    def test_at_most_four_heads_are_packed(self, heads, together):
        assert default_sizes(128, bounds=CallBounds(64, 1, heads, 8, 65536)).pack_gqa == together

    def test_only_few_queries_are_packed(self):
        few = CallBounds(256, 4, 32, 8, 65536)
        assert default_sizes(128, bounds=few).pack_gqa == 4
        for changed in (few._replace(num_tokens=8192), few._replace(max_kv=2048)):
            assert default_sizes(128, bounds=changed).pack_gqa == 1
        assert default_sizes(128, bounds=few, batch_invariant=True).pack_gqa == 1
        assert default_sizes(128, bounds=few, has_lists=True).pack_gqa == 1

    @pytest.mark.parametrize(
        ("tokens", "reqs", "tile_q"),
        [(64, 1, 128), (128, 1, 128), (96, 1, 192), (512, 1, 192), (512, 8, 128), (512, 256, 192)],
    )
    def test_tile_height_follows_the_average_request(self, tokens, reqs, tile_q):
        """512 tokens of at most 256 requests may belong to one request; of at most 8 they count as evenly
        distributed.
        """
        assert default_sizes(128, bounds=CallBounds(tokens, reqs, 32, 8, 65536)).tile_q == tile_q


@pytest.mark.gpu
class TestOnGpu:
    WITH_SPLITS = tuple(case | {"splits": n} for case in cases(FACTORS | {"heads": HEADS}) for n in (1, MOST))

    @pytest.mark.parametrize(
        "case", select_each_value(WITH_SPLITS, pairs_of=("splits", "heads")), ids=case_id
    )
    def test_prefill_equals_float64(self, case, monkeypatch):
        split_every_tile(monkeypatch)
        problem = Problem(case)
        sizes = packed_sizes(case, default_sizes(problem.spec.head_dim), max_splits=case["splits"])
        problem.check(*attend(problem, sizes=sizes))
