"""Attention under plain jit on CPU meshes with Auto axes. Run by tests/dense/test_attention.py."""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks
from jattn.dense import attention, per_shard
from jattn.implementations import mosaic_gpu, xla
from jattn.implementations.region_inputs import OutputGradients, RegionInputs
from jattn.pytree import replace
from pallas_kernels import support
from tests.dense.explicit_attention import (
    BOTH,
    IDS,
    LENS,
    PER_HEAD,
    SQUARE,
    TEXTS,
    arrays,
    attend,
    exchanges,
    output_and_gradients,
)

AXES = {"axis_types": (AxisType.Auto,) * 2}
MESH = jax.make_mesh((2, 2), ("data", "heads"), **AXES)
OF_HEADS = jax.make_mesh((1, 4), ("data", "heads"), **AXES)
OF_EIGHT = jax.make_mesh((4, 2), ("data", "heads"), **AXES)  # more parts of texts than there are kv heads
HEADS, WHOLE = P(None, None, "heads"), P()
SHARED = jnp.arange(24) // 5
BLOCKS = masks.BlockMask(
    blocks=jax.random.bernoulli(jax.random.key(8), 0.6, (4, 4, 6, 6)), block_q=4, block_kv=4
)


def place(inputs: Sequence[jax.Array], partitions: Sequence[P], mesh: Any = MESH) -> list[jax.Array]:
    return [
        jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip(inputs, partitions, strict=True)
    ]


def close(actual: jax.Array, expected: jax.Array) -> None:
    """Assert closeness up to the rounding of sums over devices; -inf is allowed."""
    scale = float(jnp.abs(expected).max(where=jnp.isfinite(expected), initial=1.0))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=4e-5 * scale, equal_nan=False)


def near(actual: jax.Array, expected: jax.Array) -> None:
    """Assert closeness in 16 bits, relative to the largest expected value."""
    actual, expected = (x.astype(jnp.float32) for x in (actual, expected))
    np.testing.assert_allclose(
        actual, expected, rtol=0, atol=0.02 * float(jnp.abs(expected).max()), equal_nan=False
    )


def loss_of(run: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda *inputs: (run(*inputs) ** 2).sum()


def check(
    name: str,
    run: Callable[..., jax.Array],
    partitions: tuple[P, ...],
    *,
    inputs: Sequence[jax.Array] | None = None,
    gradient_collectives: tuple[int, int] = (0, 0),
    mesh: Any = MESH,
) -> str:
    """Check that outputs and gradients equal one device's, with the expected collectives and sharding.

    Returns:
        The text of the compiled step.
    """
    inputs = arrays() if inputs is None else inputs
    partitions = (
        (partitions[0],) + (partitions[1],) * 2 + partitions[2:] if len(partitions) == 2 else partitions
    )
    placed = place(inputs, partitions, mesh)
    step = jax.jit(output_and_gradients(run))
    on_mesh = step.lower(*placed).compile()
    actual_collectives = exchanges(on_mesh)
    assert actual_collectives == gradient_collectives, (
        f"{name}: {actual_collectives} exchanges, not {gradient_collectives}"
    )
    actual = on_mesh(*placed)
    jax.tree.map(close, actual, step(*inputs))
    for x, placed_array in zip(jax.tree.leaves(actual), [placed[0], *placed], strict=True):
        sizes = [math.prod(array.sharding.shard_shape(array.shape)) for array in (x, placed_array)]
        assert sizes[0] <= sizes[1] or x.shape != placed_array.shape, f"{name}: {x.sharding}"
    print(name)
    return on_mesh.as_text()


def check_layers() -> None:
    """Check projections whose weights are sharded by heads, as in models."""

    def layer(x: jax.Array, w_q: jax.Array, w_k: jax.Array, w_v: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("btc,chd->bthd", x, w) for w in (w_q, w_k, w_v))
        return jnp.tanh(attend(q, k, v, window=(9, 0)))

    shapes = (4, 24, 8), (8, 4, 16), (8, 2, 16), (8, 2, 16)
    inputs = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
    partitions = TEXTS, *[P(None, "heads")] * 3
    # Each weight's gradient is summed over the texts, the inputs' over the heads.
    check("projections", layer, partitions, inputs=inputs, gradient_collectives=(2, 0))


def check_per_head() -> None:
    """Check that gradients of sinks and slopes are summed over the batch by one all-reduce of a number per
    head.
    """

    def run(*inputs: jax.Array) -> jax.Array:
        return attend(*inputs[:3], sinks=inputs[3], alibi_slopes=inputs[4], segment_ids=IDS)

    inputs, cut = [*arrays(), *PER_HEAD.values()], (BOTH, BOTH, BOTH, P("heads"), P("heads"))
    step = check("sinks, slopes and ids", run, cut, inputs=inputs, gradient_collectives=(1, 0))
    summed = re.findall(r"= (.*) all-reduce", step)
    assert set(re.findall(r"\w+\[.*?\]", "".join(summed))) == {"f32[2]"}, summed


def opaque(x: jax.Array) -> jax.Array:
    """Return x, computed by an FFI call that XLA cannot see through: a triangular system of one equation."""
    row = x.astype(jnp.float32).reshape(1, -1)
    solve = jax.ffi.ffi_call("lapack_strsm_ffi", jax.ShapeDtypeStruct(row.shape, row.dtype))
    attributes = {"side": "L", "uplo": "L", "trans_x": "N", "diag": "N"}
    solved = solve(
        jnp.ones((1, 1)), row, **{name: np.uint8(ord(letter)) for name, letter in attributes.items()}
    )
    return solved.reshape(x.shape).astype(x.dtype)


def kernel(inputs: RegionInputs, *_: Any, return_lse: bool) -> Any:
    """Stand in for the forward kernel, as opaque to XLA as a kernel."""
    return xla.attend(replace(inputs, query=opaque(inputs.query)))


def gradients(inputs: RegionInputs, outputs: OutputGradients) -> Any:
    """Stand in for the backward kernel, as opaque to XLA as a kernel."""
    return xla.gradients(inputs, outputs._replace(grad_out=opaque(outputs.grad_out)))[:3]


def check_kernels() -> None:
    """Check that calls that are opaque to XLA, as kernels are, receive local shards; XLA alone would
    gather.
    """
    inputs = [
        jax.random.normal(jax.random.key(i), (4, 64, heads, 64), jnp.bfloat16)
        for i, heads in enumerate((4, 2, 2))
    ]
    run = lambda *inputs: attend(*inputs, implementation="mosaic_gpu").astype(jnp.float32)
    gradient = jax.grad(loss_of(run), argnums=(0, 1, 2))
    lower = lambda function: (
        jax.jit(lambda *inputs: function(*inputs)).lower(*place(inputs, (BOTH,) * 3)).compile()
    )
    jax.lax.linalg.triangular_solve(
        jnp.ones((1, 1)), jnp.ones((1, 1))
    )  # else JAX has not loaded its code yet
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(support, "why_not_on", return_value=None))
        stack.enter_context(mock.patch.object(mosaic_gpu, "attend", kernel))
        stack.enter_context(mock.patch.object(mosaic_gpu, "gradients", gradients))
        unjitted = per_shard.attend_regions.__wrapped__
        stack.enter_context(mock.patch.object(per_shard, "attend_regions", unjitted))
        for function, num_kernels in (
            (run, 1),
            (gradient, 2),
        ):  # the backward pass does not recompute attention
            step = lower(function)
            assert exchanges(step) == (0, 0)
            assert step.as_text().count('custom_call_target="lapack_strsm_ffi"') == num_kernels
            jax.tree.map(near, step(*place(inputs, (BOTH,) * 3)), jax.jit(function)(*inputs))
        jax.clear_caches()
        with mock.patch.object(attention, "has_auto_sharding", return_value=False):
            for function in (run, gradient):
                assert exchanges(lower(function)) != (0, 0)
    jax.clear_caches()
    print("kernels")


def check_single_device() -> None:
    """Check that arrays on one of several devices are not partitioned."""
    assert "Partitioning" in jax.jit(attend).lower(*place(arrays(), (BOTH,) * 3)).as_text()
    for lowered in (jax.jit(attend).lower(*arrays()), jax.jit(jax.vmap(attend)).lower(*arrays())):
        assert "Partitioning" not in lowered.as_text()
    print("one device")


def check_transformations() -> None:
    """Check JAX transformations of attention over sharded arrays."""
    inputs, placed = arrays(), place(arrays(), (BOTH,) * 3)
    gradient_of_sum = lambda function: jax.jit(jax.grad(lambda *inputs: (function(*inputs) ** 2).sum()))
    expected = gradient_of_sum(attend)(*inputs)
    for function in (jax.checkpoint(attend), jax.vmap(attend)):
        close(gradient_of_sum(function)(*placed), expected)
    with jax.set_mesh(MESH):
        close(gradient_of_sum(attend)(*placed), expected)
    over = functools.partial(jax.shard_map, attend, mesh=MESH, check_vma=False)
    close(gradient_of_sum(over(in_specs=BOTH, out_specs=BOTH))(*placed), expected)
    close(gradient_of_sum(over(in_specs=TEXTS, out_specs=TEXTS, axis_names={"data"}))(*placed), expected)
    with pytest.raises(NotImplementedError, match="Second derivatives of attention"):
        jax.grad(lambda q: gradient_of_sum(attend)(q, *placed[1:]).sum())(placed[0])
    exported = jax.export.export(jax.jit(attend))(*inputs)
    assert exported.nr_devices == 1
    print("transformations")


def main() -> None:
    attend_with = lambda **options: functools.partial(attend, **options)
    check("texts", attend_with(mask=masks.Prefix(length=LENS), causal=False), (TEXTS, TEXTS))
    check("heads", attend_with(mask=masks.Sinks(3) | masks.Window(left=7)), (HEADS, HEADS))
    both = attend_with(window=(5, 2), causal=False, soft_cap=5.0)
    check("both, on eight devices", both, (BOTH, BOTH), mesh=OF_EIGHT)
    check("queries alone, each head its own keys", attend_with(), (BOTH, TEXTS), inputs=arrays(4))
    check("one kv head", attend_with(), (BOTH, TEXTS), inputs=arrays(1), gradient_collectives=(1, 0))
    check(
        "two kv heads of four devices",
        attend_with(),
        (HEADS, WHOLE),
        gradient_collectives=(1, 0),
        mesh=OF_HEADS,
    )
    check_per_head()
    check("blocks of each head", attend_with(mask=BLOCKS), (BOTH, BOTH))
    check("bools", attend_with(mask=SQUARE), (BOTH, BOTH))
    same = masks.MaskFunction(lambda head, query, key: (SHARED[query] == SHARED[key]) | (head == 1))
    check("a function that closes over an array", attend_with(mask=same), (BOTH, BOTH))
    bounds = jnp.array([0, 5, 5, 20])
    check(
        "documents", attend_with(cu_seqlens=bounds), (P(None, "heads"),) * 2, inputs=[x[0] for x in arrays()]
    )
    fewer = [arrays()[0][:, :9], *arrays()[1:]]
    check("fewer queries than keys", attend_with(sinks=PER_HEAD["sinks"]), (BOTH, BOTH), inputs=fewer)
    attend_with = lambda **options: functools.partial(jattn.attention_fn, **options)
    check("Flax", attend_with(is_causal=True, mask=SQUARE[:, :1]), (BOTH, BOTH))
    check_layers()
    check_transformations()
    check_single_device()
    check_kernels()


if __name__ == "__main__":
    main()
