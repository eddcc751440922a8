"""add_norm against the reference in interpret mode and on a GPU; compilation and refusals."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.add_norm import add_norm, reference
from tests import aot
from tests.contract import case_id
from tests.covering_array import covering_array

WIDTHS = (128, 896, 4096)


def problem(rows=3, width=896, dtype=jnp.bfloat16, scale=3.0):
    keys = jax.random.split(jax.random.key(0), 3)
    x, sublayer_out = (scale * jax.random.normal(key, (rows, width), dtype) for key in keys[:2])
    return x, sublayer_out, 1 + 0.1 * jax.random.normal(keys[2], (width,), dtype)


def check(x, sublayer_out, weight, *, is_offset=False, interpret=None):
    run = jax.jit(functools.partial(add_norm, eps=1e-5, is_offset=is_offset, interpret=interpret))
    total, normed = run(x, sublayer_out, weight)
    want_total, expected = reference.add_norm(x, sublayer_out, weight, 1e-5, is_offset=is_offset)
    assert total.dtype == normed.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(total, np.float64), want_total)
    # The normalised row and its product with the weight are each rounded once.
    unit = float(jnp.finfo(x.dtype).eps)
    np.testing.assert_allclose(np.asarray(normed, np.float64), expected, rtol=1.1 * unit, atol=1e-6)


@pytest.mark.parametrize("is_offset", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_add_norm_matches_the_reference(width, adds, is_offset):
    x, sublayer_out, weight = problem(width=width)
    interpret = plgpu.InterpretGPUParams()
    check(x, sublayer_out if adds else None, weight, is_offset=is_offset, interpret=interpret)


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e4])
def test_add_norm_is_accurate_for_small_and_large_rows(scale):
    x, sublayer_out, weight = problem(width=128, scale=scale)
    check(x, sublayer_out, weight, interpret=plgpu.InterpretGPUParams())


def test_non_finite_rows_do_not_affect_others():
    x, sublayer_out, weight = problem(width=128)
    run = functools.partial(add_norm, interpret=plgpu.InterpretGPUParams())
    actual, expected = run(x.at[1].set(jnp.nan), sublayer_out, weight), run(x, sublayer_out, weight)
    for actual_array, expected_array in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(actual_array)[[0, 2]], np.asarray(expected_array)[[0, 2]])


def test_empty_input_returns_empty_results():
    x, sublayer_out, weight = problem()
    total, normed = add_norm(x[:0], sublayer_out[:0], weight)
    assert total.shape == normed.shape == (0, 896)


class TestErrors:
    def test_wrong_shapes_are_refused(self):
        x, sublayer_out, weight = problem()
        with pytest.raises(ValueError, match=r"sublayer_out must .*\(3, 896\).*got \(2, 896\)"):
            add_norm(x, sublayer_out[:2], weight)
        with pytest.raises(ValueError, match=r"weight must .*\(896,\).*got \(895,\)"):
            add_norm(x, sublayer_out, weight[:-1])
        with pytest.raises(ValueError, match=r"x must have 2 axes, got \(3, 7, 128\)"):
            add_norm(x.reshape(3, 7, 128), None, weight)

    def test_unsupported_dtypes_and_widths_are_refused(self):
        x, sublayer_out, weight = problem()
        with pytest.raises(NotImplementedError, match="inputs of bfloat16 and float32 are not supported"):
            add_norm(x, sublayer_out, weight.astype(jnp.float32))
        with pytest.raises(NotImplementedError, match="dtype=float32 is not supported"):
            add_norm(*(y.astype(jnp.float32) for y in (x, sublayer_out, weight)))
        with pytest.raises(NotImplementedError, match="rows of 832"):
            add_norm(x[:, :832], sublayer_out[:, :832], weight[:832])


def aot_cases():
    """Return the shipped kernels: widths of models with one row, a batch and a prompt."""
    shape, cases = jax.ShapeDtypeStruct, {}
    for rows, width, adds in itertools.product(
        (1, 8192), (896, 2048, 3584, 4096, 8192, 16384), (True, False)
    ):
        x, weight = shape((rows, width), jnp.bfloat16), shape((width,), jnp.bfloat16)
        run = add_norm if adds else _norm
        cases[f"{rows}-{width}-{adds}"] = (run, (x, x, weight) if adds else (x, weight), ())
    return cases


def _norm(x, weight):
    return add_norm(x, None, weight)


@pytest.mark.kernels
@pytest.mark.parametrize(
    "gpu", ["9.0", "8.0", *(pytest.param(gpu, marks=pytest.mark.slow) for gpu in ("8.9", "12.0"))]
)
def test_shipped_kernels_compile_without_spills(gpu):
    aot.require_plugin()
    names = list(aot_cases())[:: 1 if gpu == "9.0" else 5]
    kernels = aot.compile_all("tests.pallas_kernels.add_norm.test_entry", names, gpu)
    assert list(kernels) == names
    for name, (kernel,) in kernels.items():
        assert kernel.spilled_bytes == 0, name


ON_GPU = {"width": [*WIDTHS, 5120, 16384], "adds": [False, True], "dtype": ["bfloat16", "float16"]}


@pytest.mark.gpu
@pytest.mark.parametrize("case", covering_array(ON_GPU), ids=case_id)
def test_add_norm_matches_the_reference_on_a_gpu(case):
    width, adds, dtype = case.values()
    for rows, is_offset in itertools.product((1, 61, 5000), (False, True)):
        x, sublayer_out, weight = problem(rows=rows, width=width, dtype=dtype)
        check(x, sublayer_out if adds else None, weight, is_offset=is_offset)
