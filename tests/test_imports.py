"""The import law: examples, benchmarks, tests -> jattn -> pallas_kernels -> jax."""

import ast
import importlib
import inspect
import re
import subprocess
import sys

import pytest

import jattn
from tests.sources import FILES as OF_FOLDER
from tests.sources import FOLDERS, ROOT, tree

FILES = [path for folder in FOLDERS for path in OF_FOLDER[folder]]
# Packages that a file may import only inside a function, because they are extras; the server's files are one.
EXTRAS = {"safetensors", "tokenizers", "tqdm", "matplotlib", "optax", "pytest", "hypothesis"}
SERVER = ROOT / "jattn" / "serving" / "server"
SERVE = {"jinja2", "llguidance", "prometheus_client", "pydantic", "starlette", "uvicorn", "yaml"}


def imports(path, *, top_level_only=False):
    nodes = tree(path).body if top_level_only else ast.walk(tree(path))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_file_imports_only_what_stands_below_it(folder):
    for path in OF_FOLDER[folder]:
        names, top = set(imports(path)), set(imports(path, top_level_only=True))
        roots, top_roots = ({name.split(".")[0] for name in some} for some in (names, top))
        assert not roots & {"examples", "benchmarks", "tests", "torch", "__future__"}, path
        assert not any(name.startswith(("jax._src", "jaxlib")) for name in names), path
        assert not top_roots & EXTRAS, path
        if SERVER not in path.parents:
            assert not top_roots & SERVE, path
            assert not any(name.startswith("jattn.serving.server") for name in top), path
        if folder == "pallas_kernels":
            assert not roots & {"jattn", "flax"}, path
            assert path.name != "reference.py" or "pallas_kernels" not in roots, path


# What builds code a lane at a time. Descriptions of layouts are data, which cache_write makes of its own.
LANES = ("jax.experimental.mosaic", "jax.extend.mlir")
LAYOUTS = "jax.experimental.mosaic.gpu.fragmented_array"


def test_ptx_and_lanes_are_in_one_room():
    for path in FILES:
        if path.parent == ROOT / "pallas_kernels" / "ptx":
            continue
        assert not [name for name in imports(path) if name.startswith(LANES) and name != LAYOUTS], path
        names = {node.attr for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
        assert not names & {"inline_mgpu", "inline_ptx"}, path


def test_the_host_side_imports_no_jax():
    for name in (
        "jattn/batch/requests.py",
        "jattn/serving/engine/block_manager.py",
        "jattn/serving/engine/scheduler.py",
    ):
        if (ROOT / name).exists():
            assert "jax" not in {n.split(".")[0] for n in imports(ROOT / name)}


def test_flax_is_imported_only_where_modules_are():
    users = {p.relative_to(ROOT).parts[1] for p in FILES if any(n.startswith("flax") for n in imports(p))}
    assert users <= {"nn.py", "runtime", "calibration.py", "models", "serving"}


def test_every_public_name_is_documented():
    for name in jattn.__all__:
        assert getattr(jattn, name).__doc__, name
    for name in set(jattn.vllm.__all__) - {"PAD_SLOT_ID"}:
        assert "Source: vLLM" in getattr(jattn.vllm, name).__doc__, name


@pytest.mark.parametrize("package", [jattn, jattn.models, jattn.sparsity], ids=lambda one: one.__name__)
def test_public_functions_tell_of_each_of_their_arguments(package):
    named = {name: getattr(package, name) for name in package.__all__}
    own = [f for f in named.values() if inspect.isfunction(f) and "jattn.masks" not in f.__module__]
    assert len(own) > 2
    of = {
        f.__name__: [name for name in inspect.signature(f).parameters if f"{name}:" not in f.__doc__]
        for f in own
    }
    assert {name: missing for name, missing in of.items() if missing} == {}


def test_vllm_helpers_are_found_in_jattn_vllm_only():
    assert not set(jattn.__all__) & set(jattn.vllm.__all__)
    assert not any(hasattr(jattn, name) for name in jattn.vllm.__all__)


def test_nothing_of_ours_names_the_old_place():
    folders = ("jattn", "pallas_kernels", "tests", "examples", "benchmarks", "docs")
    pages = [ROOT / "README.md", *(p for folder in folders for p in (ROOT / folder).rglob("*.[mp][dy]"))]
    old = re.compile(rf"\bjattn\.({'|'.join(jattn.vllm.__all__)})\b")
    assert [(str(page), match[0]) for page in pages for match in old.finditer(page.read_text())] == []


def test_nothing_of_the_flow_calls_vllms_helpers():
    for path in FILES:
        if "vllm" not in path.parts and path != ROOT / "jattn" / "__init__.py":
            assert not any(name.startswith("jattn.vllm") for name in imports(path)), path


def test_importing_jattn_starts_no_backend_and_reads_no_environment():
    code = "import jattn, jax; from jax.extend import backend; print(len(jax._src.xla_bridge._backends))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "0"
    assert not [p for p in FILES if "os.environ" in p.read_text() or "getenv" in p.read_text()]


def test_ptx_says_what_it_is_given():
    """Annotations there are words of pallas_kernels.shared.types, or of JAX; mypy asks for one of each."""
    for path in (ROOT / "pallas_kernels" / "ptx").glob("*.py"):
        names = {node.id for node in ast.walk(tree(path)) if isinstance(node, ast.Name)}
        assert "Any" not in names, path


def taken_of_jattn(path):
    """(module, name) of each name that a file takes out of a package of jattn's."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jattn"):
            yield from ((node.module, alias.name) for alias in node.names)


def test_examples_take_public_names_only():
    public = {"jattn", *(f"jattn.{name}" for name in jattn.__all__), "jattn.serving.server"}
    taken = {pair for path in (ROOT / "examples").rglob("*.py") for pair in taken_of_jattn(path)}
    assert ("jattn.serving", "Engine") in taken
    assert [(module, name) for module, name in sorted(taken) if module not in public] == []
    hidden = [pair for pair in sorted(taken) if pair[1] not in importlib.import_module(pair[0]).__all__]
    assert hidden == []
