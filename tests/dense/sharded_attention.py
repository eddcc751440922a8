"""attention under shard_map on four CPU devices, compared with one device.

Run by tests/dense/explicit_attention.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jattn

MESH = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
BY_HEAD = {"sinks": P("heads"), "alibi_slopes": P("heads")}


def arrays(kv_heads: int) -> tuple[jax.Array, ...]:
    shapes = (4, 24, 4, 16), (4, 24, kv_heads, 16), (4, 24, kv_heads, 16)
    return tuple(jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))


def attend(inputs: tuple, per_head: dict, ids: jax.Array | None) -> jax.Array:
    """Return a loss of each batch element: [batch]."""
    out, lse = jattn.attention(*inputs, causal=True, segment_ids=ids, return_lse=True, **per_head)
    return (out**2).sum(axis=(1, 2, 3)) + lse.sum(axis=(1, 2))


def check(name: str, *, kv_heads: int, has_heads: bool, has_ids: bool, num_sums: int) -> None:
    """Check that gradients equal one device's with no more all-reduces than necessary."""
    keys = P("data", None, "heads" if kv_heads > 1 else None)
    specs = (P("data", None, "heads"), keys, keys)
    per_head = {"sinks": jnp.linspace(-1, 1, 4), "alibi_slopes": jnp.linspace(0.1, 0.4, 4)}
    per_head, head_specs = (per_head, BY_HEAD) if has_heads else ({}, {})
    ids = jnp.arange(4 * 24).reshape(4, 24) // 7 if has_ids else None
    per_text = lambda *args: attend(*args)[:, None]
    ids_spec = P("data") if has_ids else None
    sharded = jax.shard_map(
        per_text, mesh=MESH, in_specs=(specs, head_specs, ids_spec), out_specs=P("data", "heads")
    )
    loss = lambda run, inputs, per_head: run(inputs, per_head, ids).sum()
    gradient = lambda run: jax.jit(jax.grad(functools.partial(loss, run), argnums=(0, 1)))
    put = lambda x, spec: jax.device_put(x, jax.NamedSharding(MESH, spec))
    placed = (
        tuple(map(put, arrays(kv_heads), specs)),
        {key: put(x, head_specs[key]) for key, x in per_head.items()},
    )
    step = gradient(sharded).lower(*placed).compile()
    actual, expected = step(*placed), gradient(per_text)(arrays(kv_heads), per_head)
    # A sum over all texts rounds in the order of its parts.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-5), actual, expected)
    text = step.as_text()
    num_all_reduces = sum(
        line.count(" all-reduce(") + line.count(" all-reduce-start(") for line in text.splitlines()
    )
    num_moves = sum(
        text.count(f" {collective}(") for collective in ("all-gather", "all-to-all", "collective-permute")
    )
    assert (num_all_reduces, num_moves) == (num_sums, 0), (
        f"{name}: {num_all_reduces} sums over devices, {num_moves} other exchanges"
    )
    print(f"{name}: {num_all_reduces} sums over devices")


def main() -> None:
    check("segments", kv_heads=2, has_heads=False, has_ids=True, num_sums=0)
    check("sinks and slopes over data", kv_heads=2, has_heads=True, has_ids=False, num_sums=1)
    check("one kv head for all devices", kv_heads=1, has_heads=False, has_ids=False, num_sums=1)
