"""Query tiles whose keys are divided into splits: contract, number of splits, and selection."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jattn
from jattn.batch.bucket import Bucket
from jattn.implementations.layer_config import CacheFormat, LayerConfig, RegionSizes
from jattn.implementations.mosaic_gpu import choose_kernel
from jattn.implementations.mosaic_gpu.kernel_config import PrefillKernelConfig
from jattn.implementations.mosaic_gpu.kernel_plans import kernel_plan_key
from pallas_kernels.shared.score import Score
from pallas_kernels.varlen_backward import BackwardSizes
from pallas_kernels.varlen_prefill import (
    COLUMNS,
    CallBounds,
    PrefillSizes,
    default_sizes,
    make_schedule,
    varlen_prefill,
)
from pallas_kernels.varlen_prefill import schedule as schedule_module
from pallas_kernels.varlen_prefill.schedule import (
    NUM_SPLITS_CANDIDATES,
    SPLIT_COLUMNS,
    TILE_OVERHEAD_KEYS,
    max_split_outputs,
)
from tests import assertions, contract
from tests.contract import Problem, case_id
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


@pytest.fixture
def cuts_everything(monkeypatch):
    monkeypatch.setattr(contract, "REGIONS", contract.REGIONS | LONG)
    split_every_tile(monkeypatch)


def cut(sizes):
    return dataclasses.replace(sizes, max_splits=MOST)


@pytest.mark.usefixtures("cuts_everything")
class TestContract:
    @pytest.mark.parametrize("case", cases(FAST)[1:8:6], ids=case_id)
    def test_prefill_equals_float64_for_combinations_of_features(self, case):
        problem = Problem(case)
        problem.check(*attend(problem, plgpu.InterpretGPUParams(), cut(sizes_of(case))))

    @pytest.mark.slow
    @pytest.mark.parametrize("case", cases(FACTORS)[::2], ids=case_id)
    def test_prefill_equals_float64_for_every_head_dim_and_block_size(self, case):
        problem = Problem(case)
        problem.check(*attend(problem, plgpu.InterpretGPUParams(), cut(sizes_of(case))))

    def test_outputs_without_lse_equal_float64(self):
        draw = lambda seed, rows: jax.random.normal(jax.random.key(seed), (rows, 2, 64), jnp.bfloat16)
        args, sizes = (draw(0, 70), draw(1, 300), draw(2, 300)), PrefillSizes(tile_kv=64, ctas=2)
        run = functools.partial(packed, [70], [300], *args, score=Score(scale=0.1))
        expected, _ = run(sizes=sizes)
        out, lse = run(sizes=cut(sizes))
        assert lse is None
        np.testing.assert_allclose(out.astype(jnp.float32), expected.astype(jnp.float32), atol=1e-2)

    def test_prefill_has_no_races(self):
        draw = lambda seed, rows: jax.random.normal(jax.random.key(seed), (rows, 2, 64), jnp.bfloat16)
        args, sizes = (draw(0, 128), draw(1, 320), draw(2, 320)), PrefillSizes(tile_kv=64, ctas=2)
        with assertions.assert_no_races(num_kernels=2):
            run = packed([128], [320], *args, score=Score(scale=0.1), sizes=cut(sizes), detect_races=True)
            jax.block_until_ready(run)


def make_rows(query_lens, seq_lens, *, q_heads=4, sizes):
    """Return a schedule and its live rows as dicts by column name."""
    starts = np.concatenate([[0], np.cumsum(query_lens)])
    schedule = make_schedule(
        jnp.asarray(starts, jnp.int32),
        jnp.asarray(seq_lens, jnp.int32),
        num_tokens=-(-int(starts[-1]) // 8) * 8 + 8,
        score=Score(scale=1.0),
        sizes=sizes,
        q_heads=q_heads,
    )
    names = (*COLUMNS, *SPLIT_COLUMNS)
    rows = [dict(zip(names, map(int, row), strict=False)) for row in np.asarray(schedule.table)]
    return schedule, rows[: int(schedule.num_valid[0])]


LENS = [
    ([128], [65536]),
    ([1, 300, 0, 64], [4000, 9000, 0, 64]),
    ([64] * 8, [512 << n for n in range(8)]),
    ([200, 30], [200, 30]),
    ([0, 0], [0, 0]),
]


class TestSchedule:
    @pytest.mark.parametrize("lens", LENS, ids=str)
    @pytest.mark.parametrize("q_heads", [1, 32])
    def test_splits_cover_the_keys_of_a_tile_once(self, lens, q_heads):
        sizes = PrefillSizes(tile_kv=64, max_splits=16)
        schedule, rows = make_rows(*lens, q_heads=q_heads, sizes=sizes)
        _, whole = make_rows(*lens, sizes=PrefillSizes(tile_kv=64))
        tile_of = lambda row: (row["req"], row["first_row"])
        assert {tile_of(row) for row in rows} == set(map(tile_of, whole))
        partials = []
        for tile in whole:
            splits_of_tile = [row for row in rows if tile_of(row) == tile_of(tile)]
            assert all(row[name] == tile[name] for row in splits_of_tile for name in COLUMNS)
            last = tile["position"] + tile["end"]
            num = -(-min(last, tile["seq_len"]) // 64) if tile["seq_len"] else 0
            ends = [row["skipped"] + row["split_tiles"] for row in splits_of_tile]
            assert [row["skipped"] for row in splits_of_tile] == [0, *ends[:-1]]
            assert ends[-1] >= num > ends[-1] - max(splits_of_tile[-1]["split_tiles"], 1)
            assert {row["num_splits"] for row in splits_of_tile} == {len(splits_of_tile)}
            if len(splits_of_tile) == 1:
                assert splits_of_tile[0]["split_output"] == -1
            else:
                partials.append([row["split_output"] for row in splits_of_tile])
        numbers = sorted(itertools.chain(*partials))
        assert numbers == list(range(len(numbers)))
        assert len(numbers) <= max_split_outputs(q_heads, sizes)
        assert all(nums == list(range(nums[0], nums[0] + len(nums))) for nums in partials)
        firsts = [index for index, row in enumerate(rows) if row["num_splits"] > 1 and row["skipped"] == 0]
        assert sorted(map(int, schedule.split_tiles.rows[: int(schedule.split_tiles.num_valid[0])])) == firsts

    def test_number_of_splits_minimizes_the_simulated_end(self):
        """Among candidates whose work tiles are assigned one by one."""
        draw, gained = np.random.default_rng(0), []
        for _ in range(60):
            sizes = PrefillSizes(tile_kv=64, max_splits=16)
            heads, count = int(draw.choice([4, 8, 16, 32])), int(draw.integers(1, 9))
            lens = np.exp(draw.uniform(np.log(64), np.log(65536), count)).astype(int)
            tiles = -(-lens // 64)
            chosen = schedule_module.choose_num_splits(
                jnp.asarray(tiles, jnp.int32), jnp.ones(count, bool), q_heads=heads, sizes=sizes
            )
            end = functools.partial(simulated, tiles, heads=heads, sizes=sizes)
            longest = [-(-max(tiles) // n) for n in NUM_SPLITS_CANDIDATES]
            other_splits = [np.maximum(-(-tiles // length), 1) for length in longest]
            allowed = [n for n in other_splits if n[n > 1].sum() <= max_split_outputs(heads, sizes)]
            ends = [end(n) + schedule_module.COMBINE_OVERHEAD_KEYS * (n > 1).any() for n in allowed]
            np.testing.assert_array_equal(chosen, allowed[int(np.argmin(ends))])
            gained.append(end(np.ones(count, int)) / end(np.asarray(chosen)))
        assert np.median(gained) > 1.5  # or there would be no point in it

    def test_short_requests_are_not_split(self):
        _, rows = make_rows([1024], [1024], q_heads=32, sizes=PrefillSizes(tile_kv=64, max_splits=16))
        assert all(row["split_output"] == -1 for row in rows)

    def test_unsupported_splits_are_rejected(self):
        sizes = PrefillSizes(max_splits=2)
        args = jnp.asarray([0, 8]), jnp.asarray([8])
        options = {"num_tokens": 8, "score": Score(scale=1.0), "sizes": sizes}
        with pytest.raises(ValueError, match=r"max_splits=.* requires q_heads"):
            make_schedule(*args, **options)
        with pytest.raises(ValueError, match="max_splits must be 1 with tile lists, got 2"):
            make_schedule(*args, **options, q_heads=1, has_lists=True)
        with pytest.raises(ValueError, match="max_splits must be 1 with batch_invariant, got 2"):
            PrefillSizes(max_splits=2, batch_invariant=True)
        with pytest.raises(ValueError, match="max_splits must be at most 16, got 17"):
            PrefillSizes(max_splits=17)
        with pytest.raises(ValueError, match=r"dq_sizes\.max_splits must be 1, got 2"):
            BackwardSizes(dq_sizes=sizes)

    def test_schedule_of_other_splits_is_rejected(self):
        x, starts, lens = jnp.zeros((8, 1, 64), jnp.bfloat16), jnp.asarray([0, 8]), jnp.asarray([8])
        whole = make_schedule(starts, lens, num_tokens=8, score=Score(scale=1.0), sizes=PrefillSizes())
        arrays = {"score": Score(scale=1.0), "kv_start_loc": jnp.asarray([0])}
        with pytest.raises(
            ValueError, match=r"built for sizes=.*max_splits=1.*, but this call has sizes=.*max_splits=2"
        ):
            varlen_prefill(x, x, x, starts, lens, **arrays, schedule=whole, sizes=PrefillSizes(max_splits=2))


@pytest.mark.parametrize(
    "score",
    [
        {"window": (5, 0)},
        {"window": (5, 3), "causal": False},
        {"window": (5, None)},
        {"chunk_size": 16},
        {"chunk_size": 16, "causal": False},
        {"chunk_size": 4, "window": (9, None)},
    ],
    ids=str,
)
def test_windows_and_chunks_bound_the_keys_of_adjacent_tiles(score):
    score, rows, keys = Score(scale=1.0, **score), 24, 200
    position = jnp.arange(keys, dtype=jnp.int32)
    low, high = (np.asarray(end) for end in score.key_range(position, jnp.int32(keys)))
    low, high = np.maximum(low, 0), np.minimum(high, keys)
    most = max(high[i : i + rows].max() - low[i : i + rows].min() for i in range(keys - rows))
    assert most <= score.max_visible_keys(rows) < keys
    assert Score(scale=1.0, causal=score.causal).max_visible_keys(rows) is None


def simulated(tiles, splits, *, heads, sizes):
    """Return when the last thread block ends, in keys, with work tiles assigned as by
    PrefillTileScheduler.
    """
    split_tiles = np.repeat(-(-tiles // splits), splits)
    work_tiles = np.repeat(np.sort(split_tiles)[::-1], heads) * sizes.tile_kv + TILE_OVERHEAD_KEYS
    cta_work = np.zeros(sizes.workers)
    for i, first in enumerate(range(0, len(work_tiles), sizes.workers)):
        dealt = work_tiles[first : first + sizes.workers]
        index = np.arange(len(dealt))
        cta_work[index if i % 2 == 0 else sizes.workers - 1 - index] += dealt
    return cta_work.max()


class TestChoice:
    LAYER = jattn.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)

    def kernel(self, spec=LAYER, *, max_kv=65536, tokens=256, stored="bfloat16"):
        scales = ("static" if stored == "int8" else None,) * 2
        cache = CacheFormat("NHD", (jnp.dtype(stored),) * 2, scales) if stored else None
        layer = LayerConfig(
            spec=spec, query_dtype=jnp.dtype(jnp.bfloat16), cache=cache, has_aligned_keys=True
        )
        bucket = Bucket(max_decodes=0, max_prefills=4, max_prefill_tokens=tokens)
        kernel = choose_kernel(layer, RegionSizes("prefill", bucket, max_kv // 16, 16), None)
        assert isinstance(kernel, PrefillKernelConfig), kernel
        return kernel

    def test_few_tokens_over_many_keys_are_split(self):
        kernel = self.kernel()
        assert kernel.sizes.max_splits == 16
        assert kernel.split == "by tiles of queries, the keys of each in up to 16 splits"
        assert self.kernel(stored="int8").sizes.max_splits == 16
        for changed in (
            self.kernel(tokens=8192),
            self.kernel(max_kv=2048),
            self.kernel(stored=None),
            self.kernel(dataclasses.replace(self.LAYER, batch_invariant=True)),
            self.kernel(dataclasses.replace(self.LAYER, window=(1024, None))),
            self.kernel(dataclasses.replace(self.LAYER, chunk_size=512)),
        ):
            assert changed.sizes.max_splits == 1
            assert changed.split == "by tiles of queries"

    def test_layers_with_other_heads_have_separate_schedules(self):
        specs = self.LAYER, dataclasses.replace(self.LAYER, num_q_heads=64)
        for tokens, different in ((8, 2), (8192, 1)):
            keys = {kernel_plan_key(self.kernel(spec, tokens=tokens), spec) for spec in specs}
            assert len(keys) == different

    def test_default_sizes_follow_a_given_schedule(self):
        """A schedule without splits, for sizes that the kernel would not choose by default."""
        draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        args = draw(0, 8, 2, 64), draw(1, 4, 16, 1, 64), draw(2, 4, 16, 1, 64)
        lens, table = (
            (jnp.asarray([0, 8]), jnp.asarray([40])),
            jnp.pad(jnp.asarray([[1, 2, 3]]), ((0, 0), (0, 253))),
        )
        run = functools.partial(varlen_prefill, *args, *lens, score=Score(scale=0.1), block_table=table)
        schedule = make_schedule(*lens, num_tokens=8, score=Score(scale=0.1), sizes=default_sizes(64))
        shapes = [jax.eval_shape(lambda s=s: run(schedule=s)[0]).shape for s in (None, schedule)]
        assert shapes == [(8, 2, 64)] * 2

    def test_default_sizes_equal_the_planned_ones(self):
        assert default_sizes(128, bounds=CallBounds(256, 4, 32, 8, 65536)) == self.kernel().sizes


@pytest.mark.gpu
@pytest.mark.usefixtures("cuts_everything")
class TestOnGpu:
    @pytest.mark.parametrize("case", select_each_value(cases(FACTORS)), ids=case_id)
    def test_prefill_equals_float64(self, case):
        problem = Problem(case)
        problem.check(*attend(problem, sizes=cut(default_sizes(problem.spec.head_dim))))
