"""Import rules: tests, examples and benchmarks import jattn, which imports pallas_kernels."""

import ast
import functools
import graphlib
import importlib
import inspect
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

import jattn

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("jattn", "pallas_kernels")
FILES_OF = {package: sorted((ROOT / package).rglob("*.py")) for package in PACKAGES}
FILES = [path for package in PACKAGES for path in FILES_OF[package]]
# Optional dependencies: a file may import them only inside a function. The server's files may import SERVE.
EXTRAS = {
    "huggingface_hub",
    "safetensors",
    "tokenizers",
    "tqdm",
    "transformers",
    "matplotlib",
    "optax",
    "pytest",
    "hypothesis",
}
SERVER = ROOT / "jattn" / "serving" / "server"
SERVE = {"jinja2", "llguidance", "prometheus_client", "pydantic", "starlette", "uvicorn", "yaml"}
COLLECTIVES = ROOT / "pallas_kernels" / "collectives"
PTX_PACKAGES = (ROOT / "pallas_kernels" / "ptx", COLLECTIVES / "ptx")


@functools.cache
def parse(path):
    return ast.parse(path.read_text())


@functools.cache
def import_nodes(path):
    """Return the import statements of a file, also those inside functions."""
    return [node for node in ast.walk(parse(path)) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported_modules(path, *, top_level_only=False):
    """Yield the name of each module that a file imports."""
    for node in parse(path).body if top_level_only else import_nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def component_of(module):
    """Return the package or module right below jattn or pallas_kernels that a module belongs to."""
    return ".".join(module.split(".")[:2])


def imported_names(module):
    """Yield (module, name) for each import from jattn or pallas_kernels, also those inside functions."""
    for node in import_nodes(MODULES[module]):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in MODULES or node.module in MODULES:
                    yield full if full in MODULES else node.module, alias.name


def importers_of(module):
    return {name for name in MODULES for imported, _ in imported_names(name) if imported == module}


# ------------------------------------------------------------------------------- packages and dependencies
@pytest.mark.parametrize("package", PACKAGES)
def test_files_import_only_lower_layers(package):
    for path in FILES_OF[package]:
        names, top_level_names = set(imported_modules(path)), set(imported_modules(path, top_level_only=True))
        roots, top_roots = ({name.split(".")[0] for name in modules} for modules in (names, top_level_names))
        assert not roots & {"examples", "benchmarks", "tests", "torch", "__future__"}, path
        assert not any(name.startswith(("jax._src", "jaxlib")) for name in names), path
        assert not top_roots & EXTRAS, path
        if SERVER not in path.parents:
            assert not top_roots & SERVE, path
            assert not any(name.startswith("jattn.serving.server") for name in top_level_names), path
        if package == "pallas_kernels":
            assert not roots & {"jattn", "flax"}, path
            assert path.name != "reference.py" or "pallas_kernels" not in roots, path


def test_packages_do_not_import_each_other_in_a_cycle():
    graph = {}
    for module in set(MODULES) - {"jattn"}:
        components = {component_of(imported) for imported, _ in imported_names(module)}
        graph.setdefault(component_of(module), set()).update(components - {component_of(module)})
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError
    assert order.index("jattn.implementations") < order.index("jattn.attending")


def test_modules_do_not_import_each_other_in_a_cycle():
    graph = {module: {imported for imported, _ in imported_names(module)} - {module} for module in MODULES}
    tuple(graphlib.TopologicalSorter(graph).static_order())


def test_private_names_are_imported_only_within_their_package():
    violations = [
        (module, imported, name)
        for module in MODULES
        for imported, name in imported_names(module)
        if name.startswith("_") and component_of(imported) != component_of(module)
    ]
    assert violations == []


@pytest.mark.kernels
def test_kernel_packages_export_every_name_that_other_packages_use():
    users = [path for folder in ("jattn", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    violations = [
        (str(path.relative_to(ROOT)), node.module, [alias.name for alias in node.names])
        for path in users
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pallas_kernels.")
        if (ROOT / component_of(node.module).replace(".", "/")).is_dir()
        and node.module != component_of(node.module)
    ]
    assert violations == []


def test_no_package_exports_a_function_with_the_name_of_a_submodule():
    """Which of the two an import finds would depend on the order of imports."""
    packages = [name for name, path in MODULES.items() if path.name == "__init__.py"]
    hidden = []
    for package in map(importlib.import_module, packages):
        modules = {info.name for info in pkgutil.iter_modules(package.__path__)}
        functions = {name for name, value in vars(package).items() if inspect.isfunction(value)}
        hidden += [f"{package.__name__}.{name}" for name in sorted(modules & functions)]
    assert hidden == []


def test_the_scheduler_does_not_import_jax():
    for name in (
        "jattn/batch/bucket.py",
        "jattn/serving/engine/block_manager.py",
        "jattn/serving/engine/scheduler.py",
    ):
        if (ROOT / name).exists():
            assert "jax" not in {module.split(".")[0] for module in imported_modules(ROOT / name)}


def test_only_packages_with_modules_import_flax():
    users = {
        path.relative_to(ROOT).parts[1]
        for path in FILES
        if any(name.startswith("flax") for name in imported_modules(path))
    }
    assert users <= {"nn.py", "runtime", "calibration.py", "models", "serving"}


def test_the_reference_implementation_runs_only_when_requested_by_name():
    assert importers_of("jattn.implementations.reference") == {"jattn.attending"}


@pytest.mark.kernels
def test_importing_jattn_starts_no_backend_and_reads_no_environment_variable():
    code = "import jattn, jax; from jax.extend import backend; print(len(jax._src.xla_bridge._backends))"
    assert run_python(code) == "0"
    readers = [
        path.name for path in FILES if "os.environ" in path.read_text() or "getenv" in path.read_text()
    ]
    assert readers == [
        "executable_files.py"
    ]  # when it looks for a file, because XLA_FLAGS change executables


def run_python(code):
    """Run code in a fresh interpreter and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.strip()


# ------------------------------------------------------------------------------- imports on first use
def test_importing_jattn_imports_no_dependency():
    code = "import sys, jattn.serving; print(sorted({'jax', 'flax', 'numpy'} & sys.modules.keys()))"
    assert run_python(code) == "[]"


def test_the_help_of_the_command_line_does_not_import_jax():
    code = (
        "import sys\nfrom jattn.serving.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    )
    help_text, imported = run_python(f"{code}\nprint('jax' in sys.modules)").rsplit("\n", 1)
    assert "bench-serve" in help_text
    assert imported == "False"


@pytest.mark.kernels
def test_a_layer_does_not_import_the_packages_that_read_checkpoints():
    code = """
import sys, jax, jattn
from flax import nnx
spec = jattn.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=8)
layer = jattn.PagedAttention(16, spec, rngs=nnx.Rngs(0))
metadata = jattn.build_batch_metadata([3, 5], [3, 5], None)
x = jax.numpy.ones((8, 16))
nnx.jit(lambda layer, x: layer(x, None, metadata, metadata.positions)[0])(layer, x)
print(sorted({"transformers", "huggingface_hub", "tokenizers"} & sys.modules.keys()))"""
    assert run_python(code) == "[]"


@pytest.mark.parametrize("package", [jattn, jattn.serving], ids=lambda package: package.__name__)
def test_names_that_are_imported_on_first_use_are_those_that_type_checkers_see(package):
    (block,) = (node for node in parse(MODULES[package.__name__]).body if isinstance(node, ast.If))
    names = {alias.name: node.module for node in block.body for alias in node.names}
    packages = {name: "jattn" for name in getattr(package, "_PACKAGES", ())}
    assert names == package._MODULES | packages
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'nothing'"):
        package.nothing  # noqa: B018


# ------------------------------------------------------------------------------- optional collectives
@pytest.mark.kernels
def test_importing_jattn_does_not_import_the_collectives():
    code = (
        "import sys, jattn, jattn.models, jattn.serving; "
        "print([name for name in sys.modules if name.startswith('pallas_kernels.collectives')])"
    )
    assert run_python(code) == "[]"


def test_the_collectives_are_imported_only_inside_functions():
    for path in FILES:
        if COLLECTIVES not in path.parents:
            names = imported_from_at_top_level(path)
            assert not [name for name in names if name.startswith("pallas_kernels.collectives")], path


def imported_from_at_top_level(path):
    for node in parse(path).body:
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


# ------------------------------------------------------------------------------- PTX
# Modules that build code for single lanes. Layout descriptions are plain data, which any kernel may use.
LANE_MODULES = ("jax.experimental.mosaic", "jax.extend.mlir")
LAYOUT_MODULE = "jax.experimental.mosaic.gpu.fragmented_array"


def test_only_the_ptx_packages_contain_ptx_and_per_lane_code():
    for path in FILES:
        if path.parent in PTX_PACKAGES:
            continue
        names = [name for name in imported_modules(path) if name.startswith(LANE_MODULES)]
        assert not [name for name in names if name != LAYOUT_MODULE], path
        attributes = {node.attr for node in ast.walk(parse(path)) if isinstance(node, ast.Attribute)}
        assert not attributes & {"inline_mgpu", "inline_ptx"}, path


def test_ptx_modules_have_precise_annotations():
    """Annotations name types of pallas_kernels.shared.types or of JAX; mypy demands that there are some."""
    for package in PTX_PACKAGES:
        for path in package.glob("*.py"):
            names = {node.id for node in ast.walk(parse(path)) if isinstance(node, ast.Name)}
            assert "Any" not in names, path


def test_each_constant_of_the_kernels_is_defined_once():
    modules_of = {}
    for module in (name for name in MODULES if name.startswith("pallas_kernels")):
        for node in parse(MODULES[module]).body:
            match node:
                case ast.Assign(
                    targets=[ast.Name(id=name)],
                    value=ast.Constant() | ast.Call() | ast.Attribute() as value,
                ):
                    modules_of.setdefault((name, ast.unparse(value)), []).append(module)
    assert {name: modules for name, modules in modules_of.items() if len(modules) > 1} == {}


# ------------------------------------------------------------------------------- public names
def test_every_public_name_has_a_docstring():
    for name in jattn.__all__:
        assert getattr(jattn, name).__doc__, name
    for name in set(jattn.vllm.__all__) - {"PAD_SLOT_ID"}:
        assert "Source: vLLM" in getattr(jattn.vllm, name).__doc__, name


@pytest.mark.parametrize(
    "package", [jattn, jattn.models, jattn.sparsity], ids=lambda package: package.__name__
)
def test_public_functions_document_each_argument(package):
    exported = [getattr(package, name) for name in package.__all__]
    functions = [f for f in exported if inspect.isfunction(f) and "jattn.masks" not in f.__module__]
    assert len(functions) > 2
    undocumented = {
        f.__name__: [name for name in inspect.signature(f).parameters if f"{name}:" not in f.__doc__]
        for f in functions
    }
    assert {name: missing for name, missing in undocumented.items() if missing} == {}


def test_sparsity_reexports_masks_by_the_names_of_one_package():
    names = {name for _, name in imported_names("jattn.sparsity")}
    assert not names & set(jattn.masks.__all__)
    assert all(getattr(jattn.sparsity, name) is getattr(jattn.masks, name) for name in jattn.masks.__all__)


def test_vllm_helpers_are_found_in_jattn_vllm_only():
    assert not set(jattn.__all__) & set(jattn.vllm.__all__)
    assert not any(hasattr(jattn, name) for name in jattn.vllm.__all__)
    folders = ("jattn", "pallas_kernels", "tests", "examples", "benchmarks", "docs")
    pages = [ROOT / "README.md", *(p for folder in folders for p in (ROOT / folder).rglob("*.[mp][dy]"))]
    pattern = re.compile(rf"\bjattn\.({'|'.join(jattn.vllm.__all__)})\b")
    assert [(str(page), match[0]) for page in pages for match in pattern.finditer(page.read_text())] == []


def test_jattn_itself_does_not_use_the_vllm_helpers():
    for path in FILES:
        if "vllm" not in path.parts and path != ROOT / "jattn" / "__init__.py":
            assert not any(name.startswith("jattn.vllm") for name in imported_modules(path)), path


def names_from_jattn(path):
    """Yield (module, name) for each name that a file imports from a package of jattn."""
    for node in import_nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jattn"):
            yield from ((node.module, alias.name) for alias in node.names)


def test_examples_import_public_names_only():
    public = {"jattn", *(f"jattn.{name}" for name in jattn.__all__), "jattn.serving.server"}
    names = {pair for path in (ROOT / "examples").rglob("*.py") for pair in names_from_jattn(path)}
    assert ("jattn.serving", "Engine") in names
    assert [(module, name) for module, name in sorted(names) if module not in public] == []
    hidden = [pair for pair in sorted(names) if pair[1] not in importlib.import_module(pair[0]).__all__]
    assert hidden == []
