"""cache_write against the reference in interpret mode and on a GPU; compilation and refusals."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jattn.cache.quantization import quantize_static, quantize_token_head
from pallas_kernels.architectures import ARCHITECTURES
from pallas_kernels.cache_write import CacheWriteSizes, cache_write, reference
from pallas_kernels.support import why_not_write
from tests import aot
from tests.contract import case_id
from tests.covering_array import covering_array

SLOTS = [7, -1, 0, 30, -5, 12, 13, 9, 63]


def problem(layout, tokens=9, heads=2, dim=64, blocks=8, size=8, dtype=jnp.bfloat16):
    shape = (blocks, size, heads, dim) if layout == "NHD" else (blocks, heads, size, dim)
    keys = jax.random.split(jax.random.key(0), 4)
    key, value = (jax.random.normal(k, (tokens, heads, dim), dtype) for k in keys[:2])
    caches = tuple(jax.random.normal(k, shape, dtype) for k in keys[2:])
    slots = np.random.default_rng(0).permutation(blocks * size)[:tokens].astype(np.int32)
    slots[::5] = -1
    return key, value, *caches, jnp.asarray(SLOTS, jnp.int32) if tokens == len(SLOTS) else jnp.asarray(slots)


def check(arguments, layout, **options):
    expected = reference.cache_write(*arguments, layout=layout)
    write = jax.jit(functools.partial(cache_write, layout=layout, **options), donate_argnums=(2, 3))
    for actual, array in zip(write(*arguments)[:2], expected, strict=True):
        np.testing.assert_array_equal(actual, array)


# What keys and values become in a cache of 16 bits and narrower ones, and their scales.
FORMATS = {
    "int8_token_head": (jnp.int8, 3, jnp.int8, 3),
    "fp8_token_head": (jnp.float8_e4m3fn, 3, jnp.float8_e4m3fn, 3),
    "fp8_static": (jnp.float8_e4m3fn, 0, jnp.float8_e4m3fn, None),
    "int8_k_only": (jnp.int8, 3, jnp.bfloat16, None),
}


def rounding_problem(layout, name, **sizes):
    """Return the arguments of `problem` with 8-bit caches, and their scales."""
    key, value, k, v, slots = problem(layout, **sizes)
    k_dtype, k_ndim, v_dtype, v_ndim = FORMATS[name]
    key = key.at[:, 0].multiply(jnp.exp2(jnp.arange(len(key)) % 30 - 15).astype(key.dtype)[:, None])
    key = key.at[2, 1].set(0)
    heads, size = k.shape[1:3] if layout == "HND" else k.shape[2:0:-1]
    scale = lambda ndim: {
        None: None,
        0: jnp.float32(0.02),
        3: jnp.full((k.shape[0], heads, size), 7, jnp.float32),
    }[ndim]
    small = lambda x, dtype: jnp.clip(x.astype(jnp.float32), -3, 3).astype(dtype)
    scales = {"k_scale": scale(k_ndim), "v_scale": scale(v_ndim)}
    return (key, value, small(k, k_dtype), small(v, v_dtype), slots), scales


def check_rounding(arguments, scales, layout, **options):
    """Compare with XLA's quantization in float32; only ties may be rounded to either side."""
    key, value, *caches, slots = arguments
    rounded = []
    for x, cache, scale in zip((key, value), caches, scales.values(), strict=True):
        if scale is not None and scale.ndim == 3:
            rounded.append(quantize_token_head(x, cache.dtype))
        else:
            rounded.append((quantize_static(x, scale, cache.dtype), None))
    expected = reference.cache_write(*(x for x, _ in rounded), *caches, slots, layout=layout)
    want_scales = [
        old if new is None else reference.scale_write(new, old, slots)
        for (_, new), old in zip(rounded, scales.values(), strict=True)
    ]
    write = jax.jit(functools.partial(cache_write, layout=layout, **options), donate_argnums=(2, 3))
    *actual, k_scale, v_scale = write(*arguments, **scales)
    for array, expected_array in zip(actual, expected, strict=True):
        assert array.dtype == expected_array.dtype
        array, expected_array = (np.asarray(x.astype(jnp.float32)) for x in (array, expected_array))
        unit = 1 if jnp.dtype(actual[0].dtype) == jnp.int8 else np.maximum(np.abs(expected_array), 2**-6) / 8
        assert (np.abs(array - expected_array) <= unit).all()
        assert (array != expected_array).mean() < 0.01
    for scale, expected_array in zip((k_scale, v_scale), want_scales, strict=True):
        assert (scale is None) == (expected_array is None)
        if scale is not None:
            np.testing.assert_allclose(scale, expected_array, rtol=1e-6)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("name", "uses_tma"), [*((name, True) for name in FORMATS), ("int8_k_only", False)])
def test_cache_write_quantizes_to_8_bits(layout, name, uses_tma):
    arguments, scales = rounding_problem(layout, name, heads=2, dim=64)
    sizes = CacheWriteSizes(rows=4, uses_tma=uses_tma)
    check_rounding(arguments, scales, layout, sizes=sizes, interpret=plgpu.InterpretGPUParams())


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda d: d.__name__)
@pytest.mark.parametrize("uses_tma", [True, False])
def test_each_token_is_written_to_its_slot_only(layout, rows, dtype, uses_tma):
    arguments, sizes = problem(layout, dtype=dtype), CacheWriteSizes(rows=rows, uses_tma=uses_tma)
    check(arguments, layout, sizes=sizes, interpret=plgpu.InterpretGPUParams())


def aot_cases():
    """Return the shipped kernels: both layouts, the widths of models, one token to a long prompt."""
    shape = jax.ShapeDtypeStruct
    cases = {}
    sizes = ((1, 8, 128), (64, 8, 64), (64, 32, 128), (8192, 8, 128), (33, 2, 256), (9, 8, 80), (9, 1, 128))
    for layout, (tokens, heads, dim) in itertools.product(("NHD", "HND"), sizes):
        per_block = (16, heads) if layout == "NHD" else (heads, 16)
        new, cache = (shape(s, jnp.bfloat16) for s in ((tokens, heads, dim), (100_000, *per_block, dim)))
        slots, name = shape((tokens,), jnp.int32), f"{layout}-{tokens}-{heads}-{dim}"
        write = functools.partial(_write_with_scales, layout=layout)
        cases[name] = (write, (new, new, cache, cache, slots, None, None), (2, 3))
        if (layout == "NHD") == (tokens == 64):
            continue  # 8-bit writes of half of them
        for format_name, (k_dtype, k_ndim, v_dtype, v_ndim) in FORMATS.items():
            by_head = {None: None, 0: shape((), jnp.float32), 3: shape((100_000, heads, 16), jnp.float32)}
            arguments = (shape(cache.shape, k_dtype), shape(cache.shape, v_dtype), slots)
            donated = (2, 3, *(5 + i for i, ndim in enumerate((k_ndim, v_ndim)) if ndim == 3))
            arguments = (new, new, *arguments, by_head[k_ndim], by_head[v_ndim])
            cases[f"{name}-{format_name}"] = (write, arguments, donated)
    return cases


def _write_with_scales(key, value, k, v, slots, k_scale, v_scale, *, layout):
    return cache_write(key, value, k, v, slots, k_scale=k_scale, v_scale=v_scale, layout=layout)


@pytest.mark.parametrize("gpu", ["9.0", "8.0", pytest.param("8.9", marks=pytest.mark.slow), "12.0"])
def test_shipped_kernels_compile_without_spills_or_copies(gpu):
    aot.require_plugin()
    names = list(aot_cases())[:: 1 if gpu == "9.0" else 5]
    if not ARCHITECTURES[gpu].has_fp8_conversion:
        names = [name for name in names if "fp8" not in name]
    kernels = aot.compile_all("tests.pallas_kernels.cache_write.test_entry", names, gpu)
    assert list(kernels) == names
    for name, (kernel,) in kernels.items():
        assert kernel.spilled_bytes == 0, name


INT8 = {"k_dtype": jnp.int8, "v_dtype": jnp.int8, "k_scale_ndim": 3, "v_scale_ndim": 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "packed"}, "layout=packed is not supported; supported: NHD, HND"),
        ({"head_dim": 4, "kv_heads": 1}, "8 bytes of keys per token are not supported"),
        (
            {"layout": "HND", "head_dim": 32, "kv_heads": 1},
            "64 bytes of keys per token are not supported with layout=HND",
        ),
        (
            {"layout": "HND", "head_dim": 4, "kv_heads": 16},
            "8 bytes per head are not supported with layout=HND",
        ),
        (
            {"layout": "HND", "kv_heads": 512},
            "kv_heads=512 is not supported with layout=HND; the maximum is 256",
        ),
        (
            {"layout": "HND", "head_dim": 512},
            "head_dim=512 is not supported with layout=HND; the maximum is 256",
        ),
        (INT8 | {"dtype": jnp.float32}, "keys of float32 into a cache of int8"),
        ({"v_dtype": jnp.float8_e5m2}, "values of bfloat16 into a cache of float8_e5m2"),
        (INT8 | {"v_scale_ndim": 2}, "values of bfloat16 into a cache of int8 with a scale of 2 axes"),
        ({"k_scale_ndim": 0}, "keys of bfloat16 into a cache of bfloat16 with a scale of 0 axes"),
        (
            INT8 | {"kv_heads": 1},
            "64 bytes of keys per token are not supported with layout=NHD and stored dtypes int8",
        ),
        (INT8 | {"head_dim": 48, "kv_heads": 8}, "head_dim=48 is not supported for an 8-bit cache"),
    ],
)
def test_why_not_write_names_what_is_not_supported(change, message):
    good = {"dtype": jnp.bfloat16, "k_dtype": jnp.bfloat16, "v_dtype": jnp.bfloat16, "layout": "NHD"}
    good |= {"kv_heads": 2, "head_dim": 64}
    assert why_not_write(**good) is None
    assert why_not_write(**(good | INT8)) is None
    assert re.search(message, why_not_write(**(good | change)))


def test_quantizing_to_fp8_is_refused_without_the_instruction():
    good = {"dtype": jnp.bfloat16, "layout": "NHD", "kv_heads": 2, "head_dim": 64}
    fp8 = {"k_dtype": jnp.float8_e4m3fn, "v_dtype": jnp.float8_e4m3fn, "k_scale_ndim": 0, "v_scale_ndim": 0}
    assert why_not_write(**good, **fp8, gpu="8.9") is None
    assert why_not_write(**good, **INT8, gpu="8.0") is None
    reason = why_not_write(**good, **fp8, gpu="8.0")
    assert reason.endswith("a cache of float8_e4m3fn is not supported on compute capability 8.0")


def test_wrong_arguments_are_refused():
    key, value, k, v, slots = problem("NHD")
    for arguments, message in (
        ((key, value, k[:, :4], v, slots), r"v_cache must have shape \(8, 4, 2, 64\).*got \(8, 8, 2, 64\)"),
        ((key, value.astype(jnp.float16), k, v, slots), "value.dtype must be one of .*bfloat16.*float16"),
    ):
        with pytest.raises(ValueError, match=message):
            cache_write(*arguments)
    arguments, _ = rounding_problem("NHD", "int8_token_head")
    with pytest.raises(ValueError, match=r"k_scale must have shape \(8, 2, 8\).*got \(8, 8, 2\)"):
        cache_write(*arguments, k_scale=jnp.ones((8, 8, 2)), v_scale=jnp.ones((8, 2, 8)))
    with pytest.raises(
        NotImplementedError, match="cache_write: 64 bytes of keys per token are not supported with layout=HND"
    ):
        cache_write(*problem("HND", heads=1, dim=32), layout="HND")


PLAIN_ON_GPU = {
    "layout": ["NHD", "HND"],
    "tokens": [1, 9, 64, 133, 1000],
    "shape": [(8, 128), (1, 64), (32, 128), (2, 256), (4, 80)],  # heads and head_dim
}
QUANTIZED_ON_GPU = {
    "layout": ["NHD", "HND"],
    "name": list(FORMATS),
    "tokens": [1, 133, 1000],
    "shape": [(8, 128), (2, 64), (32, 128), (2, 256), (8, 80)],
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", covering_array(PLAIN_ON_GPU), ids=case_id)
def test_each_token_is_written_to_its_slot_only_on_a_gpu(case):
    layout, tokens, (heads, dim) = case.values()
    check(problem(layout, tokens=tokens, heads=heads, dim=dim, blocks=200, size=16), layout)


@pytest.mark.gpu
@pytest.mark.parametrize("case", covering_array(QUANTIZED_ON_GPU), ids=case_id)
def test_cache_write_quantizes_to_8_bits_on_a_gpu(case):
    layout, name, tokens, (heads, dim) = case.values()
    arguments, scales = rounding_problem(
        layout, name, tokens=tokens, heads=heads, dim=dim, blocks=200, size=16
    )
    check_rounding(arguments, scales, layout)
