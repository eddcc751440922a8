"""Decode attention of several devices against one: by heads, and by keys, whose results are merged."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jattn
from benchmarks.decode import TOLERANCE, random_table, some_results, worst_error
from benchmarks.device_time import wall_time
from jattn.parallel import TP, make_mesh
from jattn.pytree import replace
from pallas_kernels.cases import DecodeCase

BLOCK_SIZE, CHAIN = 16, 8


class Way(NamedTuple):
    """How a decode step's attention is spread.

    Attributes:
        queries: Where they are; the results lie there, too.
        cache: Where keys and values are [blocks, block_size, kv_heads, head_dim].
        tables: Where block tables are [device, reqs, max_blocks].
        parts: Devices that heads, and that keys are spread over.
    """

    queries: P
    cache: P
    tables: P
    parts: tuple[int, int]


def measure_attention(case: DecodeCase, mesh: Mesh) -> Iterator[dict[str, Any]]:
    """A row each for one device, for heads spread and for keys spread: microseconds of an attend in a chain.

    One device's results are held to the reference's, and the others', too.
    """
    count = mesh.shape[TP]
    query, k, v, tables, lens = _inputs(case, count)
    whole = jnp.concatenate([table + i * (len(k) // count) for i, table in enumerate(tables)], axis=1)
    wanted = some_results(case, ((query, k, v, whole, lens), {}), "NHD")
    ways = {
        "none": (make_mesh(), whole[None], Way(P(), P(), P(), (1, 1))),
        "heads": (mesh, whole[None], Way(P(None, TP), P(None, None, TP), P(), (count, 1))),
        "keys": (mesh, tables, Way(P(), P(TP), P(TP), (1, count))),
    }
    of_one = None
    for split, (on, table, way) in ways.items():
        specs = way.queries, way.cache, way.cache, way.tables, P()
        places = tuple(NamedSharding(on, spec) for spec in specs)
        given = jax.device_put((query, k, v, table, _metadata(case, way)), places)
        error = worst_error(jnp.asarray(jax.device_get(_attends(case, on, way, 1)(*given))), wanted)
        if error > TOLERANCE:
            raise SystemExit(f"attention split by {split} is {error} off: no rows")
        us = wall_time(_attends(case, on, way, CHAIN), *given, layers=1) / CHAIN
        of_one = us if of_one is None else of_one
        row = {"us": us, "gb_per_s": case.num_bytes(4 * case.head_dim) / us / 1e3, "speedup": of_one / us}
        yield {"name": f"attention_{case.name}", "split": split, **row, "max_error": error}


def _inputs(case: DecodeCase, count: int) -> tuple[jax.Array, ...]:
    """Queries, keys, values, tables of each device's share of the keys [device, reqs, blocks], and lengths.

    The shares lie one behind the other in the cache, their blocks in random order.
    """
    table, num_blocks = random_table([n // count for n in case.kv_lens], BLOCK_SIZE)
    shape = count * num_blocks, BLOCK_SIZE, case.kv_heads, case.head_dim
    draw = jax.jit(_normal, static_argnums=1)
    query = draw(0, (len(case.kv_lens), case.q_heads, case.head_dim))
    tables = jnp.asarray(np.stack([table] * count))
    return query, draw(1, shape), draw(2, shape), tables, jnp.asarray(case.kv_lens, jnp.int32)


def _normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _metadata(case: DecodeCase, way: Way) -> jattn.BatchMetadata:
    """A device's step, but for its block table."""
    lens = [n // way.parts[1] for n in case.kv_lens]
    table = np.zeros((len(lens), -(-max(lens) // BLOCK_SIZE)), np.int32)
    return jattn.build_batch_metadata([1] * len(lens), lens, table, block_size=BLOCK_SIZE, to_device=False)


def _attends(case: DecodeCase, mesh: Mesh, way: Way, times: int) -> Callable[..., jax.Array]:
    """So many attends, one fed by the other, each device on its part."""
    by_heads, by_keys = way.parts
    heads = {"num_q_heads": case.q_heads // by_heads, "num_kv_heads": case.kv_heads // by_heads}
    spec = jattn.AttentionSpec(head_dim=case.head_dim, **heads)

    def run(query: Any, k: Any, v: Any, table: Any, metadata: Any) -> jax.Array:
        cache, own = jattn.PagedCache(k=k, v=v), replace(metadata, block_table=table[0])
        plan = jattn.plan(own, spec, cache)
        for _ in range(times):
            out, lse = jattn.attend(query, cache, own, spec, plan, return_lse=True)
            query = out if by_keys == 1 else _merged(out, lse)
        return query

    given = way.queries, way.cache, way.cache, way.tables, P()
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=given, out_specs=way.queries, check_vma=False))


def _merged(out: jax.Array, lse: jax.Array) -> jax.Array:
    """What all devices have of their keys, as one."""
    outs, lses = jax.lax.all_gather(out, TP), jax.lax.all_gather(lse, TP)
    merged = outs[0], lses[0]
    for i in range(1, len(outs)):
        merged = jattn.merge_attn_states(*merged, outs[i], lses[i])
    return merged[0].astype(out.dtype)
