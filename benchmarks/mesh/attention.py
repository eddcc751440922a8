"""Decode attention of several devices against one: by heads, and by keys, whose results are merged."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jattn
from benchmarks.kernels.decode import TOLERANCE, max_error, random_table, reference_outputs
from benchmarks.mesh.processes import on_host, one_device_mesh
from benchmarks.runner import wall_time
from jattn.batch.context_parallel import ContextParallelAxis
from jattn.parallel import TP
from jattn.parallel.context_parallel import scale_rank_output
from jattn.pytree import replace
from pallas_kernels.cases import DecodeCase
from pallas_kernels.collectives import PeerMemory, all_reduce, make_peer_memory

BLOCK_SIZE, CHAIN = 16, 8
MERGE_TOLERANCE = 4e-2  # NCCL rounds sums of ranks' outputs to bf16 again and again: 0.009 on four GPUs


class Way(NamedTuple):
    """How a decode step's attention is spread.

    Attributes:
        queries: Where they are; the results lie there, too.
        cache: Where keys and values are [blocks, block_size, kv_heads, head_dim].
        tables: Where block tables are [device, reqs, max_blocks].
        parts: Devices that heads, and that keys are spread over.
        merge: How results of all keys are made of each device's: MERGES.
    """

    queries: P
    cache: P
    tables: P
    parts: tuple[int, int]
    merge: str | None = None


def measure_attention(case: DecodeCase, mesh: Mesh, *, uses_peers: bool = False) -> Iterator[dict[str, Any]]:
    """A row each for one device, heads spread, and keys spread with each merge: us of an attend in a chain.

    One device's results are held to the reference's, and the others', too. With `uses_peers` a merge goes
    through memory that devices write to. All processes draw the same arrays, each device its own part.
    """
    count, one = mesh.shape[TP], one_device_mesh()
    table, num_blocks = random_table([n // count for n in case.kv_lens], BLOCK_SIZE)
    tables = np.stack([table] * count)
    # The parts of the keys lie one behind the other in the cache, their blocks in random order.
    whole = np.concatenate([table + i * num_blocks for i in range(count)], axis=1)
    drawn, arrays = "none", _draw(case, count * num_blocks, one, (P(), P()))
    wanted = _wanted(case, arrays, whole)
    merges = [how for how in MERGES if uses_peers or MERGES[how] is not _summed_by_peers]
    ways = {
        "none": (one, whole[None], Way(P(), P(), P(), (1, 1))),
        "heads": (mesh, whole[None], Way(P(None, TP), P(None, None, TP), P(), (count, 1))),
        **{f"keys {how}": (mesh, tables, Way(P(), P(TP), P(TP), (1, count), how)) for how in merges},
    }
    of_one, peers = None, _peers(case, mesh) if uses_peers else None
    for name, (on, table, way) in ways.items():
        split = name.split()[0]
        places = NamedSharding(on, way.tables), NamedSharding(on, P())
        if split != drawn:
            drawn, arrays = split, _draw(case, count * num_blocks, on, (way.queries, way.cache))
        given = *arrays, *jax.device_put((table, _metadata(case, way)), places), peers if way.merge else None
        error = max_error(jnp.asarray(on_host(_attends(case, on, way, 1)(*given))), wanted)
        if error > (TOLERANCE if way.merge is None else MERGE_TOLERANCE):
            raise SystemExit(f"attention split by {name} is {error} off: no rows")
        us = wall_time(_attends(case, on, way, CHAIN), *given, layers=1) / CHAIN
        of_one = us if of_one is None else of_one
        row = {"us": us, "gb_per_s": case.num_bytes(4 * case.head_dim) / us / 1e3, "speedup": of_one / us}
        how = {"split": split, **({} if way.merge is None else {"merge": way.merge})}
        yield {"name": f"attention_{case.name}", **how, **row, "max_error": error}


def _draw(case: DecodeCase, num_blocks: int, mesh: Mesh, specs: tuple[P, P]) -> tuple[jax.Array, ...]:
    """Return random queries, keys and values, the same ones on each mesh."""
    queries, cache = (NamedSharding(mesh, spec) for spec in specs)
    shape = num_blocks, BLOCK_SIZE, case.kv_heads, case.head_dim
    query = random_normal(0, (len(case.kv_lens), case.q_heads, case.head_dim), queries)
    return query, random_normal(1, shape, cache), random_normal(2, shape, cache)


def random_normal(seed: int, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """Return random bf16 numbers, the same ones for each sharding; each device draws its own part."""
    draw = jax.jit(_normal, static_argnums=(0, 1), out_shardings=sharding)
    return draw(seed, shape)


def _normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _wanted(case: DecodeCase, arrays: tuple[jax.Array, ...], table: np.ndarray) -> dict[int, jax.Array]:
    """Return the reference's results for some requests, computed on one device."""
    problem = *arrays, jnp.asarray(table), jnp.asarray(case.kv_lens, jnp.int32)
    return reference_outputs(case, (problem, {}), "NHD")


def _metadata(case: DecodeCase, way: Way) -> jattn.BatchMetadata:
    """A device's step, but for its block table."""
    lens = [n // way.parts[1] for n in case.kv_lens]
    table = np.zeros((len(lens), -(-max(lens) // BLOCK_SIZE)), np.int32)
    return jattn.build_batch_metadata([1] * len(lens), lens, table, block_size=BLOCK_SIZE, to_device=False)


def _attends(case: DecodeCase, mesh: Mesh, way: Way, times: int) -> Callable[..., jax.Array]:
    """So many attends, one fed by the other, each device on its part."""
    by_heads, _ = way.parts
    heads = {"num_q_heads": case.q_heads // by_heads, "num_kv_heads": case.kv_heads // by_heads}
    spec = jattn.AttentionSpec(head_dim=case.head_dim, **heads)

    def run(query: Any, k: Any, v: Any, table: Any, metadata: Any, peers: Peers | None) -> jax.Array:
        cache, own = jattn.PagedCache(k=k, v=v), replace(metadata, block_table=table[0])
        plan = jattn.plan(own, spec, cache)
        for _ in range(times):
            out, lse = jattn.attend(query, cache, own, spec, plan, return_lse=True)
            query = out if way.merge is None else MERGES[way.merge](out, lse, peers)
        return query

    given = way.queries, way.cache, way.cache, way.tables, P(), P(*mesh.axis_names)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=given, out_specs=way.queries, check_vma=False))


class Peers(NamedTuple):
    """Memory that devices write to: log-sum-exps, and what is summed."""

    lse: PeerMemory
    sums: PeerMemory


def _peers(case: DecodeCase, mesh: Mesh) -> Peers:
    make = functools.partial(make_peer_memory, mesh, TP, max_rows=len(case.kv_lens))
    return Peers(make(width=2 * case.q_heads), make(width=case.q_heads * case.head_dim))


def _gathered(out: jax.Array, lse: jax.Array, peers: Peers | None) -> jax.Array:
    """All devices' results on each, which merges them."""
    del peers
    outs, lses = jax.lax.all_gather(out, TP), jax.lax.all_gather(lse, TP)
    merged = outs[0], lses[0]
    for i in range(1, len(outs)):
        merged = jattn.merge_attn_states(*merged, outs[i], lses[i])
    return merged[0].astype(out.dtype)


def _summed(out: jax.Array, lse: jax.Array, peers: Peers | None) -> jax.Array:
    """The sum of what each device's result counts for, as `attend_on_rank` has it."""
    del peers
    return jax.lax.psum(_share(out, lse), TP)


def _summed_by_peers(out: jax.Array, lse: jax.Array, peers: Peers | None) -> jax.Array:
    """The same through memory that devices write to, both of its exchanges."""
    assert peers is not None
    share = _share(out, lse, peers.lse)
    return all_reduce(jax.lax.collapse(share, 1), peers.sums, axis_name=TP).reshape(out.shape)


def _scattered(out: jax.Array, lse: jax.Array, peers: Peers | None) -> jax.Array:
    """A part of the heads' sums on each device, as vLLM has it, and all of them again as the next queries."""
    del peers
    part = jax.lax.psum_scatter(_share(out, lse), TP, scatter_dimension=1, tiled=True)
    return jax.lax.all_gather(part, TP, axis=1, tiled=True)


def _share(out: jax.Array, lse: jax.Array, peers: PeerMemory | None = None) -> jax.Array:
    return scale_rank_output(
        out, lse, ContextParallelAxis(axis_name=TP, size=jax.lax.axis_size(TP)), peers=peers
    )


# vLLM's: cp_lse_ag_out_ar sums, cp_lse_ag_out_rs scatters.
MERGES: dict[str, Callable[[jax.Array, jax.Array, Peers | None], jax.Array]] = {
    "all_gather": _gathered,
    "all_reduce": _summed,
    "reduce_scatter": _scattered,
    "peer_memory": _summed_by_peers,
}
