"""qkv_write against the reference in interpret mode and on a GPU; compilation and refusals."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cache_write.kernel import row_layout
from pallas_kernels.qkv_write import qkv_write, reference
from pallas_kernels.shared.memory import HEAD_DIMS
from pallas_kernels.support import why_not_qkv_write
from tests import aot
from tests.contract import case_id
from tests.covering_array import covering_array

SLOTS = [7, -1, 0, 30, -5, 12, 13, 9, 63]
PARTS = {"all": "nr", "no norm": "r", "no rope": "n", "values alone": ""}


def problem(layout="NHD", tokens=9, heads=2, group=3, dim=64, dtype=jnp.bfloat16, parts="nr"):
    keys = iter(jax.random.split(jax.random.key(0), 8))
    shape = (8, 8, heads, dim) if layout == "NHD" else (8, heads, 8, dim)
    qkv = 3 * jax.random.normal(next(keys), (tokens, heads, group + 2, dim), dtype)
    caches = [jax.random.normal(next(keys), shape, dtype) for _ in range(2)]
    angles = 100 * jax.random.normal(next(keys), (tokens, dim // 2))
    other_slots = np.random.default_rng(0).permutation(64)  # no slot twice: which token stays would be chance
    slots = jnp.asarray(SLOTS[:tokens] if tokens <= len(SLOTS) else other_slots[:tokens], jnp.int32)
    named = {}
    if "n" in parts:
        weight = lambda: 1 + 0.1 * jax.random.normal(next(keys), (dim,), dtype)
        named |= {name: weight() for name in ("q_norm", "k_norm")}
    if "r" in parts:
        named |= {name: f(angles).astype(dtype) for name, f in (("cos", jnp.cos), ("sin", jnp.sin))}
    return (qkv, *caches, slots), named


def check(layout, interpret=None, is_offset=False, **options):
    (qkv, k_cache, v_cache, slots), named = problem(layout, **options)
    norm_options = {"eps": 1e-5, "is_offset": is_offset}
    expected_outputs = reference.qkv_write(qkv, **named, **norm_options)
    expected = [np.asarray(cache, np.float64) for cache in (k_cache, v_cache)]
    for token, slot in enumerate(np.asarray(slots)):
        if slot >= 0:
            index = divmod(slot, 8) if layout == "NHD" else (slot // 8, slice(None), slot % 8)
            for cache, new in zip(expected, expected_outputs[1:], strict=True):
                cache[index] = new[token]
    write = jax.jit(
        functools.partial(qkv_write, layout=layout, interpret=interpret, **norm_options),
        donate_argnums=(1, 2),
    )
    query, k, v = write(qkv, k_cache, v_cache, slots, **named)
    assert query.shape == expected_outputs[0].shape
    unit = float(jnp.finfo(qkv.dtype).eps)
    for actual, expected_array in ((query, expected_outputs[0]), (k, expected[0])):
        assert actual.dtype == qkv.dtype
        # The normalised head, its product with the weight and the rotated pair are each rounded once.
        np.testing.assert_allclose(
            np.asarray(actual, np.float64), expected_array, rtol=2 * unit, atol=12 * unit
        )
    np.testing.assert_array_equal(np.asarray(v, np.float64), expected[1])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_qkv_write_matches_the_reference(layout, parts):
    check(layout, parts=parts, interpret=plgpu.InterpretGPUParams())


@pytest.mark.parametrize("is_offset", [False, True])
@pytest.mark.parametrize(("heads", "group", "dim"), [(1, 1, 128), (4, 1, 32), (3, 4, 96), (8, 4, 128)])
def test_qkv_write_supports_the_heads_and_norms_of_models(is_offset, heads, group, dim):
    check(
        "NHD",
        interpret=plgpu.InterpretGPUParams(),
        heads=heads,
        group=group,
        dim=dim,
        tokens=3,
        is_offset=is_offset,
    )


def test_tokens_without_a_slot_are_not_written():
    (qkv, *caches, slots), named = problem()
    poisoned = jnp.where((slots < 0)[:, None, None, None], jnp.nan, qkv)
    write = functools.partial(qkv_write, **named, interpret=plgpu.InterpretGPUParams())
    actual, expected = (write(actual_cache, *caches, slots) for actual_cache in (poisoned, qkv))
    is_kept = np.asarray(slots) >= 0
    np.testing.assert_array_equal(actual[0][is_kept], expected[0][is_kept])
    for actual_cache, expected_cache in zip(actual[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(actual_cache, expected_cache)


def test_empty_batch_leaves_the_caches_unchanged():
    (qkv, k_cache, v_cache, slots), _ = problem()
    query, k, v = qkv_write(qkv[:0], k_cache, v_cache, slots[:0], interpret=plgpu.InterpretGPUParams())
    assert query.shape == (0, qkv.shape[1] * (qkv.shape[2] - 2), qkv.shape[3])
    assert k is k_cache
    assert v is v_cache


class TestErrors:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"k_cache": jnp.zeros((8, 8, 3, 64), jnp.bfloat16)},
                r"k_cache must .*\(8, 8, 2, 64\).*got \(8, 8, 3",
            ),
            ({"sin": None}, "RoPE requires both cos and sin, but sin is None"),
            (
                {"cos": jnp.zeros((9, 64)), "sin": jnp.zeros((9, 64))},
                r"cos must .*\(9, 32\).*got .*\(9, 64\)",
            ),
            ({"layout": "DHN"}, "layout must be one of 'NHD', 'HND', got 'DHN'"),
        ],
    )
    def test_wrong_arguments_are_refused(self, change, message):
        (qkv, k_cache, v_cache, slots), named = problem()
        arguments = {"k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slots, **named, **change}
        with pytest.raises(ValueError, match=message):
            qkv_write(qkv, **arguments)

    def test_qkv_without_query_heads_is_refused(self):
        (qkv, *rest), named = problem()
        with pytest.raises(ValueError, match="qkv has 2 heads per KV head, but at least 3"):
            qkv_write(qkv[:, :, :2], *rest, **named)

    def test_8_bit_caches_are_refused(self):
        (qkv, k_cache, v_cache, slots), named = problem()
        small = [cache.astype(jnp.int8) for cache in (k_cache, v_cache)]
        with pytest.raises(NotImplementedError, match="caches of int8, int8 are not supported"):
            qkv_write(qkv, *small, slots, **named)

    def test_head_dim_120_is_refused(self):
        (qkv, *rest), named = problem(dim=120)
        with pytest.raises(
            NotImplementedError, match="head_dim=120 is not supported; supported: 32, 64, 80, 96, 112, 128"
        ):
            qkv_write(qkv, *rest, **named)

    def test_lanes_hold_a_power_of_2_elements_of_every_supported_half_head(self):
        # LLVM places vectors of other lengths further apart than their elements are: every lane but the first
        # read, and wrote, its neighbour's.
        options = {"dtype": jnp.bfloat16, "k_dtype": jnp.bfloat16, "v_dtype": jnp.bfloat16, "layout": "NHD"}
        served = [dim for dim in HEAD_DIMS if why_not_qkv_write(head_dim=dim, **options) is None]
        for heads, dim in itertools.product((1, 2, 3, 4, 5, 8), served):
            (vector,) = row_layout(heads, dim // 2).args[0].tiles[-1]
            assert vector in (1, 2, 4), (heads, dim)


def aot_cases():
    """Return the shipped kernels: heads of models, and of one model both layouts, a batch and a prompt."""
    shape = jax.ShapeDtypeStruct
    cases = {}
    models = ((8, 4, 128), (8, 8, 64), (32, 1, 128), (4, 2, 256), (32, 1, 96), (2, 6, 80))
    steps = list(itertools.product(("NHD", "HND"), (8, 8192)))
    pairs = [(step, models[0]) for step in steps] + list(zip(steps + steps[:1], models[1:], strict=True))
    for (layout, tokens), (heads, group, dim) in pairs:
        qkv = shape((tokens, heads, group + 2, dim), jnp.bfloat16)
        per_block = (16, heads) if layout == "NHD" else (heads, 16)
        cache, slots = shape((10_000, *per_block, dim), jnp.bfloat16), shape((tokens,), jnp.int32)
        angles, weight = shape((tokens, dim // 2), jnp.bfloat16), shape((dim,), jnp.bfloat16)
        write = functools.partial(_write, layout=layout)
        arguments = (qkv, cache, cache, slots, angles, angles, weight, weight)
        cases[f"{layout}-{tokens}-{heads}x{group}-{dim}"] = (write, arguments, (1, 2))
    return cases


def _write(qkv, k_cache, v_cache, slots, cos, sin, q_weight, k_weight, *, layout):
    options = {"cos": cos, "sin": sin, "q_norm": q_weight, "k_norm": k_weight, "layout": layout}
    return qkv_write(qkv, k_cache, v_cache, slots, **options)


@pytest.mark.kernels
@pytest.mark.parametrize(
    "gpu", ["9.0", "8.0", *(pytest.param(gpu, marks=pytest.mark.slow) for gpu in ("8.9", "12.0"))]
)
def test_shipped_kernels_compile_without_spills_or_copies(gpu):
    aot.require_plugin()
    names = list(aot_cases())[:: 1 if gpu == "9.0" else 5]
    kernels = aot.compile_all("tests.pallas_kernels.qkv_write.test_entry", names, gpu)
    assert list(kernels) == names
    for name, (kernel,) in kernels.items():
        assert kernel.spilled_bytes == 0, name


MODELS = {
    "shape": [(8, 4, 128), (8, 8, 64), (32, 1, 128), (4, 2, 256), (32, 1, 96), (1, 8, 80)],
    "dtype": ["bfloat16", "float16"],
    "is_offset": [False, True],
}


@pytest.mark.gpu
class TestOnGPU:
    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    @pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
    def test_qkv_write_matches_the_reference(self, layout, parts):
        check(layout, parts=parts)

    @pytest.mark.parametrize("case", covering_array(MODELS), ids=case_id)
    def test_qkv_write_supports_the_heads_of_models(self, case):
        (heads, group, dim), dtype, is_offset = case.values()
        options = {"heads": heads, "group": group, "dim": dim, "dtype": dtype, "is_offset": is_offset}
        for tokens in (1, 60):
            check("NHD", tokens=tokens, **options)
