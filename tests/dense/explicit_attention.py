"""Attention of arrays on a CPU mesh of four devices with Explicit axes.

Run by tests/dense/test_attention.py.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)  # of which a mesh takes the first

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jattn  # noqa: E402
from jattn import masks  # noqa: E402
from tests.dense import sharded_attention  # noqa: E402

MESH = jax.make_mesh((2, 2), ("data", "heads"))  # Explicit, which is what JAX makes
TEXTS, BOTH = P("data"), P("data", None, "heads")
IDS = jnp.arange(4 * 24).reshape(4, 24) // 7
LENS = jnp.array([24, 9, 17, 1])
SQUARE = jax.random.bernoulli(jax.random.key(9), 0.5, (4, 4, 24, 24)) | jnp.eye(24, dtype=bool)
PER_HEAD = {"sinks": jnp.linspace(-1, 1, 4), "alibi_slopes": jnp.linspace(0.1, 0.4, 4)}
SPARSE = jattn.AttentionSpec(
    causal=True,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    sparsity=masks.LocalStrided(block_size=4, local_blocks=1, vert_stride=3),
)


def arrays(kv_heads: int = 2) -> list[jax.Array]:
    shapes = (4, 24, 4, 16), (4, 24, kv_heads, 16), (4, 24, kv_heads, 16)
    return [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


def place(array: jax.Array, spec: P) -> jax.Array:
    return jax.device_put(array, jax.NamedSharding(MESH, spec))


def exchanges(executable: Any) -> tuple[int, int]:
    """Return the numbers of all-reduces and of other collectives."""
    names = re.findall(
        r" (all-reduce|all-gather|all-to-all|collective-permute)(?:-start)?\(", executable.as_text()
    )
    return names.count("all-reduce"), len(names) - names.count("all-reduce")


def output_and_gradients(run: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, Any]]:
    """Return a function of the output, and of the gradients of the sum of its squares."""

    def step(*inputs: jax.Array) -> tuple[jax.Array, Any]:
        out, gradients = jax.vjp(run, *inputs)
        return out, gradients(2 * out)

    return step


def check(
    name: str,
    run: Callable[..., jax.Array],
    partitions: tuple[P, P],
    *,
    kv_heads: int = 2,
    gradient_collectives: tuple[int, int] = (0, 0),
    inputs: list[jax.Array] | None = None,
    has_eager_call: bool = False,
) -> None:
    """Check that outputs and gradients equal one device's and keep the sharding of queries."""
    inputs = arrays(kv_heads) if inputs is None else inputs
    query_spec, key_spec = partitions
    placed = [place(x, spec) for x, spec in zip(inputs, (query_spec, key_spec, key_spec), strict=True)]
    step = jax.jit(output_and_gradients(run))
    on_mesh = step.lower(*placed).compile()
    assert exchanges(on_mesh) == gradient_collectives, f"{name}: {exchanges(on_mesh)} exchanges"
    close = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-5)
    actual = on_mesh(*placed)
    jax.tree.map(close, actual, step(*inputs))
    out = run(*placed) if has_eager_call else actual[0]
    assert out.sharding.is_equivalent_to(placed[0].sharding, out.ndim), f"{name}: {out.sharding}"
    print(name)


def attend(*inputs: jax.Array, **options: Any) -> jax.Array:
    out, lse = jattn.attention(*inputs, return_lse=True, **({"causal": True} | options))
    return out + jnp.moveaxis(lse, -2, -1)[..., None]


def check_sinks() -> None:
    """Check that the gradient of sinks is summed over the batch."""
    loss = lambda sinks, inputs: (attend(*inputs, sinks=sinks) ** 2).sum()
    step = jax.jit(jax.grad(loss))
    expected = step(PER_HEAD["sinks"], arrays())
    placed = [place(x, BOTH) for x in arrays()]
    for spec in (P(), P("heads")):
        np.testing.assert_allclose(step(place(PER_HEAD["sinks"], spec), placed), expected, rtol=2e-6)
    print("gradients of sinks")


def main() -> None:
    sharded_attention.main()
    check_sinks()
    attend_with = lambda **options: functools.partial(attend, **options)
    check("texts and heads", attend_with(window=(5, 0)), (BOTH, BOTH), has_eager_call=True)
    check(
        "whole keys", attend_with(causal=False), (BOTH, P()), gradient_collectives=(0, 4)
    )  # as each device has them whole
    check("one kv head", attend_with(), (BOTH, TEXTS), kv_heads=1, gradient_collectives=(1, 0))
    by_device = P(None, None, ("data", "heads"))
    check("two kv heads of four devices", attend_with(), (by_device, P()), gradient_collectives=(1, 2))
    coarser = P(None, None, "data")
    check(
        "two kv heads on two, their queries on four",
        attend_with(),
        (by_device, coarser),
        gradient_collectives=(1, 0),
    )
    check("sinks, slopes and ids", attend_with(segment_ids=IDS, **PER_HEAD), (BOTH, BOTH))
    check("lengths", attend_with(mask=masks.Prefix(length=LENS), causal=False), (TEXTS, TEXTS))
    check("bools of all texts", attend_with(mask=SQUARE[:1, :1]), (BOTH, BOTH))
    check("one text", attend_with(), (P(None, "heads"),) * 2, inputs=[x[0] for x in arrays()])
    bounds = jnp.array([0, 5, 5, 20])
    by_head = P(None, "heads"), P(None, "heads")
    documents = [x[0] for x in arrays()]
    check("documents", attend_with(cu_seqlens=bounds), by_head, inputs=documents, has_eager_call=True)

    attend_with = lambda **options: functools.partial(jattn.attention_fn, **options)
    check("Flax, a bias", attend_with(bias=jnp.linspace(-1, 1, 4 * 24).reshape(4, 1, 24)), (BOTH, BOTH))
    positions = jnp.arange(24)[None] + LENS[:, None]
    positioned = attend_with(spec=SPARSE, input_positions=positions)
    check("Flax, a pattern over positions", positioned, (BOTH, BOTH), has_eager_call=True)
    several = [x.reshape(2, 2, *x.shape[1:]) for x in arrays()]
    check("Flax, more axes", attend_with(is_causal=True), (P("data", "heads"),) * 2, inputs=several)


if __name__ == "__main__":
    main()
