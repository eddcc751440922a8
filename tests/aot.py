"""Ahead-of-time compilation for any NVIDIA architecture, including ptxas, on a machine without a GPU.

Needs the wheels jax-cuda13-plugin and jax-cuda13-pjrt, and ptxas from the wheels nvidia-cuda-nvcc and
nvidia-nvvm or from a CUDA toolkit; no driver. `make test-kernels` installs the wheels; where they are missing
the tests fail. XLA's own kernels are not autotuned here, so only Pallas kernels can be judged.
"""

import functools
import importlib.util
import math
import os
import pathlib
import re
import shutil
import sys
from typing import NamedTuple

import pytest

from pallas_kernels import architectures
from tests.subprocesses import IMPORTED_BY_MOST, ForkServer

COLLECTIVES = ("all-gather", "all-to-all", "all-reduce", "collective-permute", "reduce-scatter")
# Tasks that need only XLA's program around the kernels, and therefore empty kernels, which compile quickly.
TASKS_OF_EMPTY_KERNELS = ("compile_empty", "count", "partition", "slices", "copies", "beforehand")


def target_config(gpu: str) -> str:
    """Return XLA's description of the GPU that stands for an architecture, for ahead-of-time compilation."""
    architecture = architectures.ARCHITECTURES[gpu]
    major, minor = gpu.split(".")
    accelerated = "feature_extension: ACCELERATED_FEATURES" if int(major) >= 9 else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {architecture.smem_bytes + 1024}
  shared_memory_per_block_optin: {architecture.smem_bytes}
  threads_per_core_limit: 2048  core_count: {architecture.num_sms}  fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {architecture.bandwidth * 10**9}  l2_cache_size: 52428800  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} {accelerated} }}
  device_vendor: "NVIDIA Corporation"  name: "NVIDIA {architecture.card}"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "NVIDIA {architecture.card}"
"""


class Kernel(NamedTuple):
    """Resource usage of one Pallas kernel, as ptxas reports it."""

    name: str
    registers: int
    spilled_bytes: int


def plugin_folder() -> pathlib.Path | None:
    """Return the folder of jax_cuda13_plugin, of `make test-kernels` or the environment, or None."""
    plugin_path = pathlib.Path(sys.prefix) / "cuda-plugin" / "jax_cuda13_plugin"
    if plugin_path.is_dir():
        return plugin_path
    spec = importlib.util.find_spec("jax_cuda13_plugin")
    locations = None if spec is None else spec.submodule_search_locations
    return pathlib.Path(locations[0]) if locations else None


def require_plugin() -> None:
    """Fail the test, with the reason and a remedy, if nothing can be compiled."""
    folder, missing = plugin_folder(), None
    if folder is None:
        missing = "the wheels jax-cuda13-plugin and jax-cuda13-pjrt"
    elif shutil.which("ptxas", path=compiler_path(folder)) is None:
        missing = "ptxas, of the wheels nvidia-cuda-nvcc and nvidia-nvvm or of a CUDA toolkit"
    if missing is not None:
        pytest.fail(
            f"ahead-of-time compilation needs {missing}: `make test-kernels` brings them, "
            "-m 'not kernels' leaves these tests out",
            pytrace=False,
        )


def compiler_path(folder: pathlib.Path) -> str:
    """Return the PATH to search for ptxas: the wheel next to the plugin first, the same on every machine."""
    wheel = folder.parent / "nvidia" / "cu13" / "bin"
    return os.pathsep.join(filter(None, [str(wheel), os.environ.get("PATH")]))


def compile_all(module: str, names: list[str], gpu: str = "9.0") -> dict[str, list[Kernel]]:
    """Compile `module.aot_cases()[name]` for each name and a compute capability; return the kernels of each.

    A case is a function, its abstract arguments and optionally the indices of donated arguments, which must
    be aliased and not copied.

    This runs in another process, because the compiler prints its report to the standard output, and JAX
    must not have initialized a GPU. JAX 0.12 compiles a kernel once per process, so a case lists only
    kernels that no earlier case has; `apart_reports` lists all.

    Raises:
        AssertionError: If something does not compile; the message contains the output.
    """
    return {name: kernels_in(text) for name, text in reports(module, names, gpu).items()}


def reports(module: str, names: list[str], gpu: str = "9.0", *, is_empty: bool = False) -> dict[str, str]:
    """Return ptxas's report of each `module.aot_cases()[name]`, compiled as `compile_all` does.

    With `is_empty`, the kernels have no instructions, which is enough to count them.
    """
    return _run_alone("compile_empty" if is_empty else "compile", module, names, gpu=gpu)


def apart_reports(module: str, names: list[str]) -> dict[str, str]:
    """Return ptxas's report of each `module.aot_cases()[name]`, each compiled in its own process."""
    return {name: reports(module, [name])[name] for name in names}


def lower_all(module: str, names: list[str]) -> dict[str, str]:
    """Lower each `module.aot_cases()[name]`; return the message of its NotImplementedError, or ""."""
    return {name: text.strip() for name, text in _run_alone("lower", module, names).items()}


def calls_lowered(module: str, names: list[str]) -> dict[str, int]:
    """Return the number of Pallas kernel calls in each lowered case, before XLA inlines functions."""
    return {name: calls_in(text) for name, text in _run_alone("count", module, names).items()}


def ptx_of(module: str, names: list[str]) -> dict[str, str]:
    """Return the PTX of each `module.aot_cases()[name]`."""
    return _run_alone("compile", module, names, MOSAIC_GPU_DUMP_PTX="1")


def kernels_beforehand(module: str, names: list[str]) -> dict[str, tuple[list[Kernel], list[Kernel]]]:
    """Return the kernels of each case that `compile_kernels` compiles, and those that XLA then compiles."""
    reports = _run_alone("beforehand", module, names)
    return {
        name: tuple(kernels_in(part) for part in text.split("compiled beforehand\n", maxsplit=1))
        for name, text in reports.items()
    }


def exchanges_of(module: str, names: list[str]) -> dict[str, tuple[set[str], int]]:
    """Return the collectives and the number of Pallas kernel calls of each case compiled for two devices.

    Instead of donated indices a case has the PartitionSpec of its arguments over the axis "x".
    """
    texts = _run_alone("partition", module, names)
    words = {name: text.splitlines()[-1].split() for name, text in texts.items()}  # ptxas reports first
    return {name: (set(fields[1:]), int(fields[0])) for name, fields in words.items()}


def slices_read(module: str, names: list[str]) -> dict[str, list[int]]:
    """Return the byte offsets of slices that the kernels of each case read inside their arrays."""
    texts = _run_alone("slices", module, names)
    return {name: list(map(int, text.splitlines()[-1].split()[1:])) for name, text in texts.items()}


def copied_bytes(module: str, names: list[str]) -> dict[str, int]:
    """Return the size in bytes of the largest array that XLA pads, copies or slices in each compiled case."""
    reports = _run_alone("copies", module, names)
    return {name: int(text.splitlines()[-1].split()[1]) for name, text in reports.items()}


def _run_alone(task: str, module: str, names: list[str], gpu: str = "9.0", **more: str) -> dict[str, str]:
    """Run `main` in its own process and return its output per case; `more` sets environment variables."""
    (done,) = _server().run([["tests.aot", task, gpu, module, *names]], more, seconds=3600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    _, *parts = re.split(r"^== (.*)$", done.stdout, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@functools.cache
def _server() -> ForkServer:
    """Return the process whose copies compile: JAX is imported but has no backend, as in a new process."""
    folder = plugin_folder()
    assert folder is not None
    environment = {
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",  # otherwise XLA compiles its own kernels twice
        "PATH": compiler_path(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder.parent), os.environ.get("PYTHONPATH")])),
        "JAX_PLATFORMS": "cpu",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_RUNTIME_LIB_PATH": str(folder / "libmosaic_gpu_runtime.so"),
    }
    return ForkServer(IMPORTED_BY_MOST, environment)


def calls_in(report: str) -> int:
    """Return the number of Pallas kernel calls in a case's report from `apart_reports`."""
    return int(re.search(r"^calls of Pallas kernels: (\d+)$", report, flags=re.MULTILINE)[1])


def kernels_in(report: str) -> list[Kernel]:
    """Parse ptxas's report."""
    pattern = (
        r"properties for (\S+)\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
    )
    return [
        Kernel(name, int(registers), int(stores) + int(loads))
        for name, stores, loads, registers in re.findall(pattern, report, flags=re.DOTALL)
    ]


def first_bytes(text: str) -> list[int]:
    """Return the byte offsets of slices that a compiled program passes to kernels without a copy."""
    offsets = []
    for part in re.split(r"\n(?=%|ENTRY)", text):
        if "custom_call_target=" not in part or part.startswith("ENTRY"):
            continue
        shapes = dict(re.findall(r"([\w.-]+): (\w+\[[\d,]+\])", part))
        for source, locations in re.findall(r" slice\(%(\S+)\), slice=\{(.*?)\}", part):
            bits, sizes = re.match(r"[a-z]+(\d+).*\[(.*)\]", shapes[source]).groups()
            first = 0
            for size, begin in zip(sizes.split(","), re.findall(r"\[(\d+):", locations), strict=True):
                first = first * int(size) + int(begin)
            offsets.append(first * int(bits) // 8)
    return offsets


def largest_copy(text: str) -> int:
    """Return the size in bytes of the largest array that a compiled program pads, copies or slices.

    A slice in the fusion of a kernel is read in place.
    """
    found = [0]
    for part in re.split(r"\n(?=%|ENTRY)", text):
        if "custom_call_target=" in part and not part.startswith("ENTRY"):
            continue
        copies = re.findall(r" = [a-z]+(\d+)\[([\d,]*)\]\S* (?:pad|copy|slice|concatenate)\(", part)
        found += [
            math.prod(map(int, filter(None, sizes.split(",")))) * int(bits) // 8 for bits, sizes in copies
        ]
    return max(found)


def partition(mesh, function, arguments, cut) -> None:
    """Compile for the mesh, and print the number of Pallas kernel calls and the names of collectives.

    Kernel support is patched, because this process's own device is not a GPU.
    """
    import jax

    from pallas_kernels import support

    support.why_not_on = lambda *_: None
    sharding = jax.sharding.NamedSharding(mesh, cut)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    text = jax.jit(function).lower(*placed).compile().as_text()
    calls = len(re.findall(r'custom_call_target="mosaic_gpu', text))
    print(calls, *(name for name in COLLECTIVES if f" {name}(" in text or f" {name}-start(" in text))


def empty_kernels() -> None:
    """Remove the instructions of all Pallas kernels that are lowered from now on."""
    from jax._src.pallas.mosaic_gpu import lowering
    from jax.extend import core

    lower = lowering.lower_jaxpr_to_module

    def lower_empty(*args, **options):
        args = [x.replace(eqns=[]) if isinstance(x, core.Jaxpr) else x for x in args]
        return lower(*args, **options)

    lowering.lower_jaxpr_to_module = lower_empty


def main(task: str, gpu: str, module: str, names: list[str]) -> None:
    """Compile or lower each case and print its report; runs in a process of its own."""
    import jax
    from jax.experimental import topologies
    from jax.experimental.mosaic.gpu import core, utils

    from jattn.runtime.executables import compile_kernels

    num = 2 if task == "partition" else 1
    topology_options = {"target_config": target_config(gpu), "topology": f"1x1x{num}"}
    topology = topologies.get_topology_desc(platform="cuda", **topology_options)
    mesh = jax.sharding.Mesh(topology.devices, ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    # Mosaic GPU asks the local device for both, and this process has none.
    utils._infer_arch = lambda: tuple(map(int, gpu.split(".")))
    core._SMEM_SIZE_BOUND = architectures.ARCHITECTURES[gpu].smem_bytes
    if task in TASKS_OF_EMPTY_KERNELS:
        empty_kernels()
    with architectures.target(gpu):
        cases = importlib.import_module(module).aot_cases()
    for name in names:
        print(f"== {name}", flush=True)
        if task == "partition":
            partition(mesh, *cases[name])
            continue
        function, arguments, *numbers = cases[name]
        donated = numbers[0] if numbers else ()
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
        try:
            with architectures.target(gpu):
                lowered = jax.jit(function, donate_argnums=donated).lower(*placed)
        except NotImplementedError as error:
            if task != "lower":
                raise
            print(error, flush=True)
            continue
        if task != "lower":
            calls = lowered.as_text().count("custom_call @mosaic_gpu")
            print(f"calls of Pallas kernels: {calls}", flush=True)
        if task == "slices":
            print("slices", *first_bytes(lowered.compile().as_text()), flush=True)
        if task == "copies":
            print("copies", largest_copy(lowered.compile().as_text()), flush=True)
        if task == "beforehand":
            jax.config.update("jax_default_device", topology.devices[0])
            compile_kernels([lowered, lowered])
            print("compiled beforehand", flush=True)
            lowered.compile()
        if task in ("compile", "compile_empty"):
            memory = lowered.compile().memory_analysis()
            num_bytes = sum(x.size * x.dtype.itemsize for i in donated for x in jax.tree.leaves(arguments[i]))
            assert memory.alias_size_in_bytes >= num_bytes, f"{name}: {memory} of {num_bytes} donated bytes"
            assert not donated or memory.temp_size_in_bytes < num_bytes / 16, f"{name}: {memory}"


if __name__ == "__main__":
    main(*sys.argv[1:4], sys.argv[4:])
