"""Decode attention on several devices against one: split by heads, and by keys with combined outputs."""

import functools
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
from benchmarks.mesh.processes import on_host, one_device_mesh
from benchmarks.runner import wall_time
from jattn.batch.context_parallel import ContextParallelAxis
from jattn.parallel import TP
from jattn.parallel.context_parallel import scale_rank_output
from jattn.pytree import replace
from pallas_kernels.collectives import PeerMemory, all_reduce, make_peer_memory

BLOCK_SIZE = 16
COMBINE_TOLERANCE = 4e-2  # NCCL rounds to bf16 after each addition of ranks' outputs: 0.009 on four GPUs


class Split(NamedTuple):
    """How the attention of a decode step is split over devices.

    Attributes:
        queries: Sharding of the queries and of the outputs.
        cache: Sharding of keys and values [blocks, block_size, kv_heads, head_dim].
        tables: Sharding of the block tables [device, reqs, max_blocks].
        num_parts: Number of devices over which heads, and over which keys are split.
        combine: Name in COMBINES of the function that combines the outputs of all devices; None for none.
    """

    queries: P
    cache: P
    tables: P
    num_parts: tuple[int, int]
    combine: str | None = None


def measure_attention(
    case: DecodeCase, mesh: Mesh, chain: int, *, uses_peers: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield a row for one device, for heads split, and for keys split with each way to combine the outputs.

    A row has the microseconds of an attend call in a chain of dependent calls. All results are compared with
    the reference first. All processes use the same random arrays.

    Args:
        case: Case to measure.
        mesh: Devices.
        chain: Number of dependent calls.
        uses_peers: Whether to measure combining through peer memory, too.

    Raises:
        SystemExit: An error exceeds TOLERANCE, or COMBINE_TOLERANCE if outputs are combined.
    """
    count, single = mesh.shape[TP], one_device_mesh()
    table, num_blocks = random_table([n // count for n in case.kv_lens], BLOCK_SIZE)
    tables = np.stack([table] * count)
    # The cache contains the devices' parts of the keys one after the other, each with blocks in random order.
    whole_table = np.concatenate([table + i * num_blocks for i in range(count)], axis=1)
    arrays_split, arrays = "none", _random_arrays(case, count * num_blocks, single, (P(), P()))
    expected = _reference(case, arrays, whole_table)
    splits = {
        "none": (single, whole_table[None], Split(P(), P(), P(), (1, 1))),
        "heads": (mesh, whole_table[None], Split(P(None, TP), P(None, None, TP), P(), (count, 1))),
    }
    for combine in COMBINES:
        if uses_peers or combine != "peer_memory":
            splits[f"keys {combine}"] = (mesh, tables, Split(P(), P(TP), P(TP), (1, count), combine))
    one_device_us, peers = None, _make_peers(case, mesh) if uses_peers else None
    for name, (devices, table, split) in splits.items():
        split_name = name.split()[0]
        if split_name != arrays_split:
            shardings = split.queries, split.cache
            arrays_split, arrays = split_name, _random_arrays(case, count * num_blocks, devices, shardings)
        places = NamedSharding(devices, split.tables), NamedSharding(devices, P())
        inputs = *arrays, *jax.device_put((table, _metadata(case, split)), places)
        inputs = *inputs, peers if split.combine else None
        error = max_error(jnp.asarray(on_host(_chain(case, devices, split, 1)(*inputs))), expected)
        if error > (TOLERANCE if split.combine is None else COMBINE_TOLERANCE):
            raise SystemExit(f"the error of attention split by {name} is {error}. No rows are recorded.")
        us = wall_time(_chain(case, devices, split, chain), *inputs, layers=1) / chain
        one_device_us = us if one_device_us is None else one_device_us
        yield {
            "name": f"attention_{case.name}",
            "split": split_name,
            **({} if split.combine is None else {"merge": split.combine}),
            "us": us,
            "gb_per_s": case.num_bytes(4 * case.head_dim) / us / 1e3,
            "speedup": one_device_us / us,
            "max_error": error,
        }


def _random_arrays(
    case: DecodeCase, num_blocks: int, mesh: Mesh, specs: tuple[P, P]
) -> tuple[jax.Array, ...]:
    """Return random queries, keys and values that do not depend on the mesh."""
    queries, cache = (NamedSharding(mesh, spec) for spec in specs)
    shape = num_blocks, BLOCK_SIZE, case.kv_heads, case.head_dim
    query = random_normal(0, (len(case.kv_lens), case.q_heads, case.head_dim), queries)
    return query, random_normal(1, shape, cache), random_normal(2, shape, cache)


def random_normal(seed: int, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """Return random bf16 numbers that do not depend on the sharding; each device draws its own shard."""
    draw = jax.jit(_normal, static_argnums=(0, 1), out_shardings=sharding)
    return draw(seed, shape)


def _normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _reference(case: DecodeCase, arrays: tuple[jax.Array, ...], table: np.ndarray) -> dict[int, jax.Array]:
    """Return the reference's outputs for some requests, computed on one device."""
    inputs = *arrays, jnp.asarray(table), jnp.asarray(case.kv_lens, jnp.int32)
    return reference_outputs(case, (inputs, {}), "NHD")


def _metadata(case: DecodeCase, split: Split) -> jattn.BatchMetadata:
    """Return the metadata of the step on a device, without its block table."""
    lens = [n // split.num_parts[1] for n in case.kv_lens]
    table = np.zeros((len(lens), -(-max(lens) // BLOCK_SIZE)), np.int32)
    return jattn.build_batch_metadata([1] * len(lens), lens, table, block_size=BLOCK_SIZE, to_device=False)


def _chain(case: DecodeCase, mesh: Mesh, split: Split, num_calls: int) -> Callable[..., jax.Array]:
    """Return a jitted chain of attend calls, in which the output of a call is the query of the next."""
    head_parts, _ = split.num_parts
    spec = jattn.AttentionSpec(
        head_dim=case.head_dim,
        num_q_heads=case.q_heads // head_parts,
        num_kv_heads=case.kv_heads // head_parts,
    )

    def run(query: Any, k: Any, v: Any, table: Any, metadata: Any, peers: Peers | None) -> jax.Array:
        cache, metadata = jattn.PagedCache(k=k, v=v), replace(metadata, block_table=table[0])
        plan = jattn.plan(metadata, spec, cache)
        for _ in range(num_calls):
            out, lse = jattn.attend(query, cache, metadata, spec, plan, return_lse=True)
            query = out if split.combine is None else COMBINES[split.combine](out, lse, peers)
        return query

    in_specs = split.queries, split.cache, split.cache, split.tables, P(), P(*mesh.axis_names)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=split.queries, check_vma=False))


class Peers(NamedTuple):
    """Peer memory for the exchange of log-sum-exps and for the all-reduce of outputs."""

    lse: PeerMemory
    sums: PeerMemory


def _make_peers(case: DecodeCase, mesh: Mesh) -> Peers:
    make = functools.partial(make_peer_memory, mesh, TP, max_rows=len(case.kv_lens))
    return Peers(make(width=2 * case.q_heads), make(width=case.q_heads * case.head_dim))


def _combine_gathered(out: jax.Array, lse: jax.Array, peers: Peers | None) -> jax.Array:
    """Gather all outputs on every device and combine them there."""
    del peers
    outs, lses = jax.lax.all_gather(out, TP), jax.lax.all_gather(lse, TP)
    combined = outs[0], lses[0]
    for i in range(1, len(outs)):
        combined = jattn.merge_attn_states(*combined, outs[i], lses[i])
    return combined[0].astype(out.dtype)


def _combine_summed(out: jax.Array, lse: jax.Array, peers: Peers | None) -> jax.Array:
    """Scale each device's output and all-reduce, as a model does after `attend_on_rank`."""
    del peers
    return jax.lax.psum(_scale_output(out, lse), TP)


def _combine_by_peers(out: jax.Array, lse: jax.Array, peers: Peers | None) -> jax.Array:
    """Scale each device's output and all-reduce, with both exchanges through peer memory."""
    assert peers is not None
    scaled = _scale_output(out, lse, peers.lse)
    return all_reduce(jax.lax.collapse(scaled, 1), peers.sums, axis_name=TP).reshape(out.shape)


def _combine_scattered(out: jax.Array, lse: jax.Array, peers: Peers | None) -> jax.Array:
    """Scale each device's output and reduce-scatter by heads, as vLLM does, then gather the next queries."""
    del peers
    part = jax.lax.psum_scatter(_scale_output(out, lse), TP, scatter_dimension=1, tiled=True)
    return jax.lax.all_gather(part, TP, axis=1, tiled=True)


def _scale_output(out: jax.Array, lse: jax.Array, peers: PeerMemory | None = None) -> jax.Array:
    return scale_rank_output(
        out, lse, ContextParallelAxis(axis_name=TP, size=jax.lax.axis_size(TP)), peers=peers
    )


# vLLM's cp_lse_ag_out_ar all-reduces, its cp_lse_ag_out_rs reduce-scatters.
COMBINES: dict[str, Callable[[jax.Array, jax.Array, Peers | None], jax.Array]] = {
    "all_gather": _combine_gathered,
    "all_reduce": _combine_summed,
    "reduce_scatter": _combine_scattered,
    "peer_memory": _combine_by_peers,
}
