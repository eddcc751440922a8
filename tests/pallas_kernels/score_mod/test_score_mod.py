"""Which score functions kernels evaluate, and their values on a tile."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.score_mod import (
    KernelScoreMod,
    PairValue,
    Positions,
    ScoreModType,
    ScoreTile,
    TableType,
    looks_up_each_pair,
    why_no_kernel,
)
from pallas_kernels.score_mod.operations import OPERATIONS
from pallas_kernels.shared.layouts import COLUMN, ROW, WGMMA
from tests import aot
from tests.pallas_kernels.score_mod.score_mod_aot_cases import (
    TABLES,
    aot_cases,
    every_lookup,
    every_operation,
)

RNG = np.random.default_rng(0)
SHAPE = (64, 8)
SCALE = 0.25  # a power of two, which does not round
REQUEST, FIRST_ROW, HEAD, FIRST_QUERY, FIRST_KEY = 2, 1, 3, -5, 11


@pytest.fixture(autouse=True)
def standard_promotion():
    """Score functions combine scores with ints, as in FlexAttention."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def table_types(arrays):
    return tuple(TableType(x.shape, jnp.dtype(x.dtype)) for x in arrays)


def as_scores(new_scores, query_axis):
    """Return new scores as one array."""
    tile, factor, term = new_scores
    term = jnp.float32(0.0 if term is None else term)
    return tile * factor + (jnp.expand_dims(term, 1 - query_axis) if term.ndim else term)


def tile_of(heads, *, has_key_rows, has_heads, first_key=FIRST_KEY):
    """Return the pairs of a tile."""
    query_axis, key_axis = (1, 0) if has_key_rows else (0, 1)
    indices = [lambda axis=axis: jnp.arange(SHAPE[axis]) for axis in (query_axis, key_axis)]
    return ScoreTile(
        shape=SHAPE,
        request=jnp.int32(REQUEST),
        head=PairValue(lambda: heads, (query_axis,) if has_heads else ()),
        query=Positions(jnp.int32(FIRST_QUERY), indices[0], (query_axis,), SHAPE[query_axis]),
        key=Positions(jnp.int32(first_key), indices[1], (key_axis,), SHAPE[key_axis]),
        query_axis=query_axis,
        is_interpreted=True,
    )


def evaluate(function, arrays, scores, *, has_key_rows, has_heads, first_key=FIRST_KEY):
    """Return the new scores of a tile, their derivatives, and both as jnp.vectorize computes them."""
    query_axis, key_axis = (1, 0) if has_key_rows else (0, 1)
    positions = [
        jnp.arange(SHAPE[axis]) + first for axis, first in ((query_axis, FIRST_QUERY), (key_axis, first_key))
    ]
    heads = jnp.arange(SHAPE[query_axis]) // 2 % 4 if has_heads else jnp.int32(HEAD)
    tile = tile_of(heads, has_key_rows=has_key_rows, has_heads=has_heads, first_key=first_key)
    mod = KernelScoreMod.of(ScoreModType(function, table_types(arrays)), arrays, FIRST_ROW)
    args = scores / SCALE, SCALE, tile
    value, derivative = mod.apply_with_derivative(*args, mod.load(tile, with_derivative=True))
    value = as_scores(value, query_axis)
    derivative = jnp.ones(SHAPE) if derivative is None else derivative
    alone = as_scores(mod.apply(*args, mod.load(tile)), query_axis)
    np.testing.assert_allclose(alone, value, rtol=1e-6)
    along = lambda x, axis: jnp.broadcast_to(jnp.expand_dims(x, 1 - axis), SHAPE)
    heads = along(heads, query_axis) if has_heads else heads
    expected = jnp.vectorize(lambda *pair: jax.value_and_grad(function)(*pair, *arrays))(
        scores,
        jnp.int32(REQUEST + FIRST_ROW),
        heads,
        along(positions[0], query_axis),
        along(positions[1], key_axis),
    )
    return (value, derivative), expected


@pytest.mark.parametrize(
    ("function", "has_heads", "has_key_rows"),
    [(every_operation, True, False), (every_lookup, True, True), (every_lookup, False, False)],
)
def test_values_and_derivatives_on_a_tile_equal_the_function(function, has_heads, has_key_rows):
    arrays = [jnp.asarray(RNG.normal(size=table.shape) * 3, table.dtype) for table in TABLES]
    scores = jnp.asarray(RNG.normal(size=SHAPE) * 2, jnp.float32)
    arrays = arrays if function is every_lookup else ()
    actual, expected = evaluate(function, arrays, scores, has_key_rows=has_key_rows, has_heads=has_heads)
    # The derivative of a sine of large numbers amplifies differences in the order of the sums.
    atol = 1e-6 if function is every_lookup else 1e-4
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=atol * float(jnp.abs(y).max()))


def test_indices_out_of_range_are_clipped_or_count_from_the_end():
    def function(score, batch, head, q_idx, kv_idx, by_query, by_row):
        return score + by_query[q_idx] + by_row[batch - 9, -1]

    arrays = (jnp.arange(20.0), jnp.arange(10.0).reshape(5, 2))
    (value, _), (expected, _) = evaluate(
        function, arrays, jnp.zeros(SHAPE), has_key_rows=False, has_heads=False
    )
    np.testing.assert_array_equal(value, expected)
    assert float(value[0, 0]) == 15 + 1  # the fifth element from the end; the first row


def clipped(score, batch, head, q_idx, kv_idx, table):
    return 2.0 * score + table[head, jnp.clip(q_idx - kv_idx, 0, 32)]


def capped(score, batch, head, q_idx, kv_idx, table):
    return 5.0 * jnp.tanh((score + table[0, jnp.minimum(jnp.abs(q_idx - kv_idx), 32)]) / 5.0)


def bucketed(score, batch, head, q_idx, kv_idx, table):
    """Bucket distances as T5 does: the first ones each, later ones by their logarithm."""
    distance = jnp.maximum(q_idx - kv_idx, 0)
    large = 8 + (jnp.log(distance.astype(jnp.float32) / 8) / np.log(8.0) * 8).astype(jnp.int32)
    return score + table[head, jnp.where(distance < 8, distance, jnp.minimum(large, 15))]


def in_windows(score, batch, head, q_idx, kv_idx, table):
    return score + table[head, jnp.clip((kv_idx - q_idx) // 24 + 8, 0, 16)] - table[q_idx, -1]


def scored(score, batch, head, q_idx, kv_idx, table):
    return score + table[head, jnp.clip(score, 0, 32).astype(jnp.int32)]


def by_key(score, batch, head, q_idx, kv_idx, table):
    return score + table[head, kv_idx]


UNIFORM = jnp.asarray(np.arange(4 * 33).reshape(4, 33) * 0.37 - 20, jnp.float32)


@pytest.mark.parametrize("first_key", [-40, -38, 0, 63, 300])
@pytest.mark.parametrize(
    ("function", "has_key_rows"), [(clipped, False), (capped, True), (bucketed, False), (in_windows, True)]
)
def test_uniform_and_other_tiles_equal_the_function(function, first_key, has_key_rows):
    scores = jnp.asarray(RNG.normal(size=SHAPE), jnp.float32)
    actual, expected = evaluate(
        function,
        (UNIFORM,),
        scores,
        has_key_rows=has_key_rows,
        has_heads=function is clipped,
        first_key=FIRST_QUERY + first_key,
    )
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("distance", "is_uniform"), [(-64, True), (-63, True), (-62, False), (0, False), (38, False), (39, True)]
)
def test_tiles_beyond_the_table_have_uniform_lookups(distance, is_uniform):
    tile = tile_of(jnp.int32(HEAD), has_key_rows=False, has_heads=False, first_key=FIRST_QUERY - distance)
    # The distances of the tile are from `distance - 7` to `distance + 63`.
    mod = KernelScoreMod.of(ScoreModType(clipped, table_types((UNIFORM,))), (UNIFORM,), FIRST_ROW)
    lookups = mod.load(tile)
    assert bool(lookups.is_uniform) == is_uniform


@pytest.mark.parametrize(
    ("function", "is_each"),
    [
        (clipped, False),
        (capped, False),
        (bucketed, False),
        (in_windows, False),
        (scored, True),
        (by_key, True),
    ],
)
def test_indices_of_unknown_range_are_looked_up_for_each_pair(function, is_each):
    assert looks_up_each_pair(ScoreModType(function, table_types((UNIFORM,)))) == is_each


def test_constant_factors_are_folded_into_the_factor_of_the_scores():
    def function(score, batch, head, q_idx, kv_idx):
        return (score * 3.0 - q_idx * 0.5) / 12.0 + 1.0

    tile = tile_of(jnp.int32(HEAD), has_key_rows=False, has_heads=False)
    mod = KernelScoreMod.of(ScoreModType(function, ()), (), FIRST_ROW)
    scores = jnp.ones(SHAPE)
    new_scores = mod.apply(scores, SCALE, tile, mod.load(tile))
    assert new_scores.tile is scores
    assert new_scores.factor == pytest.approx(SCALE / 4)
    np.testing.assert_allclose(
        new_scores.query_term, 1.0 - (np.arange(SHAPE[0]) + FIRST_QUERY) / 24, rtol=1e-6
    )


def test_bounds_of_new_scores_and_derivatives_are_known():
    def cap(score, batch, head, q_idx, kv_idx):
        return 30.0 * jnp.tanh(score / 30.0)

    def clip(score, batch, head, q_idx, kv_idx):
        return jnp.where(q_idx > kv_idx, jnp.clip(score, -4.0, 2.0), -jnp.abs(jnp.sin(score)))

    bounds_of = lambda function: KernelScoreMod.of(ScoreModType(function, ()), (), 0)
    assert bounds_of(cap).max_score == 30.0
    assert bounds_of(cap).is_increasing
    assert bounds_of(clip).max_score == 4.0
    assert not bounds_of(clip).is_increasing
    assert bounds_of(every_operation).max_score is None


def test_the_compiled_function_has_every_operation():
    """The ahead-of-time cases compile this function, so that each operation is known to compile."""
    types = [jax.ShapeDtypeStruct((), dtype) for dtype in (jnp.float32, *[jnp.int32] * 4)]
    text = str(jax.make_jaxpr(jax.value_and_grad(every_operation))(*types))
    alone = {"add_any", "copy", "copy_p", "broadcast_in_dim", "reshape", "stop_gradient", "look_up"}
    missing = [
        name
        for name in OPERATIONS
        if name not in alone and f" {name} " not in text and f" {name}[" not in text
    ]
    assert not missing


def powered(score, batch, head, q_idx, kv_idx, table):
    return score + (1.0 + kv_idx) ** table[head]


def gathered(score, batch, head, q_idx, kv_idx, table):
    return score + jnp.take(table, head)


def sliced(score, batch, head, q_idx, kv_idx, table):
    return score + table[:2][head]


def reduced(score, batch, head, q_idx, kv_idx, table):
    return score + table.sum()


def halved(score, batch, head, q_idx, kv_idx, table):
    return score.astype(jnp.bfloat16) * 0.5


def compared(score, batch, head, q_idx, kv_idx, table):
    return score < 1


CAPTURED = jnp.arange(4.0)


def capturing(score, batch, head, q_idx, kv_idx, table):
    return score + CAPTURED[head]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (powered, "powered: it uses pow"),
        (gathered, "gathered: it must index its arrays with scalars"),
        (sliced, "an array is indexed by slice"),
        (reduced, "it must index its arrays with scalars and be elementwise otherwise"),
        (halved, "it computes in bfloat16"),
        (compared, "it does not return a scalar of float dtype"),
        (capturing, r"it captures an array, which jattn.ScoreMod\(f, \*arrays\) takes as an argument"),
    ],
)
def test_what_kernels_cannot_evaluate_has_a_reason(function, reason):
    with pytest.raises(NotImplementedError, match=reason):
        raise NotImplementedError(why_no_kernel(ScoreModType(function, table_types((CAPTURED,)))))


def test_floor_and_ceil_equal_those_of_jnp():
    def function(score, batch, head, q_idx, kv_idx):
        return jnp.floor(score) + 2.0**26 * jnp.ceil(score)

    numbers = [-2.0, -1.5, -1e-9, 0.0, 1e-9, 2.5, 2.0**22 + 0.5, 2.0**30, jnp.inf, -jnp.inf, jnp.nan]
    scores = jnp.resize(jnp.asarray(numbers), SHAPE)
    (value, _), (expected, _) = evaluate(function, (), scores, has_key_rows=False, has_heads=False)
    np.testing.assert_array_equal(value, expected)


def test_captured_scalars_are_constants():
    gain, offset = jnp.float32(0.5), np.float32(2.0)

    def function(score, batch, head, q_idx, kv_idx, zero):
        return score * gain + offset + zero

    arrays = (jnp.float32(0.0),)
    (value, _), _ = evaluate(function, arrays, jnp.ones(SHAPE), has_key_rows=False, has_heads=False)
    np.testing.assert_array_equal(value, np.full(SHAPE, 2.5))


def body(scores_g, mod, value_g, derivative_g):
    """Evaluate a score function on a tile of a minimal kernel."""
    request = scores_g[0, 0].astype(jnp.int32)
    iota = lambda shape, layout: lambda: plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
    pairs = ScoreTile(
        shape=SHAPE,
        request=request,
        head=PairValue(lambda: request + 1, ()),
        query=Positions(request, iota(SHAPE[:1], ROW), (0,), SHAPE[0]),
        key=Positions(request, iota(SHAPE[1:], COLUMN), (1,), SHAPE[1]),
        query_axis=0,
        is_interpreted=False,
    )
    scores = plgpu.load(scores_g, layout=WGMMA, optimized=False)
    new_scores, derivative = mod.apply_with_derivative(
        scores, 0.1, pairs, mod.load(pairs, with_derivative=True)
    )
    value_g[...] = as_scores(new_scores, 0)
    derivative_g[...] = derivative


@pytest.mark.kernels
@pytest.mark.parametrize(("function", "tables"), [(every_operation, ()), (every_lookup, TABLES)])
def test_functions_with_their_derivatives_lower_for_a_gpu(function, tables):
    arrays = [jax.ShapeDtypeStruct(table.shape, table.dtype) for table in tables]
    kernel = plgpu.kernel(
        body, out_type=(jax.ShapeDtypeStruct(SHAPE, jnp.float32),) * 2, grid=(1,), grid_names=("cta",),
        num_threads=1, thread_name="warpgroup", compiler_params=plgpu.CompilerParams(approx_math=True),
    )  # fmt: skip
    make = functools.partial(KernelScoreMod.of, ScoreModType(function, tables), first_row=0)
    run = jax.jit(lambda scores, arrays: kernel(scores, make(arrays)))
    lowered = run.trace(jax.ShapeDtypeStruct(SHAPE, jnp.float32), arrays).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.kernels
@pytest.mark.slow
def test_kernels_with_score_functions_compile():
    aot.require_plugin()
    compiled = aot.compile_all("tests.pallas_kernels.score_mod.score_mod_aot_cases", list(aot_cases()))
    names = {
        kernel.name.removesuffix("_mosaic_gpu_kernel") for kernels in compiled.values() for kernel in kernels
    }
    assert names >= {"varlen_prefill", "paged_decode", "varlen_backward", "varlen_backward_queries"}
