"""varlen_prefill over tile lists: every mask with lists against the float64 oracle, on a CPU and a GPU."""

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jattn
from jattn import masks
from jattn.batch.metadata import abstract_metadata
from jattn.implementations.layer_config import layer_config, region_sizes
from jattn.implementations.mosaic_gpu import (
    block_lists,
    choose_kernel,
    score_of,
    sparse_sizes,
    tile_lists,
)
from pallas_kernels import target
from pallas_kernels.list_tiles import QUERY_BLOCK_SHIFT, encode_tiles
from pallas_kernels.ptx import tile_order
from pallas_kernels.shared.arithmetic import sort_ranks
from pallas_kernels.shared.score import Score
from pallas_kernels.varlen_prefill import (
    Joined,
    PairTile,
    PrefillSchedule,
    PrefillSizes,
    make_tile_lists,
    varlen_prefill,
)
from pallas_kernels.varlen_prefill.mask_policies import WindowWords
from pallas_kernels.varlen_prefill.schedule import (
    COLUMNS,
    LIST_COLUMNS,
    TABLE_WIDTH,
    PrefillScheduleKey,
    make_schedule,
)
from tests import aot, assertions, contract
from tests.attention_problems import PACKED_KV
from tests.contract import FACTORS, case_id
from tests.covering_array import covering_array, select_each_value
from tests.pallas_kernels.varlen_prefill.sparse_aot_cases import aot_cases
from tests.pallas_kernels.varlen_prefill.tile_list_problem import TileListCase
from tests.regions import attend_region

pytestmark = pytest.mark.usefixtures("few_thread_blocks")

# Rows that start inside a query block and inside 8 rows, several blocks, one token, none.
LONG = {"prompts": ([150, 0, 3, 270], [150, 0, 3, 270], 1), "behind": ([70, 3, 131], [370, 130, 332], 1)}
SHORT = {
    "neighbours": ([13, 200], [13, 200], 1),
    "late": ([16], [370], 1),
    "many": ([3, 130], [5, 333], 1),
    "decode_65": ([1], [65], 1),
    "one_left": ([13], [206], 1),
    "prompt_206": ([206], [206], 1),
    "one_more": ([130], [200], 1),
}
RNG = np.random.default_rng(0)
WIDE, SMALL, FINE = RNG.random((4, 2, 3, 3)) < 0.5, RNG.random((4, 6, 6)) < 0.4, RNG.random((2, 24, 24)) < 0.3
DOCUMENTS = np.cumsum(RNG.random((4, 300)) < 0.02, axis=1).astype(np.int32)
LENGTHS = np.array([120, 3, 340, 200], np.int32)
VERTICAL, SLASHES = RNG.random((4, 333)) < 0.05, RNG.random((4, 37)).repeat(10, axis=1) < 0.2
PAIRS = RNG.random((2, 370, 370)) < 0.3
strided = masks.LocalStrided(block_size=64, local_blocks=1, vert_stride=3)
odd = lambda head, query, key: (query + key) % 2 == 1
strange = lambda head, query, key: (query * 3 + key + head) % 4 != 0


def sees_strided(r, h, i, j):
    a, b = i // 64, j // 64
    return b <= a and (a - b < 1 or (b + h + 1) % 3 == 0)


def document(r, i):
    return DOCUMENTS[r, min(i, 299)]


def sees_slashed(r, h, i, j):
    return (j < 333 and VERTICAL[h, j]) or (0 <= i - j < 370 and SLASHES[h, i - j])


MASKS = {
    "blocks_128": (
        masks.BlockMask(blocks=WIDE, block_q=128, block_kv=128),
        lambda r, h, i, j: WIDE[r, h // 2, i // 128, j // 128],
    ),
    "blocks_64": (
        masks.BlockMask(blocks=SMALL, block_q=64, block_kv=64),
        lambda r, h, i, j: SMALL[h, i // 64, j // 64],
    ),
    "blocks_of_all_queries": (
        masks.BlockMask(blocks=SMALL[None, :, :1].repeat(4, 0), block_q=None, block_kv=64),
        lambda r, h, i, j: SMALL[h, 0, j // 64],
    ),
    "local_strided": (strided, sees_strided),
    "streaming": (
        masks.streaming_heads([1], num_first=2, num_recent=75),
        lambda r, h, i, j: h == 1 or j < 2 or i - j < 75,
    ),
    "blocks_and_formula": (
        masks.BlockMask(blocks=SMALL, block_q=64, block_kv=64) & masks.MaskFunction(strange),
        lambda r, h, i, j: SMALL[h, i // 64, j // 64] and strange(h, i, j),
    ),
    "sinks": (masks.Sinks(50), lambda r, h, i, j: j < 50),
    "half": (masks.MaskFunction(odd), lambda r, h, i, j: odd(h, i, j)),
    "causal_or_dilated": (
        masks.Causal() | masks.Dilated(18, 4),
        lambda r, h, i, j: j <= i or (abs(i - j) % 4 == 0 and abs(i - j) <= 72),
    ),
    "dilated": (
        masks.Dilated(20, 5) | masks.Sinks(3),
        lambda r, h, i, j: (abs(i - j) % 5 == 0 and abs(i - j) <= 100) or j < 3,
    ),
}
block_128, _ = MASKS["blocks_128"]
MASKS |= {
    "blocks_16": (
        masks.BlockMask(blocks=FINE, block_q=16, block_kv=16),
        lambda r, h, i, j: FINE[h // 2, i // 16, j // 16],
    ),
    "documents": (masks.Document(ids=DOCUMENTS), lambda r, h, i, j: document(r, i) == document(r, j)),
    "prefix": (
        masks.Prefix(length=LENGTHS) | masks.Window(left=70),
        lambda r, h, i, j: max(i, j) < LENGTHS[r] or i - j <= 70,
    ),
    "vertical_slash": (masks.VerticalSlash(columns=VERTICAL, slashes=SLASHES), sees_slashed),
    "either": (
        (block_128 | masks.VerticalSlash(columns=VERTICAL, slashes=SLASHES)) & masks.Document(ids=DOCUMENTS),
        lambda r, h, i, j: (
            (WIDE[r, h // 2, i // 128, j // 128] or sees_slashed(r, h, i, j))
            and document(r, i) == document(r, j)
        ),
    ),
}
MASKS["pairs"] = (
    masks.BlockMask(blocks=PAIRS, block_q=1, block_kv=1),
    lambda r, h, i, j: PAIRS[h // 2, i, j],
)
INTERPRET = plgpu.InterpretGPUParams()
CHOICES = {
    "mask": [name for name in MASKS if name not in ("sinks", "half", "causal_or_dilated")],
    "region": list(LONG),
    "causal": [True, False],
    "window": [None, (200, None)],
    "soft_cap": [None, 5.0],
    "alibi": [None, "linear"],
    "sinks": [False, True],
    "head_dim": [64, 128],
    "kv": ["NHD", "HND", *PACKED_KV],
    "block_size": [16, 64],
}
CASES = covering_array(CHOICES)


@pytest.fixture(autouse=True)
def _long_regions(monkeypatch):
    monkeypatch.setattr(contract, "REGIONS", contract.REGIONS | LONG | SHORT)


def solved(case, interpret=None, *, is_sparse=False):
    """Return the region's outputs by the kernels for a problem whose mask holds for every request."""
    plain = {name: values[0] for name, values in FACTORS.items()}
    mask, rule = MASKS[case["mask"]]
    case = plain | {"heads": (4, 2), "dtype": "bfloat16"} | case
    tile_kv = sparse_sizes(contract.make_spec(case), mask).tile_kv if is_sparse else None
    problem = TileListCase(case, mask=rule, sparse_tile_kv=tile_kv)
    metadata = problem.metadata
    region = metadata.decode_region if metadata.bucket.max_decodes else metadata.prefill_region
    problem.check_region(region, mask, interpret)


# Requests that begin within 8 rows of another's end; windows that begin, requests that end, within a tile.
POISONED = {
    "a neighbour's values": {"region": "neighbours", "mask": "dilated", "kv": "no_cache", "causal": False},
    "before a window, widened": {
        "region": "late", "mask": "dilated", "window": (150, None), "stored": "int8_scalar",
    },
    "before a window, in many tiles": {"region": "many", "mask": "half", "window": (64, 0), "kv": "no_cache"},
    "before a chunk, behind the end": {
        "region": "decode_65", "mask": "sinks", "chunk_size": 64, "causal": False, "sinks": True,
    },
    "behind the end": {
        "region": "one_left", "mask": "causal_or_dilated", "window": (0, 0), "kv": "HND", "block_size": 64,
        "causal": False,
    },
    "in the last block, which stands in for others": {
        "region": "one_more", "mask": "dilated", "window": (0, 0), "block_size": 64,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", POISONED)
def test_invisible_keys_may_have_any_value(name):
    solved({"head_dim": 64, "block_size": 16, "kv": "NHD"} | POISONED[name], INTERPRET)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "head_dim"), list(zip(POISONED, itertools.cycle([64, 128, 256]))))
def test_invisible_keys_may_have_any_value_on_a_gpu(name, head_dim):
    solved({"block_size": 16, "kv": "NHD"} | POISONED[name] | {"head_dim": head_dim})


@pytest.mark.parametrize("mask", ["blocks_128", "blocks_64"])
def test_unlisted_tiles_are_never_read(mask):
    case = {"region": "prompt_206", "mask": mask, "head_dim": 64, "block_size": 16, "kv": "HND"}
    solved(case, INTERPRET, is_sparse=True)


def test_nan_in_a_requests_values_does_not_reach_the_next_request():
    rows = lambda seed, heads: jax.random.normal(jax.random.key(seed), (213, heads, 64), jnp.bfloat16)
    spec = jattn.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=64)
    metadata = jattn.build_batch_metadata([13, 200], [13, 200], [[1], [*range(2, 15)]])
    run = functools.partial(
        attend_region, spec=spec, mask=masks.Sinks(4) | masks.Window(60, 0), interpret=INTERPRET
    )
    starts, v = jnp.asarray([0, 13], jnp.int32), rows(2, 1)

    def attended(v):
        kv = jattn.PackedKV(k=rows(1, 1), v=v, kv_start_loc=starts)
        out, _ = jax.jit(run)(rows(0, 1), kv, metadata.prefill_region, sinks=None, alibi_slopes=None)
        return np.asarray(out)

    poisoned = attended(v.at[12].set(jnp.nan))
    assert np.isnan(poisoned[12]).all()
    np.testing.assert_array_equal(poisoned[13:], attended(v)[13:])


@pytest.mark.parametrize("mask", ["either", "pairs"])
def test_prefill_equals_float64_under_any_mask(mask):
    """Bits of keys, of blocks and documents combined, or of pairs, over key tiles that start anywhere."""
    solved(next(case for case in CASES if (case["mask"], case["kv"]) == (mask, "no_cache")), INTERPRET)


@pytest.mark.parametrize("mask", ["vertical_slash", "local_strided"])
def test_prefill_in_tiles_of_warps_of_32_rows_equals_float64(mask):
    """Bits of keys, or a formula, by one warpgroup with 128 rows."""
    case = {"mask": mask, "head_dim": 64, "region": "prompt_206", "kv": "NHD", "block_size": 16}
    with target("8.0"):
        solved(case, INTERPRET)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_prefill_equals_float64_for_combinations_of_features(case):
    solved(case, INTERPRET)


@pytest.mark.gpu
@pytest.mark.parametrize("case", select_each_value(CASES), ids=case_id)
def test_prefill_equals_float64_on_a_gpu(case):
    solved(case)


def test_sort_ranks_is_stable():
    ranks = sort_ranks(jnp.asarray([[3, 1, 3, -2], [5, 5, 5, 4]]))
    np.testing.assert_array_equal(ranks, [[2, 1, 3, 0], [1, 2, 3, 0]])


def test_list_entry_tells_which_query_blocks_see_the_tile():
    blocks = jnp.asarray([[[True, False, False], [True, True, False], [False, False, True]]])
    mask = masks.BlockMask(blocks=blocks, block_q=64, block_kv=64)
    spec = jattn.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=64)
    sizes = PrefillSizes(tile_kv=64)
    schedule = make_schedule(
        jnp.asarray([0, 192]),
        jnp.asarray([192]),
        num_tokens=192,
        score=score_of(spec),
        sizes=sizes,
        has_lists=True,
    )
    lists = tile_lists.plan_mask(mask, spec, schedule, sizes, tile_lists.MaskBounds(192)).lists
    column = len(COLUMNS) + LIST_COLUMNS.index("list")
    entries = np.asarray(lists.entries)[np.asarray(lists.table)[:2, column]]
    # Queries 0 to 127 see tile 0, in the diagonal block only in part, and their second half tile 1.
    assert entries[0, :2].tolist() == [1 + (0b010 << QUERY_BLOCK_SHIFT), 0 + (0b011 << QUERY_BLOCK_SHIFT)]
    assert entries[1, 0] == 2 + (0b001 << QUERY_BLOCK_SHIFT)
    assert int(lists.num_valid[0]) == int(schedule.num_valid[0])


MADE_FOR = PrefillScheduleKey(8, (True, (None, None), None, 1), PrefillSizes(), None, True, True)


def test_sets_of_heads_alternate_between_descending_and_ascending_lists():
    lens = np.asarray([[1, 3, 2, 0], [2, 4, 4, 5], [5, 5, 5, 5]])  # of a tile and head; the last is not live
    some = jnp.arange(6)[None, None, :] < jnp.asarray(lens)[:, :, None]
    table = jnp.zeros((3, 32), jnp.int32).at[:, 0].set(jnp.asarray([7, 8, 9]))
    starts = jnp.zeros(2, jnp.int32)
    schedule = PrefillSchedule(table, jnp.asarray([2]), starts, None, MADE_FOR)
    lists = make_tile_lists(schedule, encode_tiles(some, some), sets=2)
    columns = [COLUMNS.index("req"), *(len(COLUMNS) + LIST_COLUMNS.index(name) for name in ("head", "num"))]
    work_tiles = np.asarray(lists.table)[: int(lists.num_valid[0]), columns].tolist()
    assert work_tiles == [
        [7, 0, 1],
        [8, 0, 2],
        [7, 1, 3],
        [8, 1, 4],
        [8, 3, 5],
        [8, 2, 4],
        [7, 2, 2],
        [7, 3, 0],
    ]
    longest = int(lists.table[4, len(COLUMNS) + LIST_COLUMNS.index("list")])
    np.testing.assert_array_equal(lists.entries[longest], [0, 1, 2, 3, 4, 0])


def lists_of_any_lengths(tiles, heads, max_len, num_valid):
    """Return a table of tiles, the number of live tiles, entries and counts per head; dead tiles are
    garbage.
    """
    rng = np.random.default_rng(tiles)
    as_jax = lambda x: jnp.asarray(x, jnp.int32)
    table = rng.integers(0, 2**20, (tiles, TABLE_WIDTH))
    entries = rng.integers(0, 2**20, (tiles * heads, max_len))
    partial, full = rng.integers(0, max_len // 2 + 1, (2, tiles * heads))
    full = np.where(rng.random(tiles * heads) < 0.5, full, full // 8)  # ties
    dead = np.arange(tiles * heads) >= num_valid * heads
    partial[dead], full[dead] = 2**31 - 1, -7
    return tuple(map(as_jax, (table, [num_valid], entries, partial, full)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tiles", "heads", "max_len", "num_valid", "sets"),
    [
        (1, 2, 1, 1, 1),
        (5, 12, 9, 4, 3),
        (130, 32, 128, 129, 8),
        (66, 32, 300, 40, 1),
        (2050, 16, 2048, 2049, 4),
    ],
)
def test_work_tiles_sorted_by_the_kernel_equal_those_of_xla(tiles, heads, max_len, num_valid, sets):
    arrays = lists_of_any_lengths(tiles, heads, max_len, num_valid)
    assert tile_order.has_kernel(num_tiles=tiles * heads // sets, max_len=max_len)
    static = {"columns": len(COLUMNS), "sets": sets, "max_len": max_len}
    table, count = jax.jit(functools.partial(tile_order.sort_work_tiles.on_gpu, **static))(*arrays)
    expected, want_count = jax.jit(functools.partial(tile_order.sort_work_tiles.fallback, **static))(*arrays)
    np.testing.assert_array_equal(count, want_count)
    live = slice(0, num_valid * heads), slice(0, len(COLUMNS) + len(LIST_COLUMNS))
    np.testing.assert_array_equal(table[live], expected[live])


def test_masks_compile_without_per_row_bounds():
    """Pallas finds no layout for unused per-row values, and searches for minutes."""
    aot.require_plugin()
    names = ["blocks_of_all_queries-encoder-64-64", "vertical_slash-encoder-64-64"]
    assert list(aot.compile_all("tests.pallas_kernels.varlen_prefill.sparse_aot_cases", names)) == names


@functools.cache
def compiled():
    aot.require_plugin()
    return aot.compile_all("tests.pallas_kernels.varlen_prefill.sparse_aot_cases", list(aot_cases()))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(aot_cases()))
def test_shipped_kernels_compile_and_spill_little(name):
    """Stores and loads are counted; a mask of key and query positions spills most."""
    spilled = collections.defaultdict(int)
    for kernel in compiled()[name]:  # with gathered columns there are two of one name
        spilled[kernel.name] = max(spilled[kernel.name], kernel.spilled_bytes)
    for small in ("list_tiles", "sort_work_tiles"):  # jax 0.12 compiles what two cases share but once
        assert spilled.pop(f"{small}_mosaic_gpu_kernel", 0) == 0
    assert list(spilled) == ["varlen_prefill_mosaic_gpu_kernel"]
    assert max(spilled.values()) <= 80


class PlainTile(PairTile):
    """A tile outside of a kernel: rows from position 150 and columns from position 100."""

    row_positions, first_column, shape = 150 + jnp.arange(64, dtype=jnp.int32), jnp.int32(100), (64, 128)

    def __init__(self, has_key_rows):
        object.__setattr__(self, "has_key_rows", has_key_rows)

    def fill_rows(self, x):
        return jnp.full(self.shape[:1], x)


@pytest.mark.parametrize("has_key_rows", [False, True])
@pytest.mark.parametrize(
    ("left", "right"),
    [(30, 5), (2**31 - 1, None), (None, 2**31 - 1), (3, 2**31 - 2), (2**30, 2**30), (2**30 - 1, 2**30 - 1)],
)
def test_windows_longer_than_any_request_hide_no_key(left, right, has_key_rows):
    tile = PlainTile(has_key_rows)
    window = WindowWords(left=left, right=right)
    words = np.stack(window.visible(tile, ()), axis=1).astype(np.uint32)
    seen = (words[:, :, None] >> np.arange(32, dtype=np.uint32) & 1).reshape(64, 128) != 0
    ahead = 100 + np.arange(128)[None, :] - np.arange(150, 214)[:, None]
    ahead = -ahead if has_key_rows else ahead
    is_near = (left is None or ahead >= -left) & (right is None or ahead <= right)
    np.testing.assert_array_equal(seen, np.broadcast_to(is_near, (64, 128)))


@pytest.mark.parametrize(
    ("mask", "q_heads", "message"),
    [
        (masks.Sinks(1), 4, "block lists support masks of full blocks only"),
        (strided, 22, "at most 10 query heads with different blocks per KV head"),
        (
            masks.LocalStrided(block_size=48),
            4,
            "block lists do not support blocks of 48 keys over cache blocks of 16",
        ),
    ],
)
def test_masks_without_block_lists_are_rejected_by_name(mask, q_heads, message):
    spec = jattn.AttentionSpec(num_q_heads=q_heads, num_kv_heads=2, head_dim=64)
    (region,) = region_sizes(jattn.build_batch_metadata([1], [5], [[1]], block_size=16))
    assert message in block_lists.list_block_size(mask, spec, region)


@pytest.mark.parametrize(
    ("sizes", "served_by"),
    [
        ({"max_decodes": 2, "max_blocks": 65535}, "paged_decode over lists of blocks of 16"),
        ({"max_decodes": 2, "max_blocks": 65536}, "varlen_prefill over lists of tiles"),
        ({"max_prefills": 1, "max_prefill_tokens": 9, "max_blocks": 262140}, "varlen_prefill over lists"),
        (
            {"max_prefills": 1, "max_prefill_tokens": 9, "max_blocks": 262141},
            "tile lists of 65536 tiles of 64 keys exceed the maximum of 65535 tiles",
        ),
    ],
)
def test_length_of_lists_determines_the_kernel(sizes, served_by):
    spec = jattn.AttentionSpec(
        num_q_heads=2, num_kv_heads=2, head_dim=64, sparsity=masks.LocalStrided(block_size=16)
    )
    cache = jattn.CacheSpec(num_blocks=64, block_size=16, num_kv_heads=2, head_dim=64)
    (region,) = region_sizes(abstract_metadata(jattn.Bucket(**sizes), 16))
    assert served_by in str(choose_kernel(layer_config(spec, cache), region, spec.sparsity))


def test_a_mask_without_lists_is_rejected():
    x = jnp.zeros((8, 1, 64), jnp.bfloat16)
    starts = jnp.asarray([0, 8]), jnp.asarray([8])
    run = functools.partial(varlen_prefill, score=Score(scale=1.0), sizes=PrefillSizes())
    with pytest.raises(ValueError, match="mask requires tile lists"):
        run(x, x, x, *starts, kv_start_loc=jnp.asarray([0]), mask=Joined(operands=(), is_union=False))


def test_lists_distinguish_at_most_ten_query_blocks():
    schedule = PrefillSchedule(jnp.zeros((1, 32), jnp.int32), jnp.ones(1, jnp.int32), None, None, MADE_FOR)
    message = r"block_q=4 splits a query tile of 128 tokens into 33 blocks, but at most 10 are supported"
    with pytest.raises(ValueError, match=message):
        make_tile_lists(schedule, jnp.zeros((1, 1, 1), jnp.uint8), block_q=4)


@pytest.mark.slow
def test_prefill_over_lists_has_no_races():
    spec = jattn.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=64)
    metadata = jattn.build_batch_metadata([256], [256], [[1, 2, 3, 4]], block_size=64).prefill_region
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    cache = jattn.PagedCache(k=draw(0, 5, 64, 1, 64), v=draw(1, 5, 64, 1, 64))
    mask = masks.BlockMask(blocks=SMALL[:2, :4, :4] | np.eye(4, dtype=bool), block_q=64, block_kv=64)
    run = functools.partial(attend_region, spec=spec, interpret=plgpu.InterpretGPUParams(detect_races=True))
    with assertions.assert_no_races(num_kernels=1):
        jax.block_until_ready(jax.jit(run)(draw(2, 256, 2, 64), cache, metadata, mask=mask))
