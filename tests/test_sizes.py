"""How long files and functions are: short enough to be read at one go."""

import ast
import statistics

import pytest

from tests.sources import FILES, FOLDERS, ROOT, tree

MAX_FILE, MEDIAN_FILE = 350, 120
MAX_FUNCTION, MAX_KERNEL_BODY = 60, 120  # docstrings counted


def is_kernel_body(path, function):
    """Whether a function is the program of a kernel, as plgpu.kernel runs it: named so in pallas_kernels."""
    return "pallas_kernels" in path.parts and function.name.endswith(("body", "kernel"))


def functions(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_are_short(folder):
    lengths = {path: len(path.read_text().splitlines()) for path in FILES[folder]}
    assert {str(path): n for path, n in lengths.items() if n > MAX_FILE} == {}
    assert statistics.median(lengths.values()) <= MEDIAN_FILE


def test_a_family_is_a_short_record():
    folder = ROOT / "jattn" / "models" / "families"
    records = [path for path in folder.glob("*.py") if "= Family(\n" in path.read_text()]
    assert len(records) >= 30
    assert {path.name: n for path in records if (n := len(path.read_text().splitlines())) > 80} == {}


@pytest.mark.parametrize("folder", FOLDERS)
def test_functions_are_short(folder):
    long = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": lines
        for path in FILES[folder]
        for node, lines in functions(path)
        if lines > (MAX_KERNEL_BODY if is_kernel_body(path, node) else MAX_FUNCTION)
    }
    assert long == {}
