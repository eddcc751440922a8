"""Attention of a long prompt, in chunks, on several devices against one: split by heads and by keys."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jattn
from benchmarks.kernels.cases import DecodeCase
from benchmarks.kernels.decode import TOLERANCE, max_error, random_table, reference_outputs
from benchmarks.mesh.attention import COMBINE_TOLERANCE, random_normal
from benchmarks.mesh.processes import on_host, one_device_mesh
from jattn.batch.context_parallel import ContextParallelAxis
from jattn.parallel import TP
from jattn.parallel.context_parallel import attend_on_rank

RANK_BLOCK_SIZE, ROUNDS = 16, 3  # tokens per block on each rank; measurements, of which the fastest counts


class PromptCase(NamedTuple):
    """A prompt that is processed in chunks.

    Attributes:
        name: Name of the row.
        tokens: Tokens of the prompt, a multiple of `chunk`.
        chunk: Tokens per step.
        q_heads: Query heads on all devices together.
        kv_heads: KV heads on all devices together.
        head_dim: Elements per head.
    """

    name: str
    tokens: int
    chunk: int
    q_heads: int
    kv_heads: int
    head_dim: int


class Shardings(NamedTuple):
    """Shardings of the arrays.

    Attributes:
        queries: Sharding of queries and outputs [chunk, q_heads, head_dim].
        cache: Sharding of keys and values [blocks, block_size, kv_heads, head_dim].
    """

    queries: P
    cache: P

    def shard_map(self, run: Callable[..., jax.Array], mesh: Mesh) -> Callable[..., jax.Array]:
        """Return the jitted shard_map of `run(query, k, v, metadata)`."""
        in_specs = self.queries, self.cache, self.cache, P()
        return jax.jit(
            jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=self.queries, check_vma=False)
        )


def measure_prompt(case: PromptCase, mesh: Mesh) -> Iterator[dict[str, Any]]:
    """Yield a row for one device, for heads split and for keys split: the time of all chunks in one layer.

    If keys are split, the all-reduced outputs of all heads are on every device. Two queries of the last chunk
    are compared with the reference first.

    Raises:
        SystemExit: An error exceeds TOLERANCE, or COMBINE_TOLERANCE if keys are split.
    """
    single, block_size = one_device_mesh(), RANK_BLOCK_SIZE * mesh.shape[TP]
    table, num_blocks = random_table([case.tokens], block_size)
    cache_shape = num_blocks, block_size, case.kv_heads, case.head_dim
    arrays = _random_arrays(case, cache_shape, single, Shardings(P(), P()))
    expected, checked_rows = _reference(case, arrays, table)
    del arrays
    one_device_ms = None
    for split, devices in (("none", single), ("heads", mesh), ("keys", mesh)):
        if split == "keys":
            shardings, ranks = Shardings(P(), P(None, TP)), devices.shape[TP]
            attend = _attend_by_keys(case, devices, shardings)
        else:
            shardings, ranks = Shardings(P(None, TP), P(None, None, TP)), 1
            attend = _attend_by_heads(case, devices, shardings)
        arrays = _random_arrays(case, cache_shape, devices, shardings, ranks=ranks)
        ends = range(case.chunk, case.tokens + 1, case.chunk)
        steps = [
            jax.device_put(_metadata(case, end, table, block_size), NamedSharding(devices, P()))
            for end in ends
        ]
        error = max_error(jnp.asarray(on_host(attend(*arrays, steps[-1]))[checked_rows]), expected)
        if error > (COMBINE_TOLERANCE if split == "keys" else TOLERANCE):
            raise SystemExit(f"the error of a prompt split by {split} is {error}. No rows are recorded.")
        ms = 1e3 * min(_seconds(attend, arrays, steps) for _ in range(ROUNDS))
        one_device_ms = ms if one_device_ms is None else one_device_ms
        tflops = 2 * case.tokens**2 * case.q_heads * case.head_dim / ms / 1e9
        row = {"ms": ms, "tflop_per_s": tflops, "speedup": one_device_ms / ms, "max_error": error}
        del arrays, steps
        yield {"name": f"prompt_{case.name}", "split": split, "chunks": len(ends), **row}


def _random_arrays(
    case: PromptCase, cache_shape: tuple[int, ...], mesh: Mesh, shardings: Shardings, *, ranks: int = 1
) -> tuple[jax.Array, ...]:
    """Return a random chunk of queries and random keys and values that do not depend on the mesh.

    Args:
        case: Prompt.
        cache_shape: Shape of the keys and of the values.
        mesh: Devices.
        shardings: Shardings of the arrays.
        ranks: Number of ranks over which the tokens of each block are distributed.
    """
    query_sharding, cache_sharding = (NamedSharding(mesh, spec) for spec in shardings)
    query = random_normal(0, (case.chunk, case.q_heads, case.head_dim), query_sharding)
    distribute = jax.jit(functools.partial(_distribute_tokens, ranks=ranks), out_shardings=cache_sharding)
    k, v = (distribute(random_normal(seed, cache_shape, cache_sharding)) for seed in (1, 2))
    return query, k, v


def _reference(
    case: PromptCase, arrays: tuple[jax.Array, ...], table: np.ndarray
) -> tuple[dict[int, jax.Array], np.ndarray]:
    """Return the reference's outputs for two queries of the last chunk, and the rows of these queries."""
    query, k, v = arrays
    rows: Any = np.asarray([case.chunk // 2, case.chunk - 1])
    lens: Any = (case.tokens - case.chunk + 1 + rows).astype(np.int32)
    queries = DecodeCase(
        name=case.name,
        q_heads=case.q_heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        kv_lens=tuple(map(int, lens)),
    )
    inputs = query[rows], k, v, jnp.asarray(np.repeat(table, 2, axis=0)), jnp.asarray(lens)
    return reference_outputs(queries, (inputs, {}), "NHD"), rows


def _metadata(case: PromptCase, end: int, table: np.ndarray, block_size: int) -> jattn.BatchMetadata:
    """Return the metadata of the step whose chunk ends at token `end`."""
    bucket = jattn.Bucket(max_prefills=1, max_prefill_tokens=case.chunk, max_blocks=table.shape[1])
    return jattn.build_batch_metadata(
        [case.chunk], [end], table, block_size=block_size, bucket=bucket, to_device=False
    )


def _distribute_tokens(cache: jax.Array, *, ranks: int) -> jax.Array:
    """Reorder the tokens of each block by rank: token i of a block belongs to rank i modulo `ranks`."""
    blocks, block_size, *rest = cache.shape
    parts = cache.reshape(blocks, block_size // ranks, ranks, *rest)
    return parts.swapaxes(1, 2).reshape(cache.shape)


def _attend_by_heads(case: PromptCase, mesh: Mesh, shardings: Shardings) -> Callable[..., jax.Array]:
    count = mesh.shape[TP]
    spec = jattn.AttentionSpec(
        head_dim=case.head_dim, num_q_heads=case.q_heads // count, num_kv_heads=case.kv_heads // count
    )

    def run(query: Any, k: Any, v: Any, metadata: Any) -> jax.Array:
        cache = jattn.PagedCache(k=k, v=v)
        out: jax.Array = jattn.attend(query, cache, metadata, spec, jattn.plan(metadata, spec, cache))
        return out

    return shardings.shard_map(run, mesh)


def _attend_by_keys(case: PromptCase, mesh: Mesh, shardings: Shardings) -> Callable[..., jax.Array]:
    spec = jattn.AttentionSpec(num_q_heads=case.q_heads, num_kv_heads=case.kv_heads, head_dim=case.head_dim)
    ranks = ContextParallelAxis(axis_name=TP, size=mesh.shape[TP])

    def run(query: Any, k: Any, v: Any, metadata: Any) -> jax.Array:
        return jax.lax.psum(attend_on_rank(query, jattn.PagedCache(k=k, v=v), metadata, spec, ranks), TP)

    return shardings.shard_map(run, mesh)


def _seconds(attend: Callable[..., jax.Array], arrays: Any, steps: list[Any]) -> float:
    start = time.perf_counter()
    outs = [attend(*arrays, step) for step in steps[:-1]]
    jax.block_until_ready([*outs[-1:], attend(*arrays, steps[-1])])
    return time.perf_counter() - start
