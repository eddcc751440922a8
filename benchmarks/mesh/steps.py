"""Steps of a model on several devices against one, run as the engine runs them."""

import functools
import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

import jattn
from benchmarks.kernels.decode import random_table
from benchmarks.mesh.processes import on_host
from benchmarks.models.graphs import Call, call_times
from benchmarks.models.random_decoder import random_decoder
from benchmarks.models.step_profile import profile_steps
from benchmarks.runner import read_ceiling
from jattn.models import use_peer_memory
from jattn.parallel import CP, TP, replicated_sharding
from jattn.serving.engine.sampler import build_sampling_metadata, next_tokens
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.step import ModelInputs, ModelStep, step_graphs

BLOCK_SIZE = 16
# Limits in standard deviations of a request's logits. With random bf16 weights, the mean difference between
# one and several devices is 0.04, because every all-reduce rounds once more; if a request reads the keys of
# another one, it is about 1. The logit of a random token is 4 below the largest.
TOLERANCE, TOKEN_TOLERANCE = 0.15, 1.0


class StepSize(NamedTuple):
    """Size of a step.

    Attributes:
        reqs: Number of requests.
        context: Tokens per request, including those of this step.
        new: Tokens per request in this step: 1, or those of a prompt.
    """

    reqs: int
    context: int
    new: int = 1

    @property
    def name(self) -> str:
        """Return the name of the size in rows."""
        return f"{self.reqs}x{self.context}" if self.new == 1 else f"{self.reqs}x{self.new}_prompt"

    def bucket(self, max_blocks: int) -> jattn.Bucket:
        """Return the bucket of the step, with at least two rows like those of the engine."""
        rows = max(self.reqs, 2)
        if self.new == 1:
            return jattn.Bucket(max_decodes=rows, max_blocks=max_blocks)
        tokens = self.reqs * self.new
        return jattn.Bucket(max_prefills=rows, max_prefill_tokens=tokens, max_blocks=max_blocks)


def measure_steps(
    config: dict[str, Any], sizes: Sequence[StepSize], meshes: Sequence[Mesh], sums: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield a row per step size, first for one device, then for each mesh: a greedy step, in flight.

    Args:
        config: Contents of config.json. Weights and caches are random.
        sizes: Sizes of the steps.
        meshes: One or several layouts of the devices.
        sums: Implementations of the all-reduce on each mesh: "psum" (XLA, NCCL) or "all_reduce" (the kernel).
    """
    references: dict[StepSize, tuple[np.ndarray, float]] = {}
    # Ranks store the keys of a block in another order than one device, so every layout needs the same block
    # size.
    block_size = BLOCK_SIZE * max(mesh.shape[CP] for mesh in meshes)
    for mesh, uses_peers in layouts(meshes, sums):
        model = random_decoder(config, mesh)
        if uses_peers:
            use_peer_memory(model, max_rows=max(size.reqs * size.new for size in sizes))
        steps = Steps(model, sizes, block_size=block_size)
        for size in sizes:
            logits, tokens = steps.results(size)
            errors = {} if mesh is None else agreement(logits, tokens, references[size][0])
            times = steps.call_times(size)
            us = times["in_flight_us"]
            if mesh is None:
                references[size] = logits, us
            row = {"name": f"step_{size.name}", **_layout_columns(mesh)}
            row |= {"sums": "all_reduce" if uses_peers else "psum"}
            row |= {"step_us": us, "of_one": us / references[size][1]}
            yield row | errors | times | steps.compile_times
        del steps, model
        gc.collect()  # one model and its caches at a time


def layouts(meshes: Sequence[Mesh], sums: Sequence[str]) -> Iterator[tuple[Mesh | None, bool]]:
    """Yield (None, False) for one device, then each mesh with whether its all-reduce uses peer memory."""
    yield None, False
    for mesh in meshes:
        for name in sums:
            yield mesh, name == "all_reduce"


def _layout_columns(mesh: Mesh | None) -> dict[str, int]:
    """Return the columns of a row that say how a model is sharded."""
    tp, cp = (1, 1) if mesh is None else (mesh.shape[TP], mesh.shape[CP])
    return {"tp": tp} if cp == 1 else {"tp": tp, "cp": cp}


def measure_large(
    config: dict[str, Any],
    size: StepSize,
    quantization: str,
    meshes: Sequence[Mesh],
    sums: Sequence[str],
    *,
    lists_kernels: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield rows of a step of a model that is too large for one device, with its rate of reading.

    The logits are compared with those of XLA's attention on the first mesh.

    Args:
        config: Contents of config.json.
        size: Size of the step.
        quantization: Format of the caches.
        meshes: One or several layouts of the devices.
        sums: Implementations of the all-reduce, as in `measure_steps`.
        lists_kernels: Whether to yield a last row with the kernels of a step on the first mesh.
    """
    block_size = BLOCK_SIZE * max(mesh.shape[CP] for mesh in meshes)

    def create_steps(model: Any) -> Steps:
        return Steps(model, [size], quantization=quantization, block_size=block_size)

    steps = create_steps(random_decoder(config, meshes[0], implementation="xla"))
    expected, _ = steps.results(size)
    del steps
    gc.collect()

    def steps_on(mesh: Mesh, sums: str) -> Steps:
        model = random_decoder(config, mesh)
        if sums == "all_reduce":
            use_peer_memory(model, max_rows=max(size.reqs, 2))
        return create_steps(model)

    for mesh, name in itertools.product(meshes, sums):
        steps = steps_on(mesh, name)
        num_bytes = steps.bytes_per_device
        errors, times = agreement(*steps.results(size), expected), steps.call_times(size)
        row = {"name": f"large_{size.name}", **_layout_columns(mesh), "sums": name}
        row |= {"gb_of_device": num_bytes / 1e9, "gb_per_s": num_bytes / times["in_flight_us"] / 1e3}
        yield row | errors | times | steps.compile_times
        del steps
        gc.collect()
    if jax.default_backend() == "gpu":
        yield {"name": "read_ceiling", "gb_per_s": read_ceiling()}
        if lists_kernels:  # last, because a profiler can slow down what runs after it
            steps = steps_on(meshes[0], sums[-1])
            steps.results(size)
            row = {"name": f"large_{size.name}_kernels", **_layout_columns(meshes[0]), "sums": sums[-1]}
            yield row | steps.kernels(size)


def agreement(logits: np.ndarray, tokens: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    """Compare logits and greedy tokens with the logits of one device.

    Args:
        logits: Logits [reqs, vocab].
        tokens: Greedy tokens [reqs].
        expected: Logits of one device [reqs, vocab].

    Returns:
        Columns of a row: the mean difference of the logits of the worst request and the token gap, both in
        standard deviations of its logits, and the share of equal tokens.

    Raises:
        SystemExit: The difference exceeds TOLERANCE, or the token gap TOKEN_TOLERANCE.
    """
    deviation = expected.std(axis=-1)
    error = float((np.abs(logits - expected).mean(axis=-1) / deviation).max())
    gap = token_gap(tokens, expected)
    if not (error <= TOLERANCE and gap <= TOKEN_TOLERANCE):
        raise SystemExit(
            f"logits differ by {error} and tokens by {gap} standard deviations from one device. "
            "No rows are recorded."
        )
    return {"error": error, "token_gap": gap, "same_tokens": float((tokens == expected.argmax(-1)).mean())}


def token_gap(tokens: np.ndarray, expected: np.ndarray) -> float:
    """Return how far the logits of tokens are below the largest ones, in standard deviations, at most.

    Args:
        tokens: Tokens [reqs].
        expected: Logits of one device [reqs, vocab].
    """
    token_logits = np.take_along_axis(expected, tokens[:, None], axis=-1)[:, 0]
    return float(((expected.max(axis=-1) - token_logits) / expected.std(axis=-1)).max())


class Steps:
    """The executables of a model's steps, its caches, and the inputs of the steps.

    Attributes:
        compile_times: Seconds of compilation, and the number of executables, as columns of a row.
    """

    def __init__(
        self,
        model: Any,
        sizes: Sequence[StepSize],
        *,
        quantization: str | None = None,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        """Compile the steps.

        Args:
            model: Model to run.
            sizes: Sizes of the steps.
            quantization: Format of the caches; None stores 16 bits.
            block_size: Tokens per cache block, on all ranks together.
        """
        graphdef, self.params = nnx.split(model)
        self._metadata = {size: step_metadata(size, block_size=block_size) for size in sizes}
        buckets = [metadata.bucket for metadata in self._metadata.values()]
        self._max_rows = max(bucket.max_reqs for bucket in buckets)
        sharding = replicated_sharding(model)
        # The tokens of the previous step, which the engine leaves on the device.
        self._last_tokens = jax.device_put(jnp.zeros(self._max_rows, jnp.int32), sharding)
        self._sampling = {
            size: jax.device_put(
                build_sampling_metadata([SamplingParams()] * metadata.bucket.max_reqs), sharding
            )
            for size, metadata in self._metadata.items()
        }
        num_blocks = max(metadata.block_table.size for metadata in self._metadata.values()) + 1
        caches = model.create_caches(num_blocks, block_size=block_size, quantization=quantization)
        self._caches = randomize(caches)
        del caches
        self._graphs = step_graphs(ModelStep(graphdef), buckets)
        start = time.perf_counter()
        self._graphs.precompile(
            self.params, self._caches, block_size=block_size, inputs=self._inputs, progress=False
        )
        self.compile_times = {
            "compile_s": time.perf_counter() - start,
            "executables": self._graphs.num_compiles,
        }

    def results(self, size: StepSize) -> tuple[np.ndarray, np.ndarray]:
        """Run a step and return its logits [reqs, vocab] and greedy tokens [reqs]."""
        (logits, tokens), self._caches = self._run(size, self._caches)
        return on_host(logits).astype(np.float32)[: size.reqs], on_host(tokens)[: size.reqs]

    def start(self, size: StepSize) -> None:
        """Start a step without waiting for its results."""
        _, self._caches = self._run(size, self._caches)

    @property
    def bytes_per_device(self) -> int:
        """Return the bytes that a step reads on a device if its batch fills the caches."""
        return bytes_per_device(self.params, self._caches)

    def call_times(self, size: StepSize) -> dict[str, float]:
        """Measure a step as `benchmarks.models.graphs.call_times` does."""
        call = Call(functools.partial(self._run, size), self._caches)
        self._caches = None  # donated to the call
        times = call_times(call, rounds=10)
        self._caches = call.caches
        return times

    def kernels(self, size: StepSize) -> dict[str, Any]:
        """Return the kernels of a step on all GPUs of this process, as `step_profile.profile_steps` does."""
        count = 8

        def run() -> None:
            for _ in range(count):
                self.start(size)
            self.results(size)

        return profile_steps(run, count + 1)

    def _run(self, size: StepSize, caches: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
        metadata, sampling = self._metadata[size], self._sampling[size]
        outputs, caches = self._graphs(self.params, caches, metadata, *self._inputs(metadata.bucket))
        logits, _, num_generated = outputs
        tokens = next_tokens(logits, sampling, num_generated, max_rows=self._max_rows).token_ids
        return (logits, tokens), caches

    def _inputs(self, bucket: jattn.Bucket) -> list[ModelInputs]:
        ids: Any = np.arange(1, bucket.max_tokens + 1, dtype=np.int32)
        rows = bucket.max_reqs
        new = max(bucket.max_prefill_tokens // rows, 1)
        ends: Any = np.arange(new - 1, rows * new, new, dtype=np.int32)
        counts: Any = np.zeros(rows, np.int32)
        return [ModelInputs(ids, np.full_like(ids, -1), self._last_tokens, ends, counts)]


def bytes_per_device(params: Any, caches: Any) -> int:
    """Return the bytes of caches and of weights on a device, without an embedding that is only looked up."""
    embedding = params["embed_tokens"] if "lm_head" in params else ()
    return _device_bytes((params, caches)) - _device_bytes(embedding)


def _device_bytes(tree: Any) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def step_metadata(
    size: StepSize, *, extra_tokens: int = 0, block_size: int = BLOCK_SIZE
) -> jattn.BatchMetadata:
    """Return the metadata of a step on the host, as the engine builds it.

    Args:
        size: Size of the step.
        extra_tokens: Number of further tokens per request for which the block table has blocks.
        block_size: Tokens per block.
    """
    table, _ = random_table([size.context + extra_tokens] * size.reqs, block_size)
    return jattn.build_batch_metadata(
        [size.new] * size.reqs,
        [size.context] * size.reqs,
        table,
        block_size=block_size,
        bucket=size.bucket(table.shape[1]),
        to_device=False,
    )


def randomize(caches: Any) -> Any:
    """Fill caches with random keys and values that do not depend on the sharding. The caches are donated."""
    leaves, tree = jax.tree.flatten(caches)
    del caches
    for i in range(len(leaves)):
        draw = jax.jit(_normal_like, donate_argnums=1, out_shardings=leaves[i].sharding)
        leaves[i] = draw(jax.random.key(i), leaves[i])
    return jax.tree.unflatten(tree, leaves)


def _normal_like(key: Any, array: jax.Array) -> jax.Array:
    if array.dtype == jnp.float32:  # scales of an 8-bit cache
        return jax.random.uniform(key, array.shape, minval=0.5, maxval=1.5)
    return jax.random.normal(key, array.shape, jnp.bfloat16).astype(array.dtype)
