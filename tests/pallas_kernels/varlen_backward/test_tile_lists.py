"""varlen_backward over tile lists: every mask with lists against float64, on a CPU and a GPU."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jattn
from jattn import masks
from jattn.implementations.mosaic_gpu.tile_lists import (
    MaskBounds,
    PackedLens,
    backward_sizes,
    packed_block_size,
    packed_query_block_size,
    plan_backward_mask,
    why_not_backward_lists,
)
from pallas_kernels.list_tiles import encode_tiles
from pallas_kernels.shared.score import Score
from pallas_kernels.shared.tile_codes import QUERY_BLOCK_SHIFT
from pallas_kernels.varlen_backward import (
    BackwardSizes,
    QueryTiles,
    default_sizes,
    make_schedule,
    make_tile_lists,
    varlen_backward,
)
from pallas_kernels.varlen_backward.schedule import COLUMNS, max_tiles
from pallas_kernels.varlen_prefill import PrefillSizes
from tests import aot, assertions
from tests.pallas_kernels.varlen_backward.backward_problem import BackwardProblem, Setting
from tests.pallas_kernels.varlen_backward.test_entry import plain_arguments, two_kernels

INTERPRETED = plgpu.InterpretGPUParams()
LENS, ALIGNED_LENS = (150, 0, 3, 270), (152, 0, 8, 270)
RNG = np.random.default_rng(0)
DOCUMENTS = np.cumsum(RNG.random((4, 300)) < 0.02, axis=1).astype(np.int32)
WIDE, FINE = RNG.random((4, 2, 3, 3)) < 0.5, RNG.random((2, 24, 24)) < 0.3
MIDDLE = np.random.default_rng(2).random((4, 2, 5, 5)) < 0.4
TALL = np.random.default_rng(1).random((2, 3, 10)) < 0.4
VERTICAL, SLASHES = RNG.random((2, 333)) < 0.05, RNG.random((2, 37)).repeat(10, axis=1) < 0.2
PAIRS = RNG.random((2, 300, 300)) < 0.3
SMALL = np.random.default_rng(3).random((2, 10, 10)) < 0.4
odd = lambda head, query, key: (query * 3 + key + head) % 4 != 0
BLOCKS_OF_64 = masks.BlockMask(blocks=MIDDLE, block_q=64, block_kv=64)
MASKS = {
    "blocks_of_128": masks.BlockMask(blocks=WIDE, block_q=128, block_kv=128),
    "blocks_of_16": masks.BlockMask(blocks=FINE, block_q=16, block_kv=16),
    "blocks_of_32": masks.BlockMask(blocks=TALL, block_q=128, block_kv=32) & masks.Causal(),
    "strided": masks.LocalStrided(block_size=64, local_blocks=1, vert_stride=3),
    "documents": masks.Document(ids=DOCUMENTS),
    "documents_and_window": masks.Document(ids=DOCUMENTS) & masks.Window(left=40),
    "prefix": masks.Prefix(length=np.array([120, 3, 2, 200], np.int32)),
    "vertical_slash": masks.VerticalSlash(columns=VERTICAL, slashes=SLASHES),
    "formula": masks.MaskFunction(odd),
    "pairs": masks.BlockMask(blocks=PAIRS, block_q=1, block_kv=1),
}
# Masks for which each warpgroup is a team. Tiles of all but the first hold several blocks of queries.
TEAM_MASKS = {
    "blocks_of_64": BLOCKS_OF_64,
    "blocks_of_16": MASKS["blocks_of_16"],
    "blocks_of_32": MASKS["blocks_of_32"],
    "small_blocks": masks.BlockMask(blocks=SMALL, block_q=32, block_kv=32) & masks.Causal(),
    "small_blocks_of_documents": masks.BlockMask(blocks=SMALL, block_q=32, block_kv=64)
    & masks.Document(ids=DOCUMENTS),
    "slashes": dataclasses.replace(MASKS["vertical_slash"], num_gathered=50).split_gathered().remainder,
}
TEAM_CASES = [
    ("blocks_of_64", 128),
    ("small_blocks", 128),
    *[
        pytest.param(name, dim, marks=pytest.mark.slow)
        for name, dim in (("small_blocks_of_documents", 64), ("slashes", 128), ("blocks_of_16", 64))
    ],
    *[pytest.param("blocks_of_64", dim, marks=pytest.mark.slow) for dim in (64, 80)],
    *[pytest.param(name, 128, marks=pytest.mark.slow) for name in ("blocks_of_16", "blocks_of_32")],
]


def problem_of(name, *, head_dim=64, lens=None, is_aligned=False, **changes):
    lens = lens or (ALIGNED_LENS if is_aligned else LENS)
    score = Score(scale=head_dim**-0.5, **changes)
    setting = Setting(
        query_lens=lens, seq_lens=lens, score=score, heads=(2, 1), head_dim=head_dim,
        mask=(MASKS | TEAM_MASKS)[name], gap=0,
        is_aligned=is_aligned,
    )  # fmt: skip
    return BackwardProblem(setting)


def jitted(problem, *, sizes=None, interpret=None):
    """Return a function that computes a problem's gradients and its lists; the first call compiles it."""
    setting = problem.setting
    sizes = default_sizes(setting.head_dim) if sizes is None else sizes
    window = None if setting.score.window == (None, None) else setting.score.window
    spec = jattn.AttentionSpec(
        num_q_heads=setting.heads[0], num_kv_heads=setting.heads[1], head_dim=setting.head_dim,
        causal=setting.score.causal, window=window,
    )  # fmt: skip
    assert why_not_backward_lists(setting.mask, spec, sizes) is None

    @jax.jit
    def run(mask, arguments):
        lens = PackedLens(*(arguments[name] for name in PackedLens._fields))
        tokens, kv_tokens = (arguments[name].shape[0] for name in ("query", "key"))
        head_options = {"kv_heads": setting.heads[1], "head_dim": setting.head_dim}
        layer_options = {**head_options, "score": setting.score, "sizes": sizes}
        schedule = make_schedule(
            *lens, kv_tokens=kv_tokens, num_tokens=tokens, has_lists=True, **layer_options
        )
        bounds = {"num_rows": tokens, "max_seq_len": max(setting.seq_lens), "is_aligned": setting.is_aligned}
        lists, pair_mask = plan_backward_mask(mask, spec, lens, schedule, sizes=sizes, **bounds)
        options = {"lists": lists, "mask": pair_mask}
        options |= {"score": setting.score, "sizes": sizes, "has_aligned_keys": setting.is_aligned}
        return varlen_backward(**arguments, schedule=schedule, **options, interpret=interpret)

    return functools.partial(run, setting.mask, problem.arguments)


def grads_of(problem, **options):
    return jitted(problem, **options)()


def sizes_for(problem):
    """Return the default sizes for the problem's mask."""
    (q_heads, kv_heads), head_dim = problem.setting.heads, problem.setting.head_dim
    spec = jattn.AttentionSpec(num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=head_dim)
    return backward_sizes(problem.setting.mask, spec, mean_len=100)


def listed_queries(mask, spec, sizes, tokens):
    """Return the queries per listed block of one request."""
    bounds = MaskBounds(tokens, is_aligned=False)
    counts = {"num_query_tiles": tokens // 64, "num_key_tiles": tokens // 64}
    return packed_query_block_size(mask, spec, sizes, bounds, **counts)


def one_block(sizes):
    """Return the sizes with one thread block."""
    return dataclasses.replace(sizes, ctas=1, dq_sizes=dataclasses.replace(sizes.dq_sizes, ctas=1))


class TestContract:
    @pytest.mark.parametrize(
        "name",
        [
            *(pytest.param(x, marks=pytest.mark.slow) for x in ("blocks_of_128", "vertical_slash")),
            "formula",
            "pairs",
        ],
    )
    def test_gradients_under_masks_equal_float64(self, name):
        problem = problem_of(name)
        problem.check(grads_of(problem, sizes=BackwardSizes(tile_q=128, ctas=2), interpret=INTERPRETED))

    def test_small_tiles_with_a_window_equal_float64(self):
        problem = problem_of("documents_and_window", head_dim=96, window=(60, 0))
        problem.check(grads_of(problem, sizes=BackwardSizes(tile_q=64, ctas=3), interpret=INTERPRETED))

    @pytest.mark.parametrize(
        "name", ["documents", "prefix", "vertical_slash", pytest.param("formula", marks=pytest.mark.slow)]
    )
    def test_query_kernel_equals_float64(self, name):
        """The next two tests have masks of blocks."""
        problem = problem_of(name)
        problem.check(grads_of(problem, sizes=two_kernels(64), interpret=INTERPRETED))

    def test_query_kernel_that_sums_outputs_equals_float64(self):
        problem, sizes = problem_of("strided", head_dim=128, window=(90, 0)), two_kernels(128)
        assert sizes.dq_computes_delta
        problem.check(grads_of(problem, sizes=sizes, interpret=INTERPRETED))

    @pytest.mark.parametrize("keys", [pytest.param(16, marks=pytest.mark.slow), 32])
    def test_query_kernel_over_packed_blocks_equals_float64(self, keys):
        problem, sizes = problem_of(f"blocks_of_{keys}", head_dim=128, lens=(3, 270)), two_kernels(128)
        spec = jattn.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=128)
        bounds = MaskBounds(270, is_aligned=False)
        assert packed_block_size(problem.setting.mask, spec, sizes.dq_sizes, bounds) == keys
        problem.check(grads_of(problem, sizes=sizes, interpret=INTERPRETED))

    @pytest.mark.parametrize(
        "name", ["blocks_of_32", pytest.param("blocks_of_16", marks=pytest.mark.slow), "blocks_of_64"]
    )
    def test_query_kernel_over_aligned_keys_equals_float64(self, name):
        """Entries say which blocks of queries attend to them, unless a listed block holds several."""
        problem, sizes = problem_of(name, head_dim=128, lens=(8, 270), is_aligned=True), two_kernels(128)
        problem.check(grads_of(problem, sizes=sizes, interpret=INTERPRETED))

    @pytest.mark.parametrize(("name", "head_dim"), TEAM_CASES)
    def test_teams_of_one_warpgroup_equal_float64(self, name, head_dim):
        problem = problem_of(name, head_dim=head_dim, lens=(70, 0, 3, 150))
        sizes = one_block(sizes_for(problem))
        assert sizes.teams == 2
        problem.check(grads_of(problem, sizes=sizes, interpret=INTERPRETED))

    @pytest.mark.parametrize("name", ["blocks_of_64", "small_blocks"])
    def test_teams_of_one_warpgroup_have_no_races(self, name):
        """Several work tiles per team; no row is cleared or stored by two of them."""
        score = Score(scale=0.1)
        setting = Setting(
            query_lens=(320,), seq_lens=(320,), score=score, head_dim=128, mask=TEAM_MASKS[name], gap=0
        )
        problem = BackwardProblem(setting)
        sizes, interpret = one_block(sizes_for(problem)), plgpu.InterpretGPUParams(detect_races=True)
        run = jitted(problem, sizes=sizes, interpret=interpret)
        with assertions.assert_no_races(num_kernels=2):
            problem.check(run())

    @pytest.mark.parametrize("name", [pytest.param("blocks_of_64", marks=pytest.mark.slow), "small_blocks"])
    def test_splits_of_lists_add_up_to_float64(self, name):
        problem = problem_of(name, head_dim=128, lens=(3, 200))
        sizes = dataclasses.replace(one_block(sizes_for(problem)), list_splits=3)
        problem.check(grads_of(problem, sizes=sizes, interpret=INTERPRETED))

    @pytest.mark.parametrize("head_dim", [pytest.param(192, marks=pytest.mark.slow), 256])
    def test_separate_key_and_value_kernels_equal_float64(self, head_dim):
        problem = problem_of("blocks_of_16", head_dim=head_dim, lens=(3, 135))
        problem.check(grads_of(problem, sizes=two_kernels(head_dim), interpret=INTERPRETED))


class TestSizes:
    @pytest.mark.parametrize(
        ("mask", "leaves_few"),
        [
            (None, False),
            (MASKS["blocks_of_16"], True),
            (MASKS["vertical_slash"], False),
            (MASKS["formula"], False),
            (MASKS["formula"] & MASKS["documents"], True),
            (MASKS["vertical_slash"] | MASKS["strided"], False),
            (masks.Sinks(4) | masks.Window(left=40), True),
            (masks.Window(right=3), False),
            (~masks.Sinks(4), False),
        ],
    )
    def test_two_kernels_run_for_sparse_masks_over_long_requests(self, mask, leaves_few):
        spec = jattn.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=128)
        sizes = backward_sizes(mask, spec, mean_len=10**5)
        assert (sizes.dq_sizes is not None) == leaves_few

    @pytest.mark.parametrize(
        ("block_q", "block_kv", "dq_teams", "teams"),
        [
            (64, 64, 2, 2),
            (16, 16, 2, 2),
            (128, 32, 1, 2),
            (64, 128, 2, 1),
            (32, 128, 2, 2),
            (128, 128, 1, 1),
            (1, 1, 1, 1),
        ],
    )
    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_blocks_smaller_than_tiles_get_a_team_per_warpgroup(
        self, block_q, block_kv, dq_teams, teams, head_dim
    ):
        spec = jattn.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=head_dim)
        mask = masks.BlockMask(blocks=np.ones((2, 4, 4), bool), block_q=block_q, block_kv=block_kv)
        sizes = backward_sizes(mask, spec, mean_len=8192)
        assert (1 if sizes.dq_sizes is None else sizes.dq_sizes.teams, sizes.teams) == (dq_teams, teams)

    @pytest.mark.parametrize(
        ("name", "tokens", "expected"),
        [
            ("blocks_of_16", 128 * 1024, 16),
            ("blocks_of_16", 256 * 1024, 32),
            ("small_blocks", 256 * 1024, 32),
            ("small_blocks", 512 * 1024, None),
            ("small_blocks_of_documents", 8192, 32),
            ("slashes", 8192, 32),
            ("blocks_of_64", 8192, None),
            ("blocks_of_32", 8192, None),
        ],
    )
    def test_small_blocks_of_queries_are_listed_if_the_lists_fit(self, name, tokens, expected):
        spec = jattn.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=128)
        mask = TEAM_MASKS[name]
        sizes = backward_sizes(mask, spec, mean_len=8192)
        assert sizes.teams == 2
        assert listed_queries(mask, spec, sizes, tokens) == expected
        assert listed_queries(mask, spec, two_kernels(128), tokens) is None

    def test_masks_of_single_pairs_list_tiles(self):
        spec = jattn.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=128)
        mask = MASKS["blocks_of_16"] & MASKS["formula"]
        sizes = backward_sizes(mask, spec, mean_len=8192)
        assert listed_queries(mask, spec, sizes, 8192) is None

    @pytest.mark.parametrize(
        ("mask", "splits"),
        [
            (masks.Sinks(4) | masks.Window(left=99), 4),
            (masks.BigBird(), 4),
            (masks.BigBird(global_blocks=0), 1),
            (masks.Window(left=99), 1),
            (BLOCKS_OF_64, 1),
        ],
    )
    def test_lists_of_masks_with_common_keys_are_split(self, mask, splits):
        spec = jattn.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=128)
        assert backward_sizes(mask, spec, mean_len=8192).list_splits == splits
        rows = {"mean_len": 8192, "rows_per_token": 2}
        assert backward_sizes(BLOCKS_OF_64, spec, **rows).list_splits == 4

    @pytest.mark.parametrize(("changes", "has_two"), [({}, False), ({"window": (1023, 0)}, True)])
    def test_windows_determine_whether_two_kernels_run(self, changes, has_two):
        spec = jattn.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=128, **changes)
        assert (backward_sizes(None, spec, mean_len=8192).dq_sizes is not None) == has_two


class TestLists:
    def test_teams_list_the_query_tiles_of_their_64_keys(self):
        """Literal codes: query tile 0 sees key tile 1 partly, query tile 1 sees both fully."""
        sizes, lens = BackwardSizes(teams=2, dq_sizes=PrefillSizes()), jnp.asarray([128], jnp.int32)
        starts = jnp.asarray([0, 128], jnp.int32)
        static = {"kv_tokens": 128, "kv_heads": 1, "head_dim": 128, "score": Score(scale=1.0, causal=False)}
        schedule = make_schedule(starts, lens, starts[:1], **static, num_tokens=128, sizes=sizes)
        some = jnp.asarray([[[0, 1]], [[1, 1]]], bool)
        every = jnp.asarray([[[0, 0]], [[1, 1]]], bool)
        ends = jnp.asarray([64, 64], jnp.int32)
        tiles = QueryTiles(jnp.asarray([0, 2], jnp.int32), ends - 64, ends)
        lists = make_tile_lists(schedule, tiles, encode_tiles(some, every), kv_heads=1, sizes=sizes)
        assert schedule.table[:2, COLUMNS.index("first_key_row")].tolist() == [0, 64]
        assert [lists.num_partial[:2].tolist(), lists.num_full[:2].tolist()] == [[0, 1], [1, 1]]
        assert [lists.entries[0, 0], *lists.entries[1, :2]] == [1, 0, 1]

    def test_blocks_of_queries_are_listed_by_their_index(self):
        """Literal codes: of four blocks of 32 queries, key tile 0 sees block 1 partly and block 3 fully."""
        sizes, lens = BackwardSizes(teams=2, dq_sizes=PrefillSizes()), jnp.asarray([128], jnp.int32)
        starts = jnp.asarray([0, 128], jnp.int32)
        static = {"kv_tokens": 128, "kv_heads": 1, "head_dim": 128, "score": Score(scale=1.0, causal=False)}
        schedule = make_schedule(starts, lens, starts[:1], **static, num_tokens=128, sizes=sizes)
        some = jnp.asarray([[[0, 1]], [[1, 1]], [[0, 1]], [[1, 0]]], bool)
        every = jnp.asarray([[[0, 1]], [[0, 1]], [[0, 1]], [[1, 0]]], bool)
        ends = jnp.full(4, 32, jnp.int32)
        blocks = QueryTiles(jnp.asarray([0, 4], jnp.int32), ends - 32, ends)
        codes = encode_tiles(some, every)
        lists = make_tile_lists(schedule, blocks, codes, kv_heads=1, sizes=sizes, list_block_size=32)
        assert [lists.num_partial[:2].tolist(), lists.num_full[:2].tolist()] == [[1, 0], [1, 3]]
        assert [*lists.entries[0, :2], *lists.entries[1, :3]] == [1, 3, 0, 1, 2]
        assert lists.order[:2].tolist() == [1, 0]  # two steps before one
        assert lists.built_for == dataclasses.replace(schedule.built_for, list_block_size=32)

    def test_each_visible_tile_is_listed_once_for_its_keys(self):
        """Literal codes: query tile 1 sees key tile 0 partly, query tile 2 sees both key tiles fully."""
        sizes, lens = BackwardSizes(tile_q=64), jnp.asarray([192], jnp.int32)
        starts = jnp.asarray([0, 192], jnp.int32)
        score = Score(scale=1.0, causal=False)
        static = {"kv_tokens": 256, "kv_heads": 1, "head_dim": 64, "score": score, "sizes": sizes}
        schedule = make_schedule(starts, lens, starts[:1], **static)
        some = jnp.asarray([[[0, 0]], [[1, 0]], [[1, 1]]], bool)
        every = jnp.asarray([[[0, 0]], [[0, 0]], [[1, 1]]], bool)
        ends = jnp.asarray([64, 64, 64], jnp.int32)
        tiles = QueryTiles(jnp.asarray([0, 3], jnp.int32), ends - 64, ends)
        lists = make_tile_lists(schedule, tiles, encode_tiles(some, every), kv_heads=1, sizes=sizes)
        numbers = schedule.table[:, COLUMNS.index("kv_tile")].tolist()
        entries = {}
        for row, number in enumerate(numbers[:2]):
            partial, full = int(lists.num_partial[row]), int(lists.num_full[row])
            entries[number] = lists.entries[row, : partial + full].tolist(), partial
        # There are 192 keys, so the second tile is never full.
        assert entries == {0: ([1, 2], 1), 1: ([2], 1)}
        assert lists.order.tolist()[:2] == [numbers.index(0), numbers.index(1)]

    def test_list_entry_tells_which_warpgroups_keys_are_visible(self):
        """Literal codes of 64 keys each: an invisible half does not make the tile partial."""
        sizes, lens = default_sizes(128, deterministic=True), jnp.asarray([192], jnp.int32)
        starts = jnp.asarray([0, 192], jnp.int32)
        static = {"kv_tokens": 192, "kv_heads": 1, "head_dim": 128, "score": Score(scale=1.0, causal=False)}
        schedule = make_schedule(starts, lens, starts[:1], **static, num_tokens=192, sizes=sizes)
        some = jnp.asarray([[[0, 1, 1]], [[1, 1, 0]], [[1, 0, 0]]], bool)
        every = jnp.asarray([[[0, 1, 1]], [[1, 0, 0]], [[0, 0, 0]]], bool)
        ends = jnp.asarray([64, 64, 64], jnp.int32)
        tiles = QueryTiles(jnp.asarray([0, 3], jnp.int32), ends - 64, ends)
        lists = make_tile_lists(schedule, tiles, encode_tiles(some, every), kv_heads=1, sizes=sizes)
        numbers, entries_by_number = schedule.table[:, COLUMNS.index("kv_tile")].tolist(), {}
        for row, number in enumerate(numbers[:2]):
            partial, full = int(lists.num_partial[row]), int(lists.num_full[row])
            entries = lists.entries[row, : partial + full].tolist()
            entries_by_number[number] = [divmod(entry, 1 << QUERY_BLOCK_SHIFT) for entry in entries], partial
        # (visible halves, query tile): the second half of the first tile is full, the others are partial.
        assert entries_by_number == {0: ([(0b01, 2), (0b11, 1), (0b10, 0)], 2), 1: ([(0b01, 0)], 0)}


def lists_for(sizes, name="strided"):
    """Return lists for `plain_arguments`."""
    return planned_for(sizes, name)[0]


def planned_for(sizes, name):
    """Return the lists and the pair masks for `plain_arguments`."""
    arguments, score = plain_arguments(), Score(scale=1.0)
    lens = PackedLens(*(arguments[field] for field in PackedLens._fields))
    spec = jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64)
    static = {"kv_tokens": 16, "kv_heads": 2, "head_dim": 64, "score": score, "sizes": sizes}
    schedule = make_schedule(*lens, **static, num_tokens=16)
    bounds = {"num_rows": 16, "max_seq_len": 16, "sizes": sizes}
    return plan_backward_mask(MASKS[name], spec, lens, schedule, **bounds)


class TestRefusals:
    def test_mask_without_lists_is_rejected(self):
        _, mask = planned_for(default_sizes(64), "formula")
        with pytest.raises(ValueError, match="mask requires lists"):
            varlen_backward(**plain_arguments(mask=mask))

    @pytest.mark.parametrize("names", [("order",), ("entries", "num_partial", "num_full")])
    def test_lists_of_other_tile_sizes_are_rejected(self, names):
        arguments, sizes = plain_arguments(), default_sizes(64)
        lens = [arguments[field] for field in PackedLens._fields]
        static = {"kv_heads": 2, "head_dim": 64, "score": Score(scale=1.0), "sizes": sizes}
        schedule = make_schedule(*lens, kv_tokens=16, **static)
        tiles = QueryTiles(*(jnp.zeros(n, jnp.int32) for n in (2, 1, 1)))
        codes = jnp.zeros((1, 4, 1), jnp.uint8)
        lists = make_tile_lists(schedule, tiles, codes, kv_heads=2, sizes=sizes)
        lists = lists._replace(**{name: getattr(lists, name)[:1] for name in names})
        assert max_tiles(16, 1, 128) == 1
        with pytest.raises(ValueError, match=rf"lists.{names[0]} must have shape .* got \(1,"):
            varlen_backward(**arguments, schedule=schedule, lists=lists)

    @pytest.mark.parametrize(
        ("built_for", "kernels", "message"),
        [
            ({}, {"deterministic": True}, r"lists\.dq_lists is required"),
            ({"deterministic": True}, {}, r"lists\.dq_lists requires a dq kernel"),
        ],
    )
    def test_lists_for_other_kernels_are_rejected(self, built_for, kernels, message):
        arguments, lists = plain_arguments(), lists_for(default_sizes(64, **built_for))
        with pytest.raises(ValueError, match=message):
            varlen_backward(**arguments, lists=lists, sizes=default_sizes(64, **kernels))

    def test_lists_of_blocks_that_the_sizes_do_not_support_are_rejected(self):
        lists = lists_for(default_sizes(64))
        lists = lists._replace(built_for=dataclasses.replace(lists.built_for, list_block_size=32))
        with pytest.raises(ValueError, match="list_block_size must be one of None, got 32"):
            varlen_backward(**plain_arguments(), lists=lists)

    def test_lists_of_other_kv_heads_are_rejected(self):
        lists = lists_for(default_sizes(64))
        lists = lists._replace(built_for=dataclasses.replace(lists.built_for, kv_heads=1))
        with pytest.raises(ValueError, match="lists was built for kv_heads=1, but this call has kv_heads=2"):
            varlen_backward(**plain_arguments(), lists=lists)

    def test_lists_of_another_step_are_rejected(self):
        lists = lists_for(default_sizes(64, deterministic=True))
        built_for_other = dataclasses.replace(lists.dq_lists.built_for, num_tokens=999)
        lists = lists._replace(dq_lists=lists.dq_lists._replace(built_for=built_for_other))
        with pytest.raises(
            ValueError, match=r"lists\.dq_lists was built for num_tokens=999, but this call has num_tokens=16"
        ):
            varlen_backward(**plain_arguments(), lists=lists)

    def test_splits_of_lists_need_lists(self):
        sizes = dataclasses.replace(default_sizes(64, deterministic=True), list_splits=2)
        with pytest.raises(ValueError, match=r"sizes\.list_splits must be 1 without lists, got 2"):
            varlen_backward(**plain_arguments(), sizes=sizes)
        with pytest.raises(ValueError, match="list_splits must be 1 without dq_sizes, got 2"):
            dataclasses.replace(default_sizes(64), list_splits=2)

    @pytest.mark.parametrize("sizes", [default_sizes(64), default_sizes(64, deterministic=True)])
    def test_lists_determine_which_kernels_run(self, sizes):
        arrays = plain_arguments()
        run = functools.partial(varlen_backward, score=arrays.pop("score"), lists=lists_for(sizes))
        jax.eval_shape(lambda arrays: run(**arrays), arrays)  # refuses lists of other sizes


class TestAheadOfTime:
    @pytest.mark.parametrize("name", [pytest.param("documents", marks=pytest.mark.slow), "vertical_slash"])
    def test_mask_arrays_are_loaded_from_unaligned_positions(self, name):
        """Queries start at any position, so a load of two elements would be unaligned."""
        aot.require_plugin()
        (ptx,) = aot.ptx_of(
            "tests.pallas_kernels.varlen_backward.backward_aot_cases", [f"d64-{name}"]
        ).values()
        (kernel,) = [part for part in ptx.split(".version") if ".entry varlen_backward" in part]
        assert re.findall(r"ld\.global\.b32", kernel)
        assert not re.findall(r"ld\.(?:global\.)?v\d", kernel)


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize(("name", "head_dim"), list(zip(MASKS, itertools.cycle([64, 96, 128]))))
    def test_gradients_under_masks_equal_float64(self, name, head_dim):
        problem = problem_of(name, head_dim=head_dim, lens=(150, 0, 3, 270))
        problem.check(grads_of(problem))

    @pytest.mark.parametrize(("name", "head_dim"), list(zip(MASKS, itertools.cycle([64, 96, 128, 256]))))
    def test_query_kernel_equals_float64(self, name, head_dim):
        problem, sizes = problem_of(name, head_dim=head_dim), default_sizes(head_dim, deterministic=True)
        run = jitted(problem, sizes=sizes)
        first = run()
        problem.check(first)
        for first_array, second_array in zip(first, run(), strict=True):
            np.testing.assert_array_equal(first_array, second_array)

    @pytest.mark.parametrize("is_aligned", [False, True])
    @pytest.mark.parametrize(("name", "head_dim"), TEAM_CASES)
    def test_teams_of_one_warpgroup_equal_float64(self, name, head_dim, is_aligned):
        problem = problem_of(name, head_dim=head_dim, is_aligned=is_aligned)
        run = jitted(problem, sizes=sizes_for(problem))
        first = run()
        problem.check(first)
        for first_array, second_array in zip(first, run(), strict=True):
            np.testing.assert_array_equal(first_array, second_array)
