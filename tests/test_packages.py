"""How the packages of jattn and pallas_kernels lean on each other: one way, and on public names."""

import ast
import graphlib
import importlib
import inspect
import pkgutil

import jattn
from tests.sources import FILES, FOLDERS, ROOT, tree


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for folder in FOLDERS for path in FILES[folder]}


def room_of(module):
    """The package or the module right below jattn or pallas_kernels."""
    return ".".join(module.split(".")[:2])


def imports(module):
    """Every (module, name) of ours that a module imports, those for the type checker and in functions too."""
    for node in ast.walk(tree(MODULES[module])):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in MODULES or node.module in MODULES:
                    yield full if full in MODULES else node.module, alias.name


def importers_of(wanted):
    return {module for module in MODULES for found, _ in imports(module) if found == wanted}


def test_no_package_imports_another_s_private_names():
    taken = [
        (module, found, name)
        for module in MODULES
        for found, name in imports(module)
        if name.startswith("_") and room_of(found) != room_of(module)
    ]
    assert taken == []


def test_a_kernel_s_package_exports_what_is_taken_of_it():
    users = [path for folder in ("jattn", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    taken = [
        (str(path.relative_to(ROOT)), node.module, [alias.name for alias in node.names])
        for path in users
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pallas_kernels.")
        if (ROOT / room_of(node.module).replace(".", "/")).is_dir() and node.module != room_of(node.module)
    ]
    assert taken == []


def test_masks_are_named_in_one_package():
    imported = {name for _, name in imports("jattn.sparsity")}
    assert not imported & set(jattn.masks.__all__)
    assert all(getattr(jattn.sparsity, name) is getattr(jattn.masks, name) for name in jattn.masks.__all__)


def test_no_package_leans_on_one_that_leans_on_it():
    graph = {}
    for module in set(MODULES) - {"jattn"}:
        rooms = {room_of(found) for found, _ in imports(module)} - {room_of(module)}
        graph.setdefault(room_of(module), set()).update(rooms)
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError
    assert order.index("jattn.implementations") < order.index("jattn.attending")


def test_no_module_imports_one_that_imports_it():
    graph = {module: {found for found, _ in imports(module)} - {module} for module in MODULES}
    tuple(graphlib.TopologicalSorter(graph).static_order())


def test_nothing_runs_the_judge_but_who_asks_for_it_by_name():
    judge = "jattn.implementations.reference"
    assert importers_of(judge) == {"jattn.attending", "jattn.implementations.selection"}


def test_no_package_exports_a_function_under_the_name_of_its_own_module():
    """The function would hide the module, or the module the function, by the order of imports."""
    packages = [name for name, path in MODULES.items() if path.name == "__init__.py"]
    hidden = []
    for package in map(importlib.import_module, packages):
        modules = {info.name for info in pkgutil.iter_modules(package.__path__)}
        functions = {name for name, value in vars(package).items() if inspect.isfunction(value)}
        hidden += [f"{package.__name__}.{name}" for name in sorted(modules & functions)]
    assert hidden == []


def test_a_number_of_the_kernels_is_defined_once():
    """Names for what JAX has, as layouts, may be short in each room."""
    places = {}
    for module in (name for name in MODULES if name.startswith("pallas_kernels")):
        for node in tree(MODULES[module]).body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant() | ast.Call() as value):
                    if not ast.unparse(value).startswith(("plgpu.", "jnp.")):
                        places.setdefault((name, ast.unparse(value)), []).append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}
