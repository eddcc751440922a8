"""Checks that a mask fits its step, and of the arguments of masks."""

import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks

# Two decodes, two prompts; the bucket has room for five and three.
BUCKET = jattn.Bucket(max_decodes=5, max_prefills=3, max_prefill_tokens=20, max_blocks=4)
LENS = [1, 1, 3, 6], [9, 4, 3, 6]
ROWS = [0, 1, 5, 6]
IDS = np.arange(4 * 64).reshape(4, 64).astype(np.int32)


def metadata(**options):
    blocks = [[1, 2], [3], [4], [5]]
    return jattn.build_batch_metadata(*LENS, blocks, block_size=8, **{"bucket": BUCKET} | options)


def sizes(**changes):
    known = {"num_q_heads": 4, "num_rows": 8, "max_query_len": 20, "max_seq_len": 32}
    return masks.BatchSizes(**known | changes)


def per_request_masks():
    """Return masks with each kind of array, whose row r is visible for row r only."""
    firsts = np.arange(4, dtype=np.int32)
    blocks = np.eye(4, dtype=bool)[:, None, :, None].repeat(8, axis=3)
    return [
        masks.Document(ids=IDS),
        masks.Causal() | masks.Prefix(length=firsts),
        masks.BlockMask(blocks=blocks, first_q_block=firsts, block_q=8, block_kv=8) & masks.Window(left=9),
    ]


@pytest.mark.parametrize("to_device", [True, False])
def test_per_request_mask_is_reordered_to_batch_rows(to_device):
    assert jattn.batch.bucket.row_indices(np.asarray(LENS[0]), BUCKET).tolist() == ROWS
    for mask in per_request_masks():
        laid = mask.to_batch_rows(metadata(to_device=to_device))
        traced = jax.jit(lambda mask, step: mask.to_batch_rows(step))(mask, metadata())
        for actual, traced_array, original in zip(*map(jax.tree.leaves, (laid, traced, mask)), strict=True):
            np.testing.assert_array_equal(np.asarray(actual)[ROWS], original)
            np.testing.assert_array_equal(actual, traced_array)
            assert actual.shape[0] == BUCKET.max_reqs
        masks.check_mask(laid, sizes(num_rows=8, max_seq_len=None), causal=False)


def test_mask_shared_by_all_requests_is_unchanged():
    for mask in (
        masks.Document(ids=IDS[0]),
        masks.Prefix(length=3),
        masks.Document(ids=IDS[:1]),
        masks.Causal(),
    ):
        jax.tree.map(np.testing.assert_array_equal, mask.to_batch_rows(metadata()), mask)
        masks.check_mask(mask, sizes(), causal=False)


def test_mask_with_a_wrong_number_of_requests_is_rejected():
    with pytest.raises(ValueError, match=r"Document.ids must have one row per request \(4\), got 3"):
        masks.Document(ids=IDS[:3]).to_batch_rows(metadata())
    many = masks.Prefix(length=np.arange(9))
    with pytest.raises(ValueError, match=r"Prefix.length must have one row per request .* 8\), got 9"):
        jax.eval_shape(lambda step: many.to_batch_rows(step), metadata())


@pytest.mark.parametrize(
    ("mask", "name", "rows"),
    [
        (masks.Document(ids=IDS), "Document.ids", 4),
        (masks.Causal() & (masks.Sinks(1) | masks.Prefix(length=np.arange(7))), "Prefix.length", 7),
        (
            masks.BlockMask(blocks=np.ones((9, 2, 1, 9), bool), block_q=None, block_kv=8),
            "BlockMask.blocks",
            9,
        ),
        (
            masks.BlockMask(
                blocks=np.ones((2, 9, 9), bool), block_q=8, block_kv=8, first_q_block=np.zeros(3, np.int32)
            ),
            "BlockMask.first_q_block",
            3,
        ),
    ],
)
def test_mask_with_a_wrong_number_of_rows_is_rejected(mask, name, rows):
    expected = rf"{name} has {rows} rows, but the batch metadata has 8\. .*to_batch_rows\(metadata\)"
    with pytest.raises(ValueError, match=expected):
        masks.check_mask(mask, sizes(), causal=False)
    masks.check_mask(mask, sizes(num_rows=rows), causal=False)


def test_custom_mask_declares_its_per_row_arrays():
    class Own(masks.Mask):
        visible = coverage = None

    Own.__abstractmethods__ = frozenset()
    jax.tree_util.register_pytree_node(
        Own, lambda custom_mask: ((jnp.ones(3),), None), lambda _, leaves: Own()
    )
    with pytest.raises(
        ValueError, match=r"Own.row_axes must map the arrays that may have one row .* got None"
    ):
        masks.check_mask(Own(), sizes(), causal=False)


n, blocks = np.int32(5), masks.BlockMask(blocks=np.ones((1, 4, 4), bool), block_q=8, block_kv=8)
AHEAD = {
    "(Causal | Prefix)": masks.Causal() | masks.Prefix(length=n),
    "Prefix": masks.Prefix(length=n),
    "(Document & (Causal | Prefix))": masks.Document(ids=IDS[0]) & (masks.Causal() | masks.Prefix(length=n)),
    "(Causal | Sinks)": masks.Causal() | masks.Sinks(4),
    "(Window | BlockMask)": masks.Window(right=0) | blocks,
    "Window": masks.Window(left=3, right=2),
    "(Window | Sinks)": masks.Window(left=3, right=2) | masks.Sinks(2),
}
FILTERS = [
    masks.Causal(),
    masks.Causal() & masks.Prefix(length=n),
    masks.Causal() & masks.Window(3, 3),
    masks.Window(left=3) | masks.Sinks(4),
    (masks.Causal() & masks.Window(left=3)) | masks.Sinks(4),
    masks.streaming_heads([1], num_first=4, num_recent=8),
    blocks | masks.Document(ids=IDS[0]),
    masks.MaskFunction(lambda head, query, key: key >= query) & masks.Dilated(3, 4),
    masks.BigBird() | masks.Chunked(8),
    masks.LocalStrided(),
    masks.Causal() | masks.Causal(),
]


@pytest.mark.parametrize(("written", "mask"), AHEAD.items())
def test_bidirectional_mask_with_a_causal_spec_is_rejected(written, mask):
    message = rf"mask lets queries attend to later keys.*: {re.escape(written)}\. Pass .*causal=False"
    with pytest.raises(ValueError, match=message):
        masks.check_mask(mask, sizes(), causal=True)
    masks.check_mask(mask, sizes(), causal=False)


@pytest.mark.parametrize("mask", FILTERS, ids=range(len(FILTERS)))
def test_filter_mask_with_a_causal_spec_is_accepted(mask):
    masks.check_mask(mask, sizes(), causal=True)


def test_spec_rejects_bidirectional_masks_and_unknown_heads():
    spec = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    with pytest.raises(
        ValueError, match=r"sparsity lets queries attend to later keys, .*: \(Causal \| Sinks\)\."
    ):
        jattn.AttentionSpec(**spec, sparsity=masks.Causal() | masks.Sinks(4))
    jattn.AttentionSpec(**spec, sparsity=masks.Causal() | masks.Sinks(4), causal=False)
    with pytest.raises(ValueError, match=r"OnlyHeads.heads must lie in \[0, 4\), got \(1, 4\)"):
        jattn.AttentionSpec(**spec, sparsity=masks.OnlyHeads((4, 1)) | masks.Sinks(4))


def block_mask(q_blocks, kv_blocks, first=None):
    blocks = np.ones((2, q_blocks, kv_blocks), bool)
    return masks.BlockMask(blocks=blocks, block_q=8, block_kv=16, first_q_block=first)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (block_mask(3, 2), "has 3 q_blocks of 8 .* Pass at least 4 q_blocks, or for decode block_q=None"),
        (block_mask(4, 1), "has 1 kv_blocks of 16 positions, .* 32 positions. Pass at least 2"),
        (
            block_mask(2, 2, np.zeros(8, np.int32)),
            "has 2 q_blocks of 8 positions, .* 20 positions. Pass at least 3",
        ),
        (masks.Sinks(2) | block_mask(9, 1), "has 1 kv_blocks of 16 .* Pass at least 2"),
    ],
)
def test_mask_that_does_not_cover_the_positions_is_rejected(mask, message):
    """For example the mask of a prompt in later decode steps."""
    with pytest.raises(ValueError, match=message):
        masks.check_mask(mask, sizes(), causal=False)
    masks.check_mask(mask, sizes(max_query_len=None, max_seq_len=None), causal=False)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (masks.Causal() | masks.Prefix(length=3), r"mask lets queries attend .*: \(Causal \| Prefix\)"),
        (masks.Document(ids=IDS), "Document.ids has 4 rows, but the batch metadata has 8"),
        (masks.OnlyHeads((4,)), r"OnlyHeads.heads must lie in \[0, 4\), got \(4,\)"),
        (block_mask(3, 2), "has 3 q_blocks of 8 .* 25 positions. Pass at least 4"),
        (
            block_mask(2, 2, np.zeros(8, np.int32)),
            "has 2 q_blocks of 8 positions, .* 20 positions. Pass at least 3",
        ),
        (np.ones(3, bool), "mask must be a mask of jattn.masks, got a ndarray"),
    ],
)
def test_mask_sizes_must_match_the_step(mask, message, types_unchecked):
    layer = {"num_q_heads": 4, "causal": True}
    if not isinstance(mask, masks.BlockMask):  # the lengths, where they are seen, are within it
        with pytest.raises(Exception, match=message):
            masks.check_batch_mask(mask, metadata(), **layer, has_cache=True)
    with pytest.raises(Exception, match=message):
        jax.eval_shape(lambda step: masks.check_batch_mask(mask, step, **layer, has_cache=True), metadata())
    if isinstance(mask, masks.BlockMask) and mask.first_q_block is None:
        masks.check_batch_mask(mask, metadata(), **layer, has_cache=False)
    fitting = masks.Document(ids=IDS).to_batch_rows(metadata()) & block_mask(4, 2) & masks.OnlyHeads((3,))
    masks.check_batch_mask(fitting, metadata(), **layer, has_cache=True)


@pytest.mark.parametrize(("end", "first", "need"), [(9, 0, 3), (9, 1, 2), (10, 1, 2), (12, 1, 2), (12, 2, 1)])
def test_block_mask_that_ends_before_the_last_query_is_rejected(end, first, need):
    """Six queries up to `end` need two blocks of four if the first query starts a block, else three."""
    step = jattn.build_batch_metadata([6], [end], None)
    layer = {"num_q_heads": 2, "causal": True, "has_cache": False}
    firsts = np.asarray([first], np.int32)
    make = lambda count, firsts: masks.BlockMask(
        blocks=np.ones((1, count, 3), bool), block_q=4, block_kv=4, first_q_block=firsts
    )
    masks.check_batch_mask(make(max(need, 2), firsts), step, **layer)
    if need > 2:
        message = "has 2 q_blocks of 4 positions, but .* over 3 from first_q_block on"
        with pytest.raises(ValueError, match=message):
            masks.check_batch_mask(make(2, firsts), step, **layer)
    # Nobody knows where queries begin that are traced.
    jax.eval_shape(lambda firsts: masks.check_batch_mask(make(2, firsts), step, **layer), firsts)


def test_mask_that_just_covers_the_positions_is_accepted():
    masks.check_mask(block_mask(4, 2), sizes(), causal=False)
    masks.check_mask(block_mask(3, 2, np.zeros(8, np.int32)), sizes(), causal=False)
    full_mask = masks.BlockMask(blocks=np.ones((4, 1, 2), bool), block_q=None, block_kv=16)
    masks.check_mask(full_mask, sizes(), causal=False)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_traced_positions_outside_the_mask_are_masked_out(implementation):
    """The lengths of packed keys are not known statically."""
    spec = jattn.AttentionSpec(num_q_heads=2, num_kv_heads=2, head_dim=8)
    step = jattn.build_batch_metadata([40], [40], None)
    x = jnp.ones((40, 2, 8))
    kv = jattn.PackedKV(k=x, v=x, kv_start_loc=jnp.zeros(1, jnp.int32))
    run = lambda step: jattn.attend(x, kv, step, spec, mask=block_mask(3, 2), implementation=implementation)
    out = jax.jit(run)(step)
    np.testing.assert_allclose(out[:24], 1.0, rtol=1e-6)
    assert not np.asarray(out[24:]).any()
    with pytest.raises(ValueError, match=r"BlockMask has 2 kv_blocks of 16 .* 40 positions. Pass at least 3"):
        run(step)


CHOSEN = masks.BlockMask(blocks=np.ones((8, 4, 4), bool), block_q=8, block_kv=8) & (
    masks.OnlyHeads((0, 3)) | masks.Sinks(2)
)


def test_number_of_heads_must_match_a_per_head_mask():
    assert masks.dense(masks.Causal(), 3, 4).shape == (1, 3, 4)
    assert masks.dense(CHOSEN, 32, 32, num_q_heads=8).shape == (8, 32, 32)
    assert masks.dense(CHOSEN.masks[0] & masks.Sinks(2), 32, 32).shape == (8, 32, 32)
    slash = masks.VerticalSlash(columns=np.ones((6, 8), bool), slashes=np.ones((6, 8), bool))
    assert masks.dense(slash & masks.MaskFunction(lambda h, i, j: i > j), 3, 4).shape == (6, 3, 4)
    assert masks.dense(masks.LocalStrided(homo_head=True), 3, 4).shape == (1, 3, 4)
    seen = 2 * 32 * 33 / 2 + 6 * (1 + 2 * 31)  # two heads see all that is past, six two keys each
    assert masks.density(CHOSEN, 32, 32, num_q_heads=8) == pytest.approx(seen / (8 * 32 * 33 / 2))


@pytest.mark.parametrize("make_mask", [masks.dense, masks.density])
@pytest.mark.parametrize(
    ("mask", "options", "message"),
    [
        (
            masks.OnlyHeads((1,)),
            {},
            "depends on the number of query heads. Pass num_q_heads",
        ),
        (masks.Causal(), {"num_q_heads": 0}, "num_q_heads must be positive, got 0"),
        (masks.BigBird(), {}, "Pass num_q_heads"),
        (masks.LocalStrided(), {}, "Pass num_q_heads"),
        (
            masks.LocalStrided(homo_head_group=True),
            {"num_q_heads": 4},
            "Pass num_kv_heads",
        ),
        (masks.MaskFunction(lambda h, i, j: h > i), {}, "Pass num_q_heads"),
        # A mask of one of two KV heads; the number of query heads is unknown.
        (
            masks.LocalStrided() & masks.BlockMask(blocks=np.ones((2, 1, 1), bool), block_q=4, block_kv=4),
            {},
            "Pass num_q_heads",
        ),
        (CHOSEN, {}, "Pass num_q_heads"),
        (
            masks.LocalStrided(homo_head_group=True),
            {"num_q_heads": 4, "num_kv_heads": 8},
            r"num_kv_heads must divide num_q_heads \(4\), got 8",
        ),
        (masks.OnlyHeads((1, 5)), {"num_q_heads": 4}, r"OnlyHeads.heads must lie in \[0, 4\), got \(1, 5\)"),
        (CHOSEN, {"num_q_heads": 4}, r"BlockMask's number of heads must divide the 4 query heads, got 8"),
        (masks.Document(ids=IDS), {"row": 4}, r"row must be one of the 4 rows of Document.ids, got 4"),
    ],
)
def test_missing_number_of_heads_is_rejected(make_mask, mask, options, message):
    with pytest.raises(ValueError, match=message):
        make_mask(mask, 4, 4, **options)


# What users see: tests run under a check of types that would be faster.
NONSENSE = {
    "masks.Sinks(4.5)": "num must be an int, got 4.5",
    "masks.Sinks(True)": "num must be an int, got True",
    "masks.Sinks(-1)": "num must be positive, got -1",
    "masks.Window(1.5)": "left must be an int, got 1.5",
    "masks.Window(left=np.ones(3))": r"left must be an int, got array\(\[1., 1., 1.\]\)",
    "masks.Window((3, 0))": r"left must be an int, got \(3, 0\)",
    "masks.Chunked('8')": "size must be an int, got '8'",
    "masks.Dilated(2, 1.0)": "step must be an int, got 1.0",
    "masks.LocalStrided(block_size=64.0)": "block_size must be an int, got 64.0",
    "masks.BigBird(random_blocks=None)": "random_blocks must be an int, got None",
    "masks.OnlyHeads(3)": "heads must be a tuple of query heads, got 3",
    "masks.OnlyHeads((0, 1.5))": "heads.1. must be an int, got 1.5",
    "masks.OnlyHeads((-1,))": "heads.0. must be at least 0, got -1",
    "masks.streaming_heads(1, num_first=4, num_recent=4)": "heads must be a tuple of query heads, got 1",
    "masks.streaming_heads([1], num_first=4, num_recent=0)": "num_recent must be positive, got 0",
    "masks.MaskFunction(np.ones(3))": "function must be a function of head, query and key, got array",
    "masks.MaskFunction(lambda b, h, q, k: q > k)": (
        r"function must take the .*, got signature \(b, h, q, k\)"
    ),
    "masks.MaskFunction(lambda q, k: q > k)": r"function must take the arguments .*, got signature \(q, k\)",
    "attended(masks.MaskFunction(lambda h, q, k: q > k and k > 3))": ".*it must be elementwise. Use & for",
    "masks.MaskFunction(lambda h, q, k: None).visible(PAIRS)": (
        "The mask function must return bool, got NoneType"
    ),
    "masks.MaskFunction(lambda h, q, k: 1).visible(PAIRS)": "The mask function must return bool, got int",
    "masks.Sinks(2**31)": "num must be at most 2147483647, got 2147483648",
    "masks.LocalStrided(vert_stride=2**31)": "vert_stride must be at most 2147483647, got 2147483648",
    "masks.Dilated(2**20, 2**11)": r"num \* step must be at most 2147483647, got 2147483648",
    "masks.BigBird(seed=1.0)": "seed must be an int, got 1.0",
    "masks.BigBird(seed=-1)": "seed must be at least 0, got -1",
    "masks.dense(OWN, 4, 4)": "mask contains a Own, .* not registered as a pytree.*register_static",
    "masks.Causal() & OWN": "The operand of a mask contains a Own, .* not registered",
    "jattn.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=8, sparsity=OWN)": (
        "sparsity contains a Own, .* not registered as a pytree"
    ),
    "masks.Document(ids=[0, 0, 1])": "ids must be an array with integer elements, got a list",
    "masks.Document(ids=np.ones(3))": "ids must be an array with integer elements, got float64",
    "masks.Document(ids=np.zeros((1, 2, 2), int))": r"ids must have shape \[positions\] .*, got \(1, 2, 2\)",
    "masks.Document(ids=np.zeros((2, 0), int))": r"ids must have at least one position, got \(2, 0\)",
    "masks.Prefix(length=[3, 4])": "length must be an array with integer elements, got a list",
    "masks.Prefix(length=2.5)": "length must be an array with integer elements, got a float",
    "masks.Prefix(length=True)": "length must be an array with integer elements, got a bool",
    "masks.Prefix(length=2**40)": "length must fit int32, got 1099511627776",
    "masks.Prefix(length=np.array([3, 2**40]))": r"length must fit int32, got \[ +3 1099511627776\]",
    "masks.Prefix(length=np.zeros((2, 2), int))": r"length must have shape \[\] or \[reqs\], got \(2, 2\)",
    "masks.BlockMask(blocks=[[[True]]], block_q=1, block_kv=1)": (
        "blocks must be an array with bool elements, got a list"
    ),
    "masks.BlockMask(blocks=np.ones((1, 2, 2)), block_q=1, block_kv=1)": (
        "array with bool elements, got float64"
    ),
    "masks.BlockMask(blocks=BOOLS[0], block_q=1, block_kv=1)": r"blocks must have shape .*, got \(2, 2\)",
    "masks.BlockMask(blocks=BOOLS, block_q=1.0, block_kv=1)": "block_q must be an int, got 1.0",
    "masks.BlockMask(blocks=BOOLS, block_q=1, block_kv=None)": "block_kv must be an int, got None",
    "masks.BlockMask(blocks=BOOLS, block_q=1, block_kv=1, first_q_block=2)": "first_q_block .* got a int",
    "masks.BlockMask(blocks=BOOLS[:0], block_q=1, block_kv=1)": "one head and one block, got .0, 2, 2.",
    "masks.VerticalSlash(columns=BOOLS[None], slashes=BOOLS)": r"columns must .*, got \(1, 1, 2, 2\)",
    "masks.VerticalSlash(columns=BOOLS, slashes=BOOLS[0])": (
        r"slashes must have as many rows .*, got shape \(2, 2\)"
    ),
    "masks.VerticalSlash(columns=BOOLS, slashes=BOOLS[0, 0])": r"slashes must have shape .*, got \(2,\)",
    "masks.VerticalSlash(columns=BOOLS[0], slashes=BOOLS[0, :, :0])": r"slashes must have .*, got \(2, 0\)",
    "masks.VerticalSlash.from_indices(ONES[0, 0], ONES[0, 0], 8)": "columns must be .*, got float32",
    "masks.VerticalSlash.from_indices([[0]], [0], 8)": r"slashes must have shape .*, got \(1,\)",
    "masks.VerticalSlash(columns=BOOLS[0], slashes=BOOLS[0], num_gathered=-1)": "num_gathered .*, got -1",
    "masks.VerticalSlash.from_indices([[0]], [[0]], 8, gather=1)": "gather must be .*, got 1",
    "masks.VerticalSlash.from_indices([[0]], [[0]], 8.0)": "max_seq_len must be an int, got 8.0",
    "masks.Causal() & BOOLS": "The operand of a mask must be a mask of jattn.masks, got a ndarray",
    "BOOLS | masks.Causal()": "The operand of a mask must be a mask of jattn.masks, got a ndarray",
    "masks.Causal() | [masks.Sinks(1)]": "The operand of a mask must be a mask of jattn.masks, got a list",
    "masks.Causal() & jnp.asarray(BOOLS)": (
        "The operand of a mask must be a mask of jattn.masks, got a ArrayImpl"
    ),
    "masks.dense(BOOLS, 1, 1)": "mask must be a mask of jattn.masks, got a ndarray",
    "masks.density(BOOLS, 1, 1)": "mask must be a mask of jattn.masks, got a ndarray",
    "masks.density(lambda h, q, k: q > k, 1, 1)": (
        "mask must be .*, got a function. Wrap a function in MaskFunction"
    ),
    "masks.check_mask(BOOLS, masks.BatchSizes(1), causal=True)": (
        "mask must be a mask of jattn.masks, got a ndarray"
    ),
    "jattn.sparsity.plot(BOOLS, 1)": "mask must be a mask of jattn.masks, got a ndarray",
    "jattn.sparsity.plot(masks.Causal(), 4, num_heads=0)": "num_heads must be positive, got 0",
    "schedule(seq_lens=[5, 3])": "seq_lens must be an array with integer elements, got a list",
    "schedule(query_lens=[5, 3])": "query_lens must be an array with integer elements, got a list",
    "schedule(tile_q=16.0)": "tile_q must be an int, got 16.0",
    "jattn.sparsity.top_k_blocks(ONES[0, :, 0], 2.0)": "k must be an int, got 2.0",
    "jattn.sparsity.block_means(ONES, 2.0)": "block_size must be an int, got 2.0",
    "jattn.sparsity.block_means([1.0], 2)": "x must be an array .batch, tokens, heads, head_dim., got a list",
    "jattn.sparsity.moba([1.0], ONES, block_size=4, top_k=1)": "q must be an array, got a list",
    "jattn.sparsity.x_attention(np.ones((1, 8, 2, 4), int), ONES, mass=1)": (
        "q must have a floating-point dtype, got int64"
    ),
    "jattn.sparsity.vertical_slash([1.0], ONES, num_columns=1, num_slashes=1)": "q must be an array",
    "jattn.sparsity.nsa([1.0], ONES, ONES, ONES, **sizes)": "q must be an array, got a list",
    "jattn.sparsity.nsa(ONES, ONES, ONES, [1.0], **sizes)": "gates must be an array, got a list",
    "write_key_bounds(block_size=0)": "block_size must be positive, got 0",
    "write_key_bounds(key=ONES[0, :, :1])": r"key must have shape \(8, 2, 4\) .*, got \(8, 1, 4\)",
    "write_key_bounds(slot_mapping=np.ones(8))": "slot_mapping must be .* with integer elements, got float32",
    "select_blocks(query=ONES)": r"query must be an array \[reqs, q_heads, head_dim\], got \(1, 8, 2, 4\)",
    "select_blocks(query=ONES[:, 0, :, :2])": r"query must have shape \(1, 2, 4\) .*, got \(1, 2, 2\)",
    "select_blocks(seq_lens=[3])": "seq_lens must be an array with integer elements, got a list",
    "jattn.sparsity.moba(ONES, ONES, block_size=4, top_k=1.0)": "top_k must be an int, got 1.0",
    "jattn.sparsity.x_attention(ONES, ONES, mass=0.5, block_size=4.0)": "block_size must be an int, got 4.0",
    "vertical_slash(num_columns=1.0)": "num_columns must be an int, got 1.0",
    "vertical_slash(num_slashes=True)": "num_slashes must be an int, got True",
    "vertical_slash(last=2.0)": "last must be an int, got 2.0",
    "nsa(window=True)": "window must be an int, got True",
    "nsa(num_selected=1.0)": "num_selected must be an int, got 1.0",
    "nsa(compress=4)": "compress must be a function of blocks or None, got 4",
    "select_nsa_blocks(q=ONES[0])": r"q must have shape \[batch, tokens, .*, got \(8, 2, 4\)",
    "select_nsa_blocks(keys=ONES[0])": r"keys must have shape \[batch, blocks, .*, got \(8, 2, 4\)",
    "select_nsa_blocks(keys=[1.0])": "keys must be an array, got a list",
    "select_nsa_blocks(keys=ONES[:, :1])": r"keys must have shape \(1, 2, 2, 4\) .*, got \(1, 1, 2, 4\)",
    "select_nsa_blocks(q=ONES[:, :, :1])": r"q's number of heads must be a multiple of .*\(2\), got 1",
    "nsa(block_q=2.0)": "block_q must be an int, got 2.0",
    "jattn.sparsity.schedule(BOOLS, jnp.ones(1, int), max_query_len=1, max_seq_len=1, num_q_heads=1)": (
        "mask must be a mask of jattn.masks, got a ndarray"
    ),
    "jattn.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=8, sparsity=BOOLS)": (
        "sparsity must be a mask of jattn.masks, got a ndarray"
    ),
}
SAYS = """
import json, sys
import jax.numpy as jnp, numpy as np
import jattn, jattn.sparsity
from jattn import masks
from functools import partial
BOOLS, ONES = np.ones((1, 2, 2), bool), np.ones((1, 8, 2, 4), np.float32)
PAIRS = masks.Pairs(0, 0, 0, 0, (1, 1))
class Own(masks.Mask):
    visible = coverage = lambda self, where: None
OWN = Own()
attended = lambda mask: jattn.attention(ONES, ONES, ONES, mask=mask)
sizes = {"max_query_len": 8, "max_seq_len": 8, "num_q_heads": 2, "seq_lens": np.array([5, 3])}
schedule = partial(jattn.sparsity.schedule, masks.Causal(), **sizes)
vertical_slash = partial(jattn.sparsity.vertical_slash, ONES[0], ONES[0], num_columns=1, num_slashes=1)
sizes = {"block_size": 4, "num_selected": 1, "window": 2}
nsa = partial(jattn.sparsity.nsa, ONES, ONES, ONES, ONES[..., :3], **sizes)
chosen = {"q": ONES, "keys": ONES[:, :2], "block_size": 4, "num_selected": 1}
select_nsa_blocks = lambda **given: jattn.sparsity.select_nsa_blocks(**chosen | given)
bounds = jattn.sparsity.KeyBounds(min_key=jnp.zeros((3, 2, 4)), max_key=jnp.zeros((3, 2, 4)))
slots = {"bounds": bounds, "key": ONES[0], "slot_mapping": np.arange(8), "block_size": 4}
write_key_bounds = lambda **given: jattn.sparsity.write_key_bounds(**slots | given)
rows = {"query": ONES[:, 0], "block_table": np.zeros((1, 3), int), "seq_lens": np.ones(1, int)}
rows |= {"bounds": bounds, "num_selected": 1, "block_size": 4}
select_blocks = lambda **given: jattn.sparsity.select_blocks(**rows | given)
said = {}
for call in json.load(sys.stdin):
    try:
        said[call] = "accepted: " + repr(eval(call))
    except Exception as error:
        said[call] = type(error).__name__ + ": " + str(error)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def error_messages():
    """Return the error of each call in a process without the tests' runtime type checks."""
    run = [sys.executable, "-W", "error", "-c", SAYS]
    done = subprocess.run(run, input=json.dumps(list(NONSENSE)), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("call", NONSENSE)
def test_invalid_mask_arguments_are_rejected(call, error_messages):
    assert re.search(f"^ValueError: .*{NONSENSE[call]}", error_messages[call]), error_messages[call]
