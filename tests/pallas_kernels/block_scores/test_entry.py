"""block_scores, select_top_blocks and top_p_threshold against NumPy in interpret mode and on a GPU."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jattn.sparsity.decode_selection import KeyBounds, select_blocks
from jattn.sparsity.decode_selection import block_scores as by_xla
from pallas_kernels.architectures import ARCHITECTURES, target
from pallas_kernels.block_scores import (
    MAX_LEN,
    MAX_SHORT_ROW_LEN,
    MAX_TOP_P_LEN,
    block_scores,
    select_top_blocks,
    top_p_threshold,
    why_not_block_scores,
)
from tests import aot

INTERPRET = plgpu.InterpretGPUParams()
WAYS = [
    pytest.param(INTERPRET, id="interpreted"),
    pytest.param(None, id="gpu", marks=pytest.mark.gpu),
]
RNG = np.random.default_rng(0)
NUM_BLOCKS = 21, 0, 10  # per request, with a partial tile and without blocks


def problem(head_dim=64, dtype=jnp.bfloat16):
    """Return queries, bounds of 70 blocks, and a table with invalid ids past the ends."""
    draw = lambda *shape: jnp.asarray(RNG.normal(size=shape), dtype)
    low = draw(70, 8, head_dim)
    table = RNG.permutation(70)[:63].reshape(3, 21)
    for row, num in zip(table, NUM_BLOCKS, strict=True):
        row[num:] = 2**30
    bounds = KeyBounds(min_key=low, max_key=low + jnp.abs(draw(70, 8, head_dim)))
    return draw(3, 16, head_dim), bounds, jnp.asarray(table, jnp.int32), jnp.asarray(NUM_BLOCKS, jnp.int32)


def expected_scores(query, bounds, table, row, num):
    """Return the expected scores [num, kv_heads] in float64."""
    low, high = (
        np.asarray(x, np.float64)[np.asarray(table)[row, :num]] for x in (bounds.min_key, bounds.max_key)
    )
    q = np.asarray(query, np.float64)[row].reshape(8, 2, -1)
    low, high = low[:, :, None], high[:, :, None]
    return np.maximum(q * low, q * high).sum(axis=-1).max(axis=-1)


@pytest.mark.parametrize("interpret", WAYS)
@pytest.mark.parametrize(
    ("head_dim", "dtype", "gpu"),
    [(64, jnp.bfloat16, None), (128, jnp.float16, None), (64, jnp.bfloat16, "8.0")],
)
def test_block_scores_are_upper_bounds_and_ignore_blocks_past_the_end(head_dim, dtype, gpu, interpret):
    query, bounds, table, num_blocks = problem(head_dim, dtype)
    arguments = query, bounds.min_key, bounds.max_key, table, num_blocks * 16 - 3
    with target(gpu):
        scores = block_scores(*arguments, block_size=16, interpret=interpret)
    for row, num in enumerate(NUM_BLOCKS):
        expected = expected_scores(query, bounds, table, row, num)
        np.testing.assert_allclose(scores[row, :, :num], expected.T, rtol=1e-5)


def diverse_scores(max_blocks):
    """Return scores [4, 8, max_blocks]; heads are normal, tied, constant, signed zeros, tiny, huge,
    infinite, positive.
    """
    draw = RNG.normal(size=(4, 8, max_blocks)).astype(np.float32)
    draw[:, 1] = np.round(draw[:, 1])
    draw[:, 2] = 1.5
    draw[:, 3] = np.where(draw[:, 3] > 0, 0.0, -0.0)
    draw[:, 4] *= np.float32(1e-30)
    draw[:, 5] *= np.float32(1e30)
    draw[:, 6, ::3], draw[:, 6, 1::3] = -np.inf, np.inf
    draw[:, 7] += 100
    return draw


@pytest.mark.parametrize(
    "implementation_name", [pytest.param("sorting"), pytest.param("kernel", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(
    ("max_blocks", "num_selected", "num_recent"),
    [(21, 6, 1), (301, 1, 1), (300, 3, 8), (4100, 410, 0), (8192, 819, 1), (MAX_LEN, 9000, 2)],
)
def test_select_top_blocks_matches_a_sort(max_blocks, num_selected, num_recent, implementation_name):
    scores = diverse_scores(max_blocks)
    seq_lens = np.asarray([max_blocks * 16, (max_blocks // 2) * 16 - 5, 1, 0], np.int32)
    for row, length in enumerate(seq_lens):
        scores[row, :, -(-length // 16) :] = np.nan
    counts = {"num_selected": num_selected, "num_recent": num_recent}
    best = jax.jit(functools.partial(select_top_blocks, block_size=16, **counts))(scores, seq_lens)
    assert jax.default_backend() == ("gpu" if implementation_name == "kernel" else "cpu")
    for row, length in enumerate(seq_lens):
        num = -(-int(length) // 16)
        recent = np.arange(num) >= num - num_recent
        for head in range(8):
            head_scores = np.where(recent, np.inf, scores[row, head, :num])
            least = np.sort(head_scores)[-num_selected] if num >= num_selected else -np.inf
            expected = np.flatnonzero(head_scores >= least)
            assert best.counts[row, head] == len(expected)
            np.testing.assert_array_equal(best.ids[row, head, : len(expected)], expected)
            reached = recent | (scores[row, head, :num] >= best.threshold[row, head])
            np.testing.assert_array_equal(np.flatnonzero(reached), expected)


@pytest.mark.parametrize("num_selected", [5, 6, 7, 100])
def test_all_blocks_are_selected_if_there_are_not_more(num_selected):
    scores, lens = jnp.asarray(RNG.normal(size=(2, 1, 5)), jnp.float32), jnp.asarray([80, 20])
    best = select_top_blocks(scores, lens, block_size=16, num_selected=num_selected, num_recent=0)
    assert best.counts.tolist() == [[5], [2]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_selected": 0}, "num_selected must be positive, got 0"),
        ({"num_recent": -1}, "num_recent must be at least 0, got -1"),
        ({"seq_lens": jnp.zeros(3, jnp.int32)}, r"seq_lens must have shape \(2,\) \(reqs\), got \(3,\)"),
    ],
)
def test_select_top_blocks_refuses_wrong_arguments(change, message):
    arguments = {"seq_lens": jnp.zeros(2, jnp.int32), "block_size": 16, "num_selected": 1, "num_recent": 0}
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(select_top_blocks)(jnp.zeros((2, 1, 5)), **arguments | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_table": jnp.zeros((2, 21), jnp.int32)}, r"block_table must .*\(3, 21\) .*got \(2, 21\)"),
        ({"seq_lens": jnp.zeros(2, jnp.int32)}, r"seq_lens must .*\(3,\) \(reqs\), got \(2,\)"),
        (
            {"high": jnp.zeros((70, 8, 64), jnp.float16)},
            "high's dtype must be bfloat16, the dtype of low, got float16",
        ),
    ],
)
def test_block_scores_refuses_wrong_arguments(change, message):
    query, bounds, table, num_blocks = problem()
    arguments = {"low": bounds.min_key, "high": bounds.max_key, "block_table": table, "seq_lens": num_blocks}
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(block_scores)(query, **arguments | change, block_size=16)


@pytest.mark.parametrize(
    ("length", "mass", "message"),
    [
        (MAX_TOP_P_LEN + 1, 0.5, rf"scores must have at most {MAX_TOP_P_LEN} elements per row"),
        (4, 1.0, r"mass must lie in \(0, 1\), got 1.0"),
    ],
)
def test_top_p_threshold_refuses_wrong_arguments(length, mass, message):
    with pytest.raises(ValueError, match=message):
        top_p_threshold(jnp.zeros((1, length)), mass)


def test_select_top_blocks_refuses_too_many_blocks():
    shape = jax.ShapeDtypeStruct
    run = functools.partial(select_top_blocks, block_size=16, num_selected=1, num_recent=1)
    with pytest.raises(ValueError, match=rf"scores must have at most {MAX_LEN} blocks per request"):
        jax.eval_shape(run, shape((1, 8, MAX_LEN + 1), jnp.float32), shape((1,), jnp.int32))


@pytest.mark.parametrize("interpret", WAYS)
@pytest.mark.parametrize(("length", "mass"), [(120, 0.3), (300, 0.9)])  # many rows a warpgroup, and one
def test_top_p_threshold_matches_a_sorted_sum(length, mass, interpret):
    scores = 3 * RNG.normal(size=(5, length)).astype(np.float32)
    scores[0, 5:], scores[1], scores[2], scores[3, 7] = -np.inf, -np.inf, 1.5, 100.0
    threshold = top_p_threshold(jnp.asarray(scores), mass, interpret=interpret)
    ordered = -np.sort(-scores.astype(np.float64), axis=1)
    row_max = np.maximum(ordered[:, :1], -1e9)
    p = np.exp(ordered - row_max)
    is_needed = p.cumsum(axis=1) - p < mass * p.sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(threshold, np.where(is_needed, ordered, np.inf).min(axis=1))


@pytest.mark.parametrize("interpret", WAYS)
def test_select_blocks_chooses_the_same_blocks_with_the_kernels(interpret):
    query, bounds, table, num_blocks = problem()
    arguments = query, bounds, jnp.where(table < 70, table, 0), num_blocks * 16 - 3
    options = {"num_selected": 6, "block_size": 16, "num_recent": 2}
    chosen = select_blocks(*arguments, **options, implementation="mosaic_gpu", interpret=interpret)
    expected = select_blocks(*arguments, **options, implementation="xla")
    np.testing.assert_array_equal(chosen.blocks, expected.blocks)
    for blocks, ids, count in zip(*map(np.asarray, (chosen.blocks, chosen.ids, chosen.counts)), strict=True):
        for head in range(8):
            assert ids[head, : count[head]].tolist() == np.flatnonzero(blocks[head, 0]).tolist()
    assert chosen.blocks.sum(axis=-1)[0].tolist() == [[6]] * 8


# Query heads and kv heads: of models whole, and in the shards of two, four and eight devices.
HEADS = [
    (8, 8), (32, 8), (40, 8), (64, 8), (96, 8), (104, 8), (128, 8), (256, 8), (264, 8), (16, 16), (64, 16),
    (24, 24), (40, 40), (32, 32), (128, 32), (64, 64), (128, 128), (36, 8), (36, 4), (16, 4), (8, 2), (9, 1),
    (4, 1), (48, 12),
]  # fmt: skip


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_supported_heads_lower_and_others_are_refused(head_dim):
    """The refusal names the reason, through either entry point."""
    shape, lowered = jax.ShapeDtypeStruct, []
    for i, (q_heads, kv_heads) in enumerate(HEADS):
        dtype = [jnp.bfloat16, jnp.float16][i % 2]
        query, bounds = shape((2, q_heads, head_dim), dtype), shape((70, kv_heads, head_dim), dtype)
        block_arrays = shape((2, 9), jnp.int32), shape((2,), jnp.int32)
        run = jax.jit(functools.partial(block_scores, block_size=16))
        trace = functools.partial(run.trace, query, bounds, bounds, *block_arrays)
        reason = why_not_block_scores(dtype=dtype, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim)
        if reason is None:
            trace().lower(lowering_platforms=("cuda",))
            lowered.append((q_heads, kv_heads))
        elif q_heads % kv_heads:
            with pytest.raises(ValueError, match=r"q_heads must be a multiple of kv_heads \(8\), got 36"):
                trace()
        else:
            with pytest.raises(NotImplementedError, match=re.escape(f"block_scores: {reason}")):
                trace()
    assert ((64, 8) in lowered) == (head_dim in (64, 128, 256))


OTHER_HEADS = [(96, 8, 256), (40, 8, 64), (64, 32, 128), (64, 64, 64)]


@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), OTHER_HEADS)
def test_block_scores_are_exact_for_other_heads(q_heads, kv_heads, head_dim):
    check_exact_scores(q_heads, kv_heads, head_dim)


@pytest.mark.parametrize(
    ("gpu", "heads"),
    [
        ("12.0", (40, 8, 64)),
        *(
            pytest.param(gpu, heads, marks=pytest.mark.slow)
            for gpu in ("8.0", "10.0")
            for heads in OTHER_HEADS
        ),
        pytest.param("8.6", (16, 8, 256), marks=pytest.mark.slow),  # one stage
    ],
)
def test_block_scores_are_exact_on_other_architectures(gpu, heads):
    with target(gpu):
        check_exact_scores(*heads)


def check_exact_scores(q_heads, kv_heads, head_dim):
    draw = lambda *shape: jnp.asarray(RNG.normal(size=shape), jnp.bfloat16)
    low, query = draw(5, kv_heads, head_dim), draw(1, q_heads, head_dim)
    bounds = KeyBounds(min_key=low, max_key=low + jnp.abs(draw(5, kv_heads, head_dim)))
    table, lens = jnp.asarray([[3, 1, 4, 0, 2]], jnp.int32), jnp.asarray([80], jnp.int32)
    arguments = query, bounds.min_key, bounds.max_key, table, lens
    scores = block_scores(*arguments, block_size=16, interpret=INTERPRET)
    np.testing.assert_allclose(scores, by_xla(query, bounds, table), rtol=1e-5)


def test_empty_inputs_give_empty_results():
    arrays = lambda reqs, blocks: (jnp.zeros((reqs, 16, 64)), jnp.zeros((reqs, blocks), jnp.int32))
    bounds = jnp.zeros((3, 8, 64), jnp.bfloat16)
    for reqs, blocks in ((0, 4), (2, 0), (0, 0)):
        query, table = arrays(reqs, blocks)
        lens = jnp.zeros(reqs, jnp.int32)
        query = query.astype(jnp.bfloat16)
        scores = block_scores(query, bounds, bounds, table, lens, block_size=16, interpret=INTERPRET)
        assert scores.shape == (reqs, 8, blocks)
        best = select_top_blocks(scores, lens, block_size=16, num_selected=1, num_recent=1)
        assert [x.shape for x in best] == [(reqs, 8), (reqs, 8, blocks), (reqs, 8)]
        assert not best.counts.any()
    for rows, length in ((0, 7), (0, 0), (2, 0)):
        least = top_p_threshold(jnp.zeros((rows, length)), 0.5, interpret=INTERPRET)
        np.testing.assert_array_equal(least, np.full(rows, np.inf))


def test_empty_inputs_lower_for_a_gpu():
    shape = jax.ShapeDtypeStruct
    for reqs, blocks in ((0, 4), (2, 0)):
        scores, lens = shape((reqs, 8, blocks), jnp.float32), shape((reqs,), jnp.int32)
        run = jax.jit(functools.partial(select_top_blocks, block_size=16, num_selected=1, num_recent=1))
        run.trace(scores, lens).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": jnp.float32}, "block bounds dtype=float32 is not supported"),
        (
            {"q_heads": 128, "head_dim": 256},
            "kv_heads=8 with q_heads=128 and head_dim=256 .* needs 259 KB .* has 227 KB",
        ),
        ({"kv_heads": 4}, "kv_heads=4 is not supported for block scores; supported: 8, 16, 32, 64"),
        ({"q_heads": 512}, "q_heads=512 is not supported for block scores; the maximum is 256"),
        (
            {"q_heads": 256, "gpu": "8.0"},
            "q_heads=256 is not supported for block scores on compute capability 8.0; the maximum is 192",
        ),
        (
            {"q_heads": 64, "head_dim": 256, "gpu": "8.6"},
            "q_heads=64 and head_dim=256 .* needs 131 KB .* has 99 KB",
        ),
        ({"head_dim": 80}, "head_dim=80 is not supported for block scores; supported: 64, 128, 256"),
    ],
)
def test_why_not_block_scores_names_what_is_not_supported(changes, message):
    served = {"dtype": jnp.bfloat16, "q_heads": 32, "kv_heads": 8, "head_dim": 128}
    assert why_not_block_scores(**served) is None
    assert {why_not_block_scores(**served, gpu=gpu) for gpu in ARCHITECTURES} == {None}
    assert re.search(message, why_not_block_scores(**served | changes) or "")


def test_select_blocks_raises_with_the_reason():
    query, bounds, table, num_blocks = problem()
    wide_table = jnp.zeros((3, MAX_LEN + 1), jnp.int32)
    options = {"num_selected": 1, "block_size": 16, "implementation": "mosaic_gpu", "interpret": INTERPRET}
    with pytest.raises(NotImplementedError, match=f"at most {MAX_LEN} blocks, got {MAX_LEN + 1}"):
        select_blocks(query, bounds, wide_table, num_blocks, **options)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), bounds)
    with pytest.raises(
        NotImplementedError,
        match="with implementation='mosaic_gpu': block bounds dtype=float32 is not supported",
    ):
        select_blocks(query.astype(jnp.float32), exact, table, num_blocks, **options)
    with pytest.raises(
        NotImplementedError, match="block_scores: block bounds dtype=float32 is not supported"
    ):
        block_scores(query, exact.min_key, exact.max_key, table, num_blocks, block_size=16)
    with pytest.raises(ValueError, match=r"implementation must be one of .* got 'cuda'"):
        select_blocks(query, bounds, table, num_blocks, **options | {"implementation": "cuda"})
    with pytest.raises(Exception, match=r"high must have shape \(70, 8, 64\)|Type-check"):
        block_scores(query, bounds.min_key, bounds.max_key[:, :4], table, num_blocks, block_size=16)


def aot_cases():
    """Return (function, abstract arguments) by the name of the case."""
    shape = jax.ShapeDtypeStruct

    def scores(kv_heads, head_dim):
        bounds = shape((65537, kv_heads, head_dim), jnp.bfloat16)
        query = shape((8, 4 * kv_heads, head_dim), jnp.bfloat16)
        block_arrays = shape((8, 8192), jnp.int32), shape((8,), jnp.int32)
        return functools.partial(block_scores, block_size=16), (query, bounds, bounds, *block_arrays)

    cases = {f"scores-{heads}-{dim}": scores(heads, dim) for heads, dim in ((8, 128), (8, 256), (32, 64))}

    def best(max_blocks):
        run = functools.partial(select_top_blocks, block_size=16, num_selected=100, num_recent=1)
        return run, (shape((8, 8, max_blocks), jnp.float32), shape((8,), jnp.int32))

    cases |= {f"best-{size}": best(size) for size in (301, 8192, MAX_LEN)}
    mass = functools.partial(top_p_threshold, mass=0.9)
    return cases | {
        f"mass-{size}": (mass, (shape((64, size), jnp.float32),))
        for size in (MAX_SHORT_ROW_LEN, MAX_TOP_P_LEN)
    }


def check_spills(names, gpu):
    aot.require_plugin()
    reports = aot.compile_all("tests.pallas_kernels.block_scores.test_entry", names, gpu)
    for name, kernels in reports.items():
        assert [kernel.spilled_bytes for kernel in kernels] == [0], name


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ARCHITECTURES)
def test_shipped_kernels_compile_without_spills(gpu):
    check_spills(list(aot_cases()), gpu)


def test_a_sample_compiles_without_spills_for_another_architecture():
    check_spills(["scores-32-64", "best-301"], "8.0")
