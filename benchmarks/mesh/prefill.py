"""Attention of a long prompt on several devices against one: by heads and by keys, in an engine's chunks."""

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
from benchmarks.kernels.decode import TOLERANCE, max_error, random_table, reference_outputs
from benchmarks.mesh.attention import MERGE_TOLERANCE, random_normal
from benchmarks.mesh.processes import on_host, one_device_mesh
from jattn.batch.context_parallel import ContextParallelAxis
from jattn.parallel import TP
from jattn.parallel.context_parallel import attend_on_rank
from pallas_kernels.cases import DecodeCase

RANK_BLOCK_SIZE, ROUNDS = 16, 3  # each rank has so many tokens of a block


class PromptCase(NamedTuple):
    """A prompt.

    Attributes:
        name: Of the row.
        tokens: Of the prompt, a multiple of chunk.
        chunk: Tokens of a step.
        q_heads: Of all devices.
        kv_heads: Of all devices.
        head_dim: Of a head.
    """

    name: str
    tokens: int
    chunk: int
    q_heads: int
    kv_heads: int
    head_dim: int


class Cut(NamedTuple):
    """What lies where.

    Attributes:
        queries: [chunk, q_heads, head_dim]; the results lie there, too.
        cache: Keys and values, [blocks, block_size, kv_heads, head_dim].
    """

    queries: P
    cache: P

    def on_each_device(self, run: Callable[..., jax.Array], mesh: Mesh) -> Callable[..., jax.Array]:
        """`run(query, k, v, metadata)` of what a device has."""
        given = self.queries, self.cache, self.cache, P()
        how: dict[str, Any] = {"in_specs": given, "out_specs": self.queries, "check_vma": False}
        return jax.jit(jax.shard_map(run, mesh=mesh, **how))


def measure_prompt(case: PromptCase, mesh: Mesh) -> Iterator[dict[str, Any]]:
    """A row for one device, heads spread and keys spread: milliseconds of all chunks of a layer's attention.

    With keys spread every device has the results of all heads, the sums of what each device's count for.
    Two queries of the last chunk are held to the reference's results first.
    """
    one, block_size = one_device_mesh(), RANK_BLOCK_SIZE * mesh.shape[TP]
    table, num_blocks = random_table([case.tokens], block_size)
    cache = num_blocks, block_size, case.kv_heads, case.head_dim
    wanted, checked = _wanted(case, _draw(case, cache, one, Cut(P(), P())), table)
    of_one = None
    for split, on in (("none", one), ("heads", mesh), ("keys", mesh)):
        cut = Cut(P(), P(None, TP)) if split == "keys" else Cut(P(None, TP), P(None, None, TP))
        given = _draw(case, cache, on, cut, ranks=on.shape[TP] if split == "keys" else 1)
        ends = range(case.chunk, case.tokens + 1, case.chunk)
        steps = [
            jax.device_put(_metadata(case, end, table, block_size), NamedSharding(on, P())) for end in ends
        ]
        attends = _attends_by_keys(case, on, cut) if split == "keys" else _attends(case, on, cut)
        error = max_error(jnp.asarray(on_host(attends(*given, steps[-1]))[checked]), wanted)
        if error > (MERGE_TOLERANCE if split == "keys" else TOLERANCE):
            raise SystemExit(f"a prompt split by {split} is {error} off: no rows")
        ms = 1e3 * min(_seconds(attends, given, steps) for _ in range(ROUNDS))
        of_one = ms if of_one is None else of_one
        tflops = 2 * case.tokens**2 * case.q_heads * case.head_dim / ms / 1e9
        row = {"ms": ms, "tflop_per_s": tflops, "speedup": of_one / ms, "max_error": error}
        del given, steps
        yield {"name": f"prompt_{case.name}", "split": split, "chunks": len(ends), **row}


def _draw(
    case: PromptCase, cache: tuple[int, ...], mesh: Mesh, cut: Cut, *, ranks: int = 1
) -> tuple[jax.Array, ...]:
    """Return a random chunk of queries and the caches of keys and values, the same ones on each mesh.

    Args:
        case: The prompt.
        cache: Shape of a cache.
        mesh: The devices.
        cut: Which part of them each device has.
        ranks: Number of ranks over which the tokens of each block are distributed.
    """
    queries, keys = (NamedSharding(mesh, spec) for spec in cut)
    query = random_normal(0, (case.chunk, case.q_heads, case.head_dim), queries)
    spread = jax.jit(functools.partial(_by_ranks, ranks=ranks), out_shardings=keys)
    k, v = (spread(random_normal(seed, cache, keys)) for seed in (1, 2))
    return query, k, v


def _wanted(
    case: PromptCase, arrays: tuple[jax.Array, ...], table: np.ndarray
) -> tuple[dict[int, jax.Array], np.ndarray]:
    """The reference's results for two queries of the last chunk, and which they are."""
    query, k, v = arrays
    rows: Any = np.asarray([case.chunk // 2, case.chunk - 1])
    lens: Any = (case.tokens - case.chunk + 1 + rows).astype(np.int32)
    sizes: dict[str, Any] = {"head_dim": case.head_dim, "kv_lens": tuple(map(int, lens))}
    queries = DecodeCase(name=case.name, q_heads=case.q_heads, kv_heads=case.kv_heads, **sizes)
    problem = query[rows], k, v, jnp.asarray(np.repeat(table, 2, axis=0)), jnp.asarray(lens)
    return reference_outputs(queries, (problem, {}), "NHD"), rows


def _metadata(case: PromptCase, end: int, table: np.ndarray, block_size: int) -> jattn.BatchMetadata:
    """The step of the chunk that ends there."""
    bucket = jattn.Bucket(max_prefills=1, max_prefill_tokens=case.chunk, max_blocks=table.shape[1])
    how: dict[str, Any] = {"block_size": block_size, "bucket": bucket, "to_device": False}
    return jattn.build_batch_metadata([case.chunk], [end], table, **how)


def _by_ranks(cache: jax.Array, *, ranks: int) -> jax.Array:
    """A cache whose blocks are cut into equal parts, one a rank: every so many-th token each."""
    blocks, block_size, *rest = cache.shape
    parts = cache.reshape(blocks, block_size // ranks, ranks, *rest)
    return parts.swapaxes(1, 2).reshape(cache.shape)


def _attends(case: PromptCase, mesh: Mesh, cut: Cut) -> Callable[..., jax.Array]:
    count = mesh.shape[TP]
    heads = {"num_q_heads": case.q_heads // count, "num_kv_heads": case.kv_heads // count}
    spec = jattn.AttentionSpec(head_dim=case.head_dim, **heads)

    def run(query: Any, k: Any, v: Any, metadata: Any) -> jax.Array:
        cache = jattn.PagedCache(k=k, v=v)
        out: jax.Array = jattn.attend(query, cache, metadata, spec, jattn.plan(metadata, spec, cache))
        return out

    return cut.on_each_device(run, mesh)


def _attends_by_keys(case: PromptCase, mesh: Mesh, cut: Cut) -> Callable[..., jax.Array]:
    spec = jattn.AttentionSpec(num_q_heads=case.q_heads, num_kv_heads=case.kv_heads, head_dim=case.head_dim)
    ranks = ContextParallelAxis(axis_name=TP, size=mesh.shape[TP])

    def run(query: Any, k: Any, v: Any, metadata: Any) -> jax.Array:
        return jax.lax.psum(attend_on_rank(query, jattn.PagedCache(k=k, v=v), metadata, spec, ranks), TP)

    return cut.on_each_device(run, mesh)


def _seconds(attends: Callable[..., jax.Array], given: Any, steps: list[Any]) -> float:
    start = time.perf_counter()
    outs = [attends(*given, step) for step in steps[:-1]]
    jax.block_until_ready([*outs[-1:], attends(*given, steps[-1])])
    return time.perf_counter() - start
