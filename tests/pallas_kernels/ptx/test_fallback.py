"""Code of lanes against its twin: on a GPU side by side; elsewhere the twin, and that the code compiles."""

import importlib
import pathlib
import pkgutil
import re

import jax
import numpy as np
import pytest

from pallas_kernels import ptx
from pallas_kernels.ptx.fallback import LaneCode
from tests import aot
from tests.pallas_kernels.ptx.cases import all_cases

CASES = all_cases()
# Whole kernels, held against their twins by the tests of what they are for.
PROGRAMS = {"unit_ends", "list_tiles", "best_blocks", "sorted_items", "peer_sum", "peer_gather"}


def codes():
    """Name -> LaneCode, of the whole room."""
    for module in pkgutil.iter_modules(ptx.__path__):
        for x in vars(importlib.import_module(f"{ptx.__name__}.{module.name}")).values():
            if isinstance(x, LaneCode):
                yield x.on_gpu.__name__, x


def test_each_piece_of_code_has_a_case():
    tested = [code for case in CASES.values() for code in case.codes]
    assert {name for name, code in codes() if code not in tested} == PROGRAMS


def test_contributing_says_what_each_module_costs():
    """And what it gains, for somebody to judge."""
    text = (pathlib.Path(__file__).parents[3] / "CONTRIBUTING.md").read_text()
    table = re.findall(r"^\| ([\w, ]+) \| .* \| ([\d, ]+) \| .*\|$", text, flags=re.MULTILINE)
    said = {
        name: int(n) for names, ns in table for name, n in zip(names.split(", "), ns.split(", "), strict=True)
    }
    folder = pathlib.Path(ptx.__path__[0])
    modules = {path.stem: len(path.read_text().splitlines()) for path in folder.glob("[!_]*.py")}
    assert said.keys() == modules.keys()
    assert max(abs(said[name] - num) for name, num in modules.items()) <= 20, modules


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(CASES))
def test_the_code_does_what_its_twin_does(name):
    case = CASES[name]
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(case.twin)(*case.arrays)
    for found, want in zip(jax.jit(case.on_gpu)(*case.arrays), wanted, strict=True):
        found, want = (np.asarray(x, np.float64) for x in (found, want))
        scale = np.abs(want[np.isfinite(want)]).max(initial=0.0)
        np.testing.assert_allclose(found, want, rtol=0, atol=case.tolerance * scale)


@pytest.mark.parametrize("name", list(CASES))
def test_the_twin_takes_and_gives_what_the_code_does(name):
    case = CASES[name]
    given = jax.eval_shape(case.on_gpu, *case.arrays)
    found = jax.jit(case.twin)(*case.arrays)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in given]
    assert not any(np.isnan(np.asarray(x, np.float64)).any() for x in found)


def aot_cases():
    """Name -> function and abstract arguments."""
    as_shapes = lambda case: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.arrays)
    return {name: (case.on_gpu, as_shapes(case)) for name, case in CASES.items()}


def test_the_code_compiles():
    aot.require_plugin()
    module = "tests.pallas_kernels.ptx.test_fallback"
    reports = aot.compile_all(module, list(CASES))
    alike = [name for name, kernels in reports.items() if not kernels]  # another case has the same code
    reports |= {name: aot.kernels_in(text) for name, text in aot.apart_reports(module, alike).items()}
    for name, kernels in reports.items():
        assert [kernel.spilled_bytes for kernel in kernels] == [0], name
