"""Decode steps of a model on several devices against one, as the engine runs them."""

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
from jattn.serving.engine.sampler import build_sampling_metadata
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.step import StepTokens, make_step, step_graphs
from jattn.serving.engine.step_sampler import next_tokens

BLOCK_SIZE = 16
# In standard deviations of a request's logits. Between one device's and several's: in the mean 0.04 where
# weights are in bf16 and random, and what is summed over devices is rounded once more in each layer; near 1
# where a request sees others' keys. A token picked at random lies 4 below the best.
TOLERANCE, TOKEN_TOLERANCE = 0.15, 1.0


class StepSize(NamedTuple):
    """Of a step.

    Attributes:
        reqs: Requests.
        context: Tokens of each, this step's included.
        new: Tokens of each in this step: 1, or those of a prompt.
    """

    reqs: int
    context: int
    new: int = 1

    @property
    def name(self) -> str:
        """In rows."""
        return f"{self.reqs}x{self.context}" if self.new == 1 else f"{self.reqs}x{self.new}_prompt"

    def bucket(self, max_blocks: int) -> jattn.Bucket:
        """With two rows at least, as the engine's have."""
        rows = max(self.reqs, 2)
        if self.new == 1:
            return jattn.Bucket(max_decodes=rows, max_blocks=max_blocks)
        tokens = self.reqs * self.new
        return jattn.Bucket(max_prefills=rows, max_prefill_tokens=tokens, max_blocks=max_blocks)


def measure_steps(
    config: dict[str, Any], sizes: Sequence[StepSize], meshes: Sequence[Mesh], sums: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """A row a batch, first of one device, then of each mesh: a step and its greedy tokens, in flight.

    Args:
        config: Of the model, as config.json has it; its weights and caches are random.
        sizes: Of each step.
        meshes: The devices, as one or several layouts.
        sums: Implementations of the all-reduce on each mesh: "psum" (XLA, NCCL) or "all_reduce" (the kernel).
    """
    ones: dict[StepSize, tuple[np.ndarray, float]] = {}
    # Ranks hold a block's keys in another order than one device does, and whole blocks of the same keys.
    block_size = BLOCK_SIZE * max(mesh.shape[CP] for mesh in meshes)
    for on, by_peers in ways(meshes, sums):
        model = random_decoder(config, on)
        if by_peers:
            use_peer_memory(model, max_rows=max(size.reqs * size.new for size in sizes))
        steps = Steps(model, sizes, block_size=block_size)
        for size in sizes:
            logits, tokens = steps.results(size)
            checked = {} if on is None else agreement(logits, tokens, ones[size][0])
            taken = steps.walls(size)
            us = taken["in_flight_us"]
            if on is None:
                ones[size] = logits, us
            of_one = us / ones[size][1]
            how = {"name": f"step_{size.name}", **_layout(on), "sums": "all_reduce" if by_peers else "psum"}
            yield how | {"step_us": us, "of_one": of_one, **checked, **taken} | steps.taken
        del steps, model
        gc.collect()  # one model and its caches at a time


def ways(meshes: Sequence[Mesh], sums: Sequence[str]) -> Iterator[tuple[Mesh | None, bool]]:
    """Yield one device (None), then each mesh with each all-reduce: the mesh, and whether the kernel sums."""
    yield None, False
    for mesh in meshes:
        for name in sums:
            yield mesh, name == "all_reduce"


def _layout(mesh: Mesh | None) -> dict[str, int]:
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
    """A step of a model that no single device has room for, against its bytes; XLA's attention is the judge.

    The judge runs on the first mesh.

    Args:
        config: As `measure_steps` has it.
        size: Of the step.
        quantization: Of the caches.
        meshes: The devices, as one or several layouts.
        sums: Implementations of the all-reduce, as `measure_steps` has them.
        lists_kernels: Whether a last row has the kernels of the first mesh's step, by JAX's profiler.
    """
    caches: Any = {"quantization": quantization, "block_size": BLOCK_SIZE * max(m.shape[CP] for m in meshes)}
    steps = Steps(random_decoder(config, meshes[0], implementation="xla"), [size], **caches)
    wanted, _ = steps.results(size)
    del steps
    gc.collect()

    def steps_on(mesh: Mesh, sums: str) -> Steps:
        model = random_decoder(config, mesh)
        if sums == "all_reduce":
            use_peer_memory(model, max_rows=max(size.reqs, 2))
        return Steps(model, [size], **caches)

    for mesh, name in itertools.product(meshes, sums):
        steps = steps_on(mesh, name)
        num_bytes = steps.bytes_of_device
        checked, taken = agreement(*steps.results(size), wanted), steps.walls(size)
        how = {**_layout(mesh), "sums": name}
        read = {"gb_of_device": num_bytes / 1e9, "gb_per_s": num_bytes / taken["in_flight_us"] / 1e3}
        yield {"name": f"large_{size.name}", **how, **read, **checked, **taken} | steps.taken
        del steps
        gc.collect()
    if jax.default_backend() == "gpu":
        yield {"name": "read_ceiling", "gb_per_s": read_ceiling()}
        if lists_kernels:  # last, because a profiler can slow down what runs after it
            steps = steps_on(meshes[0], sums[-1])
            steps.results(size)
            how = {**_layout(meshes[0]), "sums": sums[-1]}
            yield {"name": f"large_{size.name}_kernels", **how, **steps.kernels(size)}


def agreement(logits: np.ndarray, tokens: np.ndarray, wanted: np.ndarray) -> dict[str, float]:
    """How far logits and greedy tokens are from one device's; raises SystemExit where it is too far.

    Args:
        logits: [reqs, vocab].
        tokens: Picked from them [reqs].
        wanted: One device's logits.
    """
    deviation = wanted.std(axis=-1)
    error = float((np.abs(logits - wanted).mean(axis=-1) / deviation).max())
    gap = token_gap(tokens, wanted)
    if not (error <= TOLERANCE and gap <= TOKEN_TOLERANCE):
        raise SystemExit(f"logits are {error}, tokens {gap} deviations off one device's: no rows")
    return {"error": error, "token_gap": gap, "same_tokens": float((tokens == wanted.argmax(-1)).mean())}


def token_gap(tokens: np.ndarray, wanted: np.ndarray) -> float:
    """How far below one device's best tokens are, in deviations of a request's logits; see agreement."""
    picked = np.take_along_axis(wanted, tokens[:, None], axis=-1)[:, 0]
    return float(((wanted.max(axis=-1) - picked) / wanted.std(axis=-1)).max())


class Steps:
    """The executables of a model's decode steps, its caches, and what they are run with.

    Attributes:
        taken: Seconds to compile, and executables.
    """

    def __init__(
        self,
        model: Any,
        sizes: Sequence[StepSize],
        *,
        quantization: str | None = None,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        """Compiles all of them; blocks are of so many tokens on all ranks together."""
        graphdef, self.params = nnx.split(model)
        self._metadata = {size: metadata_of(size, block_size=block_size) for size in sizes}
        self._most = max(one.bucket.max_reqs for one in self._metadata.values())
        greedy = lambda one: build_sampling_metadata([SamplingParams()] * one.bucket.max_reqs)
        place = replicated_sharding(model)
        self._last = jax.device_put(jnp.zeros(self._most, jnp.int32), place)  # as a step before leaves it
        self._sampling = {size: jax.device_put(greedy(one), place) for size, one in self._metadata.items()}
        num_blocks = max(one.block_table.size for one in self._metadata.values()) + 1
        of_caches: Any = {"block_size": block_size, "quantization": quantization}
        self._caches = filled(model.create_caches(num_blocks, **of_caches))
        buckets = [one.bucket for one in self._metadata.values()]
        self._graphs = step_graphs(make_step(graphdef), buckets)
        start = time.perf_counter()
        inputs = lambda bucket: [self._inputs(bucket)]
        of = {"block_size": block_size, "inputs": inputs, "progress": False}
        self._graphs.precompile(self.params, self._caches, **of)
        self.taken = {"compile_s": time.perf_counter() - start, "executables": self._graphs.num_compiles}

    def results(self, size: StepSize) -> tuple[np.ndarray, np.ndarray]:
        """Logits [reqs, vocab] and greedy tokens [reqs] of a step."""
        (logits, tokens), self._caches = self._run(size, self._caches)
        return on_host(logits).astype(np.float32)[: size.reqs], on_host(tokens)[: size.reqs]

    def start(self, size: StepSize) -> None:
        """A step that nobody waits for."""
        _, self._caches = self._run(size, self._caches)

    @property
    def bytes_of_device(self) -> int:
        """Of keys, and of weights but for embeddings: what a step reads whose batch fills the caches."""
        nbytes = lambda tree: sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
        looked_up = self.params["embed_tokens"] if "lm_head" in self.params else ()
        return nbytes((self.params, self._caches)) - nbytes(looked_up)

    def walls(self, size: StepSize) -> dict[str, float]:
        """As `benchmarks.models.graphs.call_times`."""
        call = Call(functools.partial(self._run, size), self._caches)
        self._caches = None  # the call's now
        taken = call_times(call, rounds=10)
        self._caches = call.caches
        return taken

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
        outputs, caches = self._graphs(self.params, caches, metadata, self._inputs(metadata.bucket))
        tokens = next_tokens(outputs.logits, sampling, outputs.num_generated, max_rows=self._most).tokens
        return (outputs.logits, tokens), caches

    def _inputs(self, bucket: jattn.Bucket) -> StepTokens:
        ids: Any = np.arange(1, bucket.max_tokens + 1, dtype=np.int32)
        rows = bucket.max_reqs
        new = max(bucket.max_prefill_tokens // rows, 1)
        ends: Any = np.arange(new - 1, rows * new, new, dtype=np.int32)
        counts: Any = np.zeros(rows, np.int32)
        return StepTokens(ids, np.full_like(ids, -1), self._last, ends, num_generated=counts)


def metadata_of(size: StepSize, *, room: int = 0, block_size: int = BLOCK_SIZE) -> jattn.BatchMetadata:
    """On the host, as the engine has it.

    Args:
        size: Of the step.
        room: Tokens to come that have blocks, too.
        block_size: Tokens of a block.
    """
    table, _ = random_table([size.context + room] * size.reqs, block_size)
    bucket = size.bucket(table.shape[1])
    how: dict[str, Any] = {"block_size": block_size, "bucket": bucket, "to_device": False}
    return jattn.build_batch_metadata([size.new] * size.reqs, [size.context] * size.reqs, table, **how)


def filled(caches: Any) -> Any:
    """Caches with random keys and values, the same ones however they lie on devices."""
    leaves, tree = jax.tree.flatten(caches)
    del caches
    for i in range(len(leaves)):
        draw = jax.jit(_normal_like, donate_argnums=1, out_shardings=leaves[i].sharding)
        leaves[i] = draw(jax.random.key(i), leaves[i])
    return jax.tree.unflatten(tree, leaves)


def _normal_like(key: Any, array: jax.Array) -> jax.Array:
    if array.dtype == jnp.float32:  # scales of what is stored in 8 bits
        return jax.random.uniform(key, array.shape, minval=0.5, maxval=1.5)
    return jax.random.normal(key, array.shape, jnp.bfloat16).astype(array.dtype)
