"""varlen_prefill over lists of blocks that are smaller than a tile, against the float64 oracle."""

import dataclasses
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
from jattn.implementations.mosaic_gpu import choose_kernel, tile_lists
from pallas_kernels.list_tiles import encode_tiles
from pallas_kernels.shared.score import Score
from pallas_kernels.varlen_prefill import (
    BlockBits,
    PairTile,
    PrefillSizes,
    make_schedule,
    make_tile_lists,
)
from pallas_kernels.varlen_prefill.schedule import COLUMNS, PACKED_LIST_COLUMNS
from tests import assertions, contract
from tests.attention_problems import PACKED_KV
from tests.contract import FACTORS, case_id
from tests.covering_array import covering_array, select_each_value
from tests.pallas_kernels.varlen_prefill.tile_list_problem import TileListCase
from tests.regions import attend_region, kernel_for

pytestmark = pytest.mark.usefixtures("few_thread_blocks")

# Requests that start inside 8 rows and inside blocks, of several tiles, of one token, without tokens.
REGIONS = {
    "prompts": ([150, 0, 3, 270], [150, 0, 3, 270], 1),
    "behind": ([70, 3, 131], [370, 130, 332], 1),
    "prompt_206": ([206], [206], 1),
    "neighbours": ([13, 200], [13, 200], 1),
}
RNG = np.random.default_rng(0)
WIDE_32, WIDE_16, WIDE_64 = (
    RNG.random((heads, 3, 384 // keys)) < 0.4 for heads, keys in ((4, 32), (2, 16), (4, 64))
)
OWN_16, SMALL_32 = RNG.random((4, 2, 24, 24)) < 0.3, RNG.random((4, 12, 12)) < 0.4
ROWS_32 = RNG.random((2, 384, 12)) < 0.3
LATER, FIRST = RNG.random((4, 4, 9, 12)) < 0.3, np.array([2, 0, 3, 1], np.int32)
ALL_32 = RNG.random((4, 4, 1, 12)) < 0.4
DOCUMENTS = np.cumsum(RNG.random((4, 384)) < 0.02, axis=1).astype(np.int32)
PER_KV_HEAD = {size: RNG.random((2, 384 // size, 384 // size)) < 0.4 for size in (16, 32, 64)}
VERTICAL, SLASHES = RNG.random((2, 4, 4, 37)).repeat(9, axis=-1) < 0.15
FOR_ALL_HEADS = RNG.random((1, 12, 12)) < 0.4


def block_mask(blocks, block_q, block_kv):
    return masks.BlockMask(blocks=blocks, block_q=block_q, block_kv=block_kv)


def slashed(r, h, i, j):
    return (j < 333 and VERTICAL[r, h, j]) or (0 <= i - j < 333 and SLASHES[r, h, i - j])


def strided(r, h, i, j, *, size=64, local_blocks=1):
    a, b = i // size, j // size
    return b <= a and (a - b < local_blocks or (b + h + 1) % 3 == 0)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class EvenBlocks(masks.Mask):
    """A mask of a user, which does not depend on the query."""

    block_shape = None, 32

    def visible(self, pairs):
        return (pairs.key & 32) == 0


MASKS = {
    "128_32": (block_mask(WIDE_32, 128, 32), lambda r, h, i, j: WIDE_32[h, i // 128, j // 32]),
    "128_16": (block_mask(WIDE_16, 128, 16), lambda r, h, i, j: WIDE_16[h // 2, i // 128, j // 16]),
    "128_64": (block_mask(WIDE_64, 128, 64), lambda r, h, i, j: WIDE_64[h, i // 128, j // 64]),
    "16_16": (block_mask(OWN_16, 16, 16), lambda r, h, i, j: OWN_16[r, h // 2, i // 16, j // 16]),
    "32_32": (block_mask(SMALL_32, 32, 32), lambda r, h, i, j: SMALL_32[h, i // 32, j // 32]),
    "1_32": (block_mask(ROWS_32, 1, 32), lambda r, h, i, j: ROWS_32[h // 2, i, j // 32]),
    "all_32": (block_mask(ALL_32, None, 32), lambda r, h, i, j: ALL_32[r, h, 0, j // 32]),
    "later_32": (
        masks.BlockMask(blocks=LATER, first_q_block=FIRST, block_q=32, block_kv=32),
        lambda r, h, i, j: 0 <= i // 32 - FIRST[r] < 9 and LATER[r, h, i // 32 - FIRST[r], j // 32],
    ),
    "documents_32": (
        block_mask(WIDE_32, 128, 32) & masks.Document(ids=DOCUMENTS) & masks.Causal(),
        lambda r, h, i, j: WIDE_32[h, i // 128, j // 32] and DOCUMENTS[r, i] == DOCUMENTS[r, j] and j <= i,
    ),
}
MORE_MASKS = {
    "even_32": (EvenBlocks(), lambda r, h, i, j: j // 32 % 2 == 0),
    "strided_64": (masks.LocalStrided(block_size=64, local_blocks=1, vert_stride=3), strided),
    "strided_32": (
        masks.LocalStrided(block_size=32, local_blocks=2, vert_stride=3) & masks.Causal(),
        lambda r, h, i, j: j <= i and strided(r, h, i, j, size=32, local_blocks=2),
    ),
    "slashes_32": (
        masks.VerticalSlash(columns=VERTICAL[0], slashes=SLASHES[0]),
        lambda r, *p: slashed(0, *p),
    ),
    "slashes_of_each_row_and_blocks_32": (
        masks.VerticalSlash(columns=VERTICAL, slashes=SLASHES)
        & (block_mask(WIDE_32, 128, 32) & masks.Document(ids=DOCUMENTS)),
        lambda r, h, i, j: (
            slashed(r, h, i, j) and WIDE_32[h, i // 128, j // 32] and DOCUMENTS[r, i] == DOCUMENTS[r, j]
        ),
    ),
}
MORE_MASKS["slashes_64"] = MORE_MASKS["slashes_32"]
SHARED_MASKS = ["shared_16", "shared_32", "shared_64", "for_all_heads_32", "shared_documents_32"]
# Query heads per KV head -> heads per tile, by the queries per block of a mask that they share.
PACKED_HEADS = {
    1: {16: 1, 32: 1, 64: 1},
    2: {16: 2, 32: 2, 64: 2},
    3: {16: 1, 32: 1, 64: 1},
    4: {16: 4, 32: 4, 64: 2},
    8: {16: 8, 32: 4, 64: 2},
}
CHOICES = {
    "mask": list(MASKS),
    "region": ["prompts", "behind"],
    "causal": [True, False],
    "window": [None, (200, None)],
    "soft_cap": [None, 5.0],
    "alibi": [None, None, None, "linear"],  # over whole tiles
    "stored": ["plain", "plain", "fp8_scalar"],
    "sinks": [False, True],
    "head_dim": [64, 128],
    "dtype": ["bfloat16", "float16"],
    "kv": ["NHD", "HND", *PACKED_KV],
    "block_size": [16, 64],
}
CASES = covering_array(
    CHOICES, lambda case: case.get("kv") not in PACKED_KV or case.get("stored") != "fp8_scalar"
)
SHARED_CASES = covering_array(
    CHOICES
    | {
        "mask": SHARED_MASKS,
        "heads": [(2 * group, 2) for group in PACKED_HEADS],
        "window": [None, None, (200, None)],
        "head_dim": [64, 128, 256],
    },
    lambda case: case.get("kv") not in PACKED_KV or case.get("stored") != "fp8_scalar",
)
MORE_CASES = [
    {"mask": "slashes_32", "region": "behind", "head_dim": 128, "kv": "HND", "window": (200, None)},
    {
        "mask": "slashes_32",
        "region": "prompts",
        "kv": "NHD",
        "block_size": 64,
        "causal": False,
        "sinks": True,
    },
    {"mask": "slashes_32", "region": "prompts", "head_dim": 128, "kv": "no_cache", "dtype": "float16"},
    {"mask": "slashes_of_each_row_and_blocks_32", "region": "behind", "kv": "NHD", "stored": "fp8_scalar"},
    {"mask": "strided_32", "region": "behind", "head_dim": 128, "kv": "NHD", "window": (200, None)},
]
INTERPRET = plgpu.InterpretGPUParams()


@pytest.fixture(autouse=True)
def _regions(monkeypatch):
    monkeypatch.setattr(contract, "REGIONS", contract.REGIONS | REGIONS)


def shared_mask(name, num_q_heads):
    """Return a mask that the query heads of each KV head share, and its rule."""
    size, has_documents = int(name.rpartition("_")[2]), "documents" in name
    blocks = FOR_ALL_HEADS if name == "for_all_heads_32" else PER_KV_HEAD[size]
    heads_per_entry = num_q_heads // len(blocks)

    def sees(r, h, i, j):
        is_in_document = not has_documents or DOCUMENTS[r, i] == DOCUMENTS[r, j]
        return blocks[h // heads_per_entry, i // size, j // size] and is_in_document

    mask = block_mask(blocks, size, size)
    return (mask & masks.Document(ids=DOCUMENTS) if has_documents else mask), sees


def solved(case, interpret=None, *, is_sparse=False):
    """Check the region's outputs over packed blocks; with `is_sparse` only listed blocks contain numbers."""
    has_shared_mask = case["mask"] in SHARED_MASKS
    mask, rule = (
        shared_mask(case["mask"], case["heads"][0]) if has_shared_mask else (MASKS | MORE_MASKS)[case["mask"]]
    )
    plain = {name: values[0] for name, values in FACTORS.items()}
    case = (
        plain | {"heads": (4, 2), "dtype": "bfloat16", "head_dim": 64, "block_size": 16, "kv": "NHD"} | case
    )
    list_block_size = int(case["mask"].rpartition("_")[2])
    problem = TileListCase(case, mask=rule, sparse_tile_kv=list_block_size if is_sparse else None)
    region = problem.metadata.prefill_region
    kernel = kernel_for(jnp.asarray(problem.query), problem.kv, region, problem.spec, mask)
    if has_shared_mask:
        assert kernel.sizes.pack_gqa == PACKED_HEADS[case["heads"][0] // 2][list_block_size]
    assert kernel.list_block_size == (list_block_size if list_block_size < kernel.sizes.tile_kv else None)
    problem.check_region(region, mask, interpret)


def test_unlisted_blocks_are_never_read():
    solved({"region": "prompt_206", "mask": "128_32", "kv": "HND"}, INTERPRET, is_sparse=True)


def test_three_teams_equal_float64(monkeypatch):
    """A warpgroup has no two loading warps for each of three teams."""
    sizes = PrefillSizes(tile_kv=64, warpgroups=3, teams=3)
    monkeypatch.setattr(tile_lists.prefill, "default_sizes", lambda *args, **kwargs: sizes)
    solved({"region": "prompt_206", "mask": "128_32", "kv": "HND"}, INTERPRET)


def test_blocks_of_packed_keys_that_start_anywhere_equal_float64():
    solved({"region": "neighbours", "mask": "16_16", "kv": "no_cache", "causal": False}, INTERPRET)


@pytest.mark.parametrize(
    ("mask", "kv"),
    [("slashes_32", "HND"), ("slashes_32", "no_cache"), ("strided_64", "HND"), ("even_32", "HND")],
)
def test_unlisted_blocks_of_a_pattern_are_never_read(mask, kv):
    solved({"region": "prompt_206", "mask": mask, "kv": kv, "causal": False}, INTERPRET, is_sparse=True)


def test_requests_of_many_tokens_list_larger_blocks_of_packed_keys(monkeypatch):
    monkeypatch.setattr(tile_lists, "MAX_RUN_BLOCKS", 4)
    case = {"region": "prompt_206", "mask": "slashes_64", "kv": "no_cache", "head_dim": 128, "causal": False}
    solved(case, INTERPRET, is_sparse=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_CASES, ids=case_id)
def test_patterns_equal_float64(case):
    solved(case, INTERPRET)


@pytest.mark.gpu
@pytest.mark.parametrize("case", MORE_CASES, ids=case_id)
def test_patterns_equal_float64_on_a_gpu(case):
    solved(case)


@pytest.mark.parametrize(
    ("mask", "heads", "kv"),
    [("shared_16", (8, 2), "HND"), ("shared_32", (8, 2), "NHD"), ("shared_64", (4, 2), "HND")],
)
def test_packed_heads_read_no_block_that_their_queries_do_not_select(mask, heads, kv):
    solved(
        {"region": "prompt_206", "mask": mask, "heads": heads, "kv": kv, "causal": False},
        INTERPRET,
        is_sparse=True,
    )


def test_packed_heads_of_tokens_that_start_anywhere_equal_float64():
    """Rows of a document mask, which has an array with an element per query."""
    solved({"region": "prompts", "mask": "shared_documents_32", "heads": (8, 2), "kv": "no_cache"}, INTERPRET)


@pytest.mark.slow
@pytest.mark.parametrize("case", SHARED_CASES, ids=case_id)
def test_prefill_with_packed_heads_equals_float64_for_combinations_of_features(case):
    solved(case, INTERPRET)


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 32])
def test_prefill_with_packed_heads_has_no_races(size):
    """Every list fills its tiles: the warpgroups of a tile write the same zeros to the runs that it lacks."""
    spec = jattn.AttentionSpec(num_q_heads=4, num_kv_heads=1, head_dim=64, causal=False)
    metadata = jattn.build_batch_metadata([256], [256], [[1, 2, 3, 4]], block_size=64).prefill_region
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    cache = jattn.PagedCache(k=draw(0, 5, 64, 1, 64), v=draw(1, 5, 64, 1, 64))
    block = np.arange(256 // size)
    mask = block_mask(((block[:, None] + block) % (64 // size) == 0)[None], size, size)
    run = functools.partial(attend_region, spec=spec, interpret=plgpu.InterpretGPUParams(detect_races=True))
    with assertions.assert_no_races(num_kernels=1):
        jax.block_until_ready(jax.jit(run)(draw(2, 256, 4, 64), cache, metadata, mask=mask))


@pytest.mark.gpu
@pytest.mark.parametrize("case", select_each_value(SHARED_CASES), ids=case_id)
def test_prefill_with_packed_heads_equals_float64_on_a_gpu(case):
    solved(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_prefill_equals_float64_for_combinations_of_features(case):
    solved(case, INTERPRET)


@pytest.mark.gpu
@pytest.mark.parametrize("case", select_each_value(CASES), ids=case_id)
def test_prefill_equals_float64_on_a_gpu(case):
    solved(case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mask", "head_dim"),
    list(zip((name for name in MASKS if name != "documents_32"), itertools.cycle([64, 128]))),
)
def test_unlisted_blocks_are_never_read_on_a_gpu(mask, head_dim):
    # A causal tile also lists blocks that only queries before them select, which hides a block read in vain.
    case = {"region": "prompt_206", "mask": mask, "kv": "HND", "head_dim": head_dim, "causal": False}
    solved(case, is_sparse=True)


@pytest.mark.gpu
def test_unlisted_blocks_of_a_pattern_are_never_read_on_a_gpu():
    case = {"region": "prompt_206", "mask": "slashes_32", "kv": "HND", "head_dim": 128, "causal": False}
    solved(case, is_sparse=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mask", "heads"),
    [
        (f"shared_{size}", (2 * group, 2))
        for group, sizes in PACKED_HEADS.items()
        for size, num_packed in sizes.items()
        if num_packed == group  # one group for each kernel
    ]
    + [("for_all_heads_32", (8, 2))],
)
def test_packed_heads_read_no_block_that_their_queries_do_not_select_on_a_gpu(mask, heads):
    case = {
        "region": "prompt_206",
        "mask": mask,
        "heads": heads,
        "kv": "HND",
        "head_dim": 128,
        "causal": False,
    }
    solved(case, is_sparse=True)


def test_first_tile_of_a_list_lacks_the_blocks_that_do_not_fill_it():
    """Four blocks fill a tile. Of lists of 0, 1, 4 and 6 blocks the first 0, 1, 1 and 3 are partial."""
    block = np.arange(8)[None, :]
    is_visible = jnp.asarray(block < np.asarray([[0], [1], [4], [6]]))
    is_full = jnp.asarray(block >= np.asarray([[0], [1], [1], [3]]))
    sizes = PrefillSizes(tile_kv=128)
    schedule = make_schedule(
        jnp.asarray([0, 128]), jnp.asarray([256]), num_tokens=128, score=Score(scale=1.0), sizes=sizes,
        has_lists=True,
    )  # fmt: skip
    codes = jnp.zeros((schedule.table.shape[0], 4, 8), jnp.uint8).at[0].set(encode_tiles(is_visible, is_full))
    lists = make_tile_lists(schedule, codes, list_block_size=32)
    names = "head", "num_missing", "num", "num_partial"
    columns = [len(COLUMNS) + PACKED_LIST_COLUMNS.index(name) for name in names]
    assert int(lists.num_valid[0]) == 4
    assert np.asarray(lists.table)[:4, columns].tolist() == [
        [3, 2, 2, 2],
        [1, 3, 1, 1],
        [2, 0, 1, 1],
        [0, 0, 0, 0],
    ]
    np.testing.assert_array_equal(lists.entries[3, :6], [2, 1, 0, 3, 4, 5])


class PlainTile(PairTile):
    """A tile outside of a kernel."""

    row_positions = property(lambda self: self.first_query + jnp.arange(self.shape[0], dtype=jnp.int32))

    def fill_rows(self, x):
        return jnp.full(self.shape[:1], x)


@pytest.mark.parametrize("starts", [[0, 64], [3, 17], [-5, 31]])
@pytest.mark.parametrize("block_kv", [16, 32, 64])
def test_words_of_blocks_that_start_anywhere_have_a_bit_per_key(starts, block_kv):
    blocks = jnp.asarray(RNG.random((1, 1, 4, 9)) < 0.5)
    mask = BlockBits(
        words=BlockBits.pack(blocks),
        first_q_block=None,
        row_block=64,
        column_block=block_kv,
        group=1,
        is_aligned=False,
    )
    for first_key in starts:
        tile = PlainTile(
            head=jnp.int32(0),
            first_query=jnp.int32(40),
            first_key=jnp.int32(first_key),
            columns=lambda: jnp.zeros((64, 64)),
            shape=(64, 64),
            interpret=None,
        )
        words = np.stack(mask.visible(tile, mask.load(tile, jnp.int32(0))), axis=1).astype(np.uint32)
        bits = (words[:, :, None] >> np.arange(32, dtype=np.uint32) & 1).reshape(64, 64) != 0
        keys = first_key + np.arange(64)
        expected = np.asarray(blocks)[0, 0][(40 + np.arange(64)) // 64][:, np.maximum(keys, 0) // block_kv]
        np.testing.assert_array_equal(bits, expected & (keys >= 0))


@pytest.mark.parametrize(
    ("mask", "options", "served_by"),
    [
        ("128_32", {}, "blocks of 32"),
        ("1_32", {}, "blocks of 32"),
        ("128_64", {}, "blocks of 64"),
        ("documents_32", {}, "blocks of 32"),
        (block_mask(SMALL_32, 64, 64), {}, "tiles"),  # tiles of 64 queries have 64 keys
        (block_mask(WIDE_32, 128, 32) & masks.MaskFunction(lambda h, q, k: q != k), {}, "tiles"),
        (block_mask(WIDE_32, 128, 48), {}, "tiles"),
        ("128_32", {"batch_invariant": True}, "tiles"),
        ("128_32", {"gpu": "8.0"}, "tiles"),
        ("128_32", {"block_size": 8}, "tiles"),
        ("slashes_32", {}, "blocks of 32"),
        ("slashes_32", {"max_len": 2**17}, "blocks of 32"),
        ("slashes_32", {"max_len": 2**17 + 32}, "blocks of 64"),
        ("slashes_32", {"max_len": 2**18 + 32}, "tiles"),
        ("slashes_32", {"is_packed": True, "num_tokens": 2**17}, "blocks of 32"),
        ("slashes_32", {"is_packed": True, "num_tokens": 2**17 + 1}, "blocks of 64"),
        ("slashes_32", {"is_packed": True, "num_tokens": 2**18 + 1}, "tiles"),
        ("slashes_32", {"gpu": "8.0"}, "tiles"),
        (MORE_MASKS["slashes_32"][0] & masks.Causal(), {}, "blocks of 32"),
        ("strided_64", {}, "blocks of 64"),
        ("strided_32", {}, "blocks of 32"),
        (masks.LocalStrided(block_size=16), {}, "tiles"),
        (masks.LocalStrided() & masks.Sinks(4), {}, "tiles"),
        (MORE_MASKS["slashes_32"][0] & block_mask(SMALL_32, 64, 64), {"head_dim": 256}, "blocks of 32"),
        (MORE_MASKS["slashes_32"][0] & masks.Sinks(4), {}, "tiles"),
        (dataclasses.replace(MORE_MASKS["slashes_32"][0], num_gathered=8), {}, "blocks of 32"),
    ],
)
def test_tiles_hold_several_blocks_where_the_kernel_can(mask, options, served_by):
    mask = (MASKS | MORE_MASKS)[mask][0] if isinstance(mask, str) else mask
    kernel = chosen_kernel(mask, **options)
    assert str(kernel) == f"varlen_prefill over lists of {served_by}"


def chosen_kernel(
    mask,
    *,
    heads=(4, 2),
    batch_invariant=False,
    gpu="9.0",
    block_size=32,
    head_dim=128,
    max_len=256,
    num_tokens=256,
    is_packed=False,
):
    """Return the configuration of the prefill kernel for a mask."""
    spec = jattn.AttentionSpec(
        num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, batch_invariant=batch_invariant
    )
    max_blocks = 0 if is_packed else max_len // block_size
    bucket = jattn.Bucket(max_prefills=4, max_prefill_tokens=num_tokens, max_blocks=max_blocks)
    cache = jattn.CacheSpec(num_blocks=64, block_size=block_size, num_kv_heads=heads[1], head_dim=head_dim)
    (region,) = region_sizes(abstract_metadata(bucket, block_size))
    return choose_kernel(layer_config(spec, None if is_packed else cache), region, mask, gpu)


@pytest.mark.parametrize(
    ("mask_heads", "size", "options", "tiles"),
    [
        (2, 32, {"heads": (8, 2)}, "128 x 128 keys, 2 stages, 4 heads of 32 tokens each"),
        (2, 32, {"heads": (16, 2)}, "128 x 128 keys, 2 stages, 4 heads of 32 tokens each"),
        (4, 32, {"heads": (8, 2)}, "64 x 64 keys, 2 stages, 2 heads of 32 tokens each"),
        (2, 32, {"heads": (12, 2)}, "64 x 64 keys, 2 stages, 2 heads of 32 tokens each"),
        (2, 16, {"heads": (8, 2)}, "64 x 64 keys, 2 stages, 4 heads of 16 tokens each"),
        (2, 16, {"heads": (16, 2)}, "128 x 128 keys, 2 stages, 8 heads of 16 tokens each"),
        (1, 64, {"heads": (8, 2)}, "128 x 128 keys, 2 stages, 2 heads of 64 tokens each"),
        (2, 64, {"heads": (8, 2), "head_dim": 256}, "128 x 64 keys, 2 stages, 2 heads of 64 tokens each"),
        (2, 128, {"heads": (8, 2)}, "128 x 128 keys, 2 stages"),
        (8, 32, {"heads": (8, 2)}, "64 x 64 keys, 2 stages"),  # a mask per query head
        (2, 32, {"heads": (6, 2)}, "64 x 64 keys, 2 stages"),  # groups of three heads
        (2, 32, {"heads": (2, 2)}, "64 x 64 keys, 2 stages"),
        (2, 32, {"heads": (8, 2), "batch_invariant": True}, "64 x 64 keys, 2 stages"),
    ],
)
def test_heads_that_share_a_mask_fill_tiles_with_the_queries_of_one_block(mask_heads, size, options, tiles):
    blocks = np.ones((mask_heads, 256 // size, 256 // size), bool)
    assert chosen_kernel(block_mask(blocks, size, size), **options).tiles == tiles
