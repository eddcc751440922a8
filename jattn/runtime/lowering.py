"""Tracing and lowering steps in other processes.

Tracing and lowering a step takes seconds of Python, most of them for its Pallas kernels, while XLA compiles
without holding the interpreter lock. So a large number of steps is lowered in processes that import jattn and
use no GPU. They return modules of `jax.export`, which this process lowers again in a twentieth of the time
and compiles.
"""

import dataclasses
import functools
import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jattn.runtime.executables import KERNEL_CALL, LONG_PYTHON_LOCK, NICENESS
from jattn.runtime.host_transfer import TransferLayout
from pallas_kernels import architectures

# JAX options that tracing and lowering depend on.
OPTIONS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)
NUM_URGENT = 4  # processes for the first steps, without which nothing can run

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class AbstractStep:
    """A step with the shapes of the arguments that all buckets share.

    Attributes:
        step: Function `(params, caches, *inputs) -> (outputs, caches)`.
        params: Parameters, as ShapeDtypeStructs.
        caches: Caches, as ShapeDtypeStructs.
        from_host: Whether numpy arrays among the inputs are packed into one (`TransferLayout`).
    """

    step: Callable[..., tuple[Any, Any]]
    params: Any
    caches: Any
    from_host: bool


@dataclasses.dataclass(frozen=True)
class LoweredModule:
    """An exported step over the leaves of its arguments, and the structure of its results.

    Attributes:
        exported: Exported function `(parameter leaves, cache leaves, packed, remaining) -> result leaves`.
        results: Outputs and caches, as ShapeDtypeStructs.
    """

    exported: jax.export.Exported
    results: tuple[Any, Any]

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """Lower the module in this process for (parameter leaves, caches, packed, remaining).

        The caches are donated.
        """

        def step(leaves: Any, caches: Any, packed: Any, remaining: Any) -> Any:
            results = self.exported.call(leaves, jax.tree.leaves(caches), packed, remaining)
            return jax.tree.unflatten(jax.tree.structure(self.results), results)

        with LONG_PYTHON_LOCK:
            return jax.jit(step, donate_argnums=1).lower(*arguments)


@dataclasses.dataclass(frozen=True)
class PickledStep:
    """A step that other processes can lower for the device that will run it.

    Attributes:
        data: Pickled AbstractStep, platform, compute capability and JAX options.
        device: Device of the step's arguments.
    """

    data: bytes
    device: jax.Device

    @classmethod
    def of(cls, step: AbstractStep) -> "PickledStep | None":
        """Pickle a step, which takes a tenth of a second for a model of 8B parameters.

        Returns:
            The step, or None if it must be lowered in this process: for functions and models that cannot be
            pickled or are defined in `__main__`, for sharded arrays, and for devices other than CPUs and the
            GPUs of `pallas_kernels.target`.
        """
        leaves = jax.tree.leaves((step.params, step.caches))
        shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
        devices = {device for sharding in shardings if sharding is not None for device in sharding.device_set}
        device = min(devices, default=architectures.device_of(), key=lambda device: device.id)
        is_gpu = device.platform in architectures.GPU_PLATFORMS
        gpu = getattr(device, "compute_capability", None) if is_gpu else None
        if len(devices) > 1 or device.platform not in ("cpu", *architectures.GPU_PLATFORMS):
            return None
        if is_gpu and gpu not in architectures.HOPPER:  # without its GPU, JAX lowers kernels for Hopper
            return None
        options = {name: getattr(jax.config, name) for name in OPTIONS}
        params, caches = _without_shardings((step.params, step.caches))
        step = dataclasses.replace(step, params=params, caches=caches)
        data = _pickle((step, "cuda" if is_gpu else "cpu", gpu, options))
        return None if data is None else cls(data, device)

    def request(self, inputs: tuple[Any, ...]) -> "LoweringRequest | None":
        """Return the request to lower the step for some inputs; None if they cannot be pickled.

        Args:
            inputs: Metadata and the other inputs, as ShapeDtypeStructs or numpy arrays.
        """
        data = _pickle(_without_shardings(inputs))
        return None if data is None else LoweringRequest(self, data)


class LoweringRequest(NamedTuple):
    """A request to lower a step for a bucket.

    Attributes:
        step: Step to lower.
        inputs: Pickled metadata and other inputs of the bucket, as ShapeDtypeStructs or numpy arrays.
    """

    step: PickledStep
    inputs: bytes


def export(step: AbstractStep, inputs: tuple[Any, ...], platform: str) -> LoweredModule:
    """Trace and lower a step for a platform, which this process need not have."""
    layout = TransferLayout.of(inputs, from_host=step.from_host)
    packed, remaining = layout.pack(inputs)
    leaves, structure = jax.tree.flatten(step.params)
    cache_leaves, cache_structure = jax.tree.flatten(step.caches)
    result_structures: list[Any] = []

    def run(leaves: Any, cache_leaves: Any, packed: Any, remaining: Any) -> list[Any]:
        params, caches = (
            jax.tree.unflatten(*tree) for tree in ((structure, leaves), (cache_structure, cache_leaves))
        )
        results, result_structure = jax.tree.flatten(
            step.step(params, caches, *layout.unpack(packed, remaining))
        )
        result_structures.append(result_structure)
        return results

    checks = [jax.export.DisabledSafetyCheck.custom_call(KERNEL_CALL)]  # It is allowed only by name.
    exported = jax.export.export(
        jax.jit(run, donate_argnums=1), platforms=[platform], disabled_checks=checks
    )(leaves, cache_leaves, packed, remaining)
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.out_avals]
    return LoweredModule(
        dataclasses.replace(exported, _get_vjp=None), jax.tree.unflatten(result_structures[0], shapes)
    )


class LoweringProcesses:
    """Processes that lower steps.

    Methods may be called from several threads, each of which waits for its own module. The processes end
    with this object.

    Attributes:
        num_processes: Maximum number of processes.
    """

    def __init__(self, num_processes: int) -> None:
        """Start no process yet.

        Args:
            num_processes: Maximum number of processes, each of which takes about 0.5 GB of host memory.
        """
        self.num_processes = num_processes
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        weakref.finalize(self, _end, self._processes)

    def lower(self, request: LoweringRequest) -> LoweredModule | None:
        """Return the module of a step; None if the step must be lowered in this process."""
        answer = self._ask((request.step.data, request.inputs))
        if isinstance(answer, str):
            log.info("A step is lowered in the process that runs it: %s", answer)
            return None
        with LONG_PYTHON_LOCK:
            module: LoweredModule = pickle.loads(answer)
        return module

    def _ask(self, request: tuple[bytes, bytes]) -> bytes | str:
        """Return the pickled module from a process, or the reason why there is none."""
        with self._lock:
            if self._idle.empty() and len(self._processes) < self.num_processes:
                self._processes.append(_start(is_urgent=len(self._processes) < NUM_URGENT))
                self._idle.put(self._processes[-1])
        process = self._idle.get()
        answer: bytes | str = "there is no lowering process, or it has ended"
        if process is not None:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                pickle.dump(request, process.stdin)
                process.stdin.flush()
                answer = pickle.load(process.stdout)
            except (OSError, EOFError, pickle.UnpicklingError):
                process = None
        self._idle.put(process)  # None tells the other threads not to wait for it
        return answer


def serve() -> None:
    """Lower the steps that arrive on standard input, in a process of LoweringProcesses."""
    unpickle_step = functools.lru_cache(maxsize=1)(pickle.loads)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # so that nothing else is written between the answers
    while True:
        try:
            step_data, inputs = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: bytes | str
        try:
            step, platform, gpu, options = unpickle_step(step_data)
            for name, value in options.items():
                jax.config.update(name, value)
            with architectures.target(gpu):
                answer = pickle.dumps(export(step, pickle.loads(inputs), platform))
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()


def _without_shardings(tree: Any) -> Any:
    """Return a tree with ShapeDtypeStructs without shardings for its arrays, except those of numpy."""

    def abstract(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray | np.generic):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)

    return jax.tree.map(abstract, tree)


def _pickle(value: Any) -> bytes | None:
    """Pickle a value, or log why that is impossible and return None."""
    try:
        return pickle.dumps(value)
    except Exception as error:  # whatever __reduce__ of the step or the model raises
        log.info("A step is lowered in the process that runs it: %s", error)
        return None


# ---------------------------------------------------------------------------------------- processes
def _start(*, is_urgent: bool) -> subprocess.Popen[bytes]:
    """Start a process that lowers steps. It finds the modules that this process finds, except `__main__`.

    Unless it is urgent, it leaves the cores to other processes.
    """
    code = (
        f"import os, sys; os.nice({0 if is_urgent else NICENESS}); sys.path[:] = {sys.path}; "
        "import jax; jax.config.update('jax_platforms', 'cpu'); "
        f"from {__name__} import serve; serve()"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.communicate()
