"""Device functions agree with their fallbacks on a GPU; without one, both run or compile."""

import importlib
import pathlib
import pkgutil
import re

import jax
import numpy as np
import pytest

from pallas_kernels import collectives, ptx
from pallas_kernels.ptx.fallback import DeviceFunction
from tests import aot
from tests.pallas_kernels.ptx.cases import all_cases

CASES = all_cases()
# Complete kernels, which the tests of the functions that launch them compare with their fallbacks.
KERNELS = {"cumulative_units", "list_tiles", "top_k_blocks", "sort_work_tiles"}


def device_functions():
    """Yield (name, DeviceFunction) for each one in the ptx package."""
    for module in pkgutil.iter_modules(ptx.__path__):
        for x in vars(importlib.import_module(f"{ptx.__name__}.{module.name}")).values():
            if isinstance(x, DeviceFunction):
                yield x.on_gpu.__name__, x


def test_each_device_function_has_a_case():
    tested = [function for case in CASES.values() for function in case.functions]
    assert {name for name, function in device_functions() if function not in tested} == KERNELS


def test_contributing_lists_each_ptx_module():
    text = (pathlib.Path(__file__).parents[3] / "docs" / "kernels.md").read_text()
    rows = re.findall(
        r"^\| ((?:collectives/ptx: )?[a-z0-9_, ]+) \| [^|]* \| [^|]*\|$", text, flags=re.MULTILINE
    )
    listed = {name.split(": ")[-1] for names in rows for name in names.split(", ")}
    folders = [pathlib.Path(ptx.__path__[0]), pathlib.Path(collectives.__path__[0]) / "ptx"]
    modules = {path.stem for folder in folders for path in folder.glob("[!_]*.py")}
    assert modules <= listed


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(CASES))
def test_device_function_equals_its_fallback(name):
    case = CASES[name]
    with jax.default_matmul_precision("highest"):
        fallback_results = jax.jit(case.fallback)(*case.arrays)
    for result, expected in zip(jax.jit(case.on_gpu)(*case.arrays), fallback_results, strict=True):
        result, expected = (np.asarray(x, np.float64) for x in (result, expected))
        scale = np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
        np.testing.assert_allclose(result, expected, rtol=0, atol=case.tolerance * scale)


@pytest.mark.parametrize("name", list(CASES))
def test_fallback_has_the_device_functions_shapes_and_dtypes(name):
    case = CASES[name]
    expected = jax.eval_shape(case.on_gpu, *case.arrays)
    results = jax.jit(case.fallback)(*case.arrays)
    assert [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in expected]
    assert not any(np.isnan(np.asarray(x, np.float64)).any() for x in results)


def aot_cases():
    """Return each case's function and abstract arguments by name."""
    as_shapes = lambda case: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.arrays)
    return {name: (case.on_gpu, as_shapes(case)) for name, case in CASES.items()}


def test_device_functions_compile_without_spills():
    aot.require_plugin()
    module = "tests.pallas_kernels.ptx.test_fallback"
    reports = aot.compile_all(module, list(CASES))
    same = [name for name, kernels in reports.items() if not kernels]  # an earlier case has the same code
    reports |= {name: aot.kernels_in(text) for name, text in aot.apart_reports(module, same).items()}
    for name, kernels in reports.items():
        assert [kernel.spilled_bytes for kernel in kernels] == [0], name
