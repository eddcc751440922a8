"""Kernels have no derivative: differentiating one raises an error that names a function with a derivative."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jattn
from jattn.sparsity import KeyBounds, select_blocks, select_prefill_blocks
from pallas_kernels.add_norm import add_norm
from pallas_kernels.checks import forbid_kernel_derivative
from tests.pallas_kernels.entry_points import ENTRIES, half


@pytest.mark.parametrize("name", ENTRIES)
def test_differentiating_a_kernel_raises_with_a_fix(name):
    run, floats, ints, static, fix = ENTRIES[name]
    run = jax.jit(functools.partial(run, **ints, **static))
    for differentiated in floats:

        def loss(x, differentiated=differentiated):
            results = jax.tree.leaves(run(**floats | {differentiated: x}))
            return sum(y.astype(jnp.float32).sum() for y in results if jnp.issubdtype(y.dtype, jnp.floating))

        message = rf"^a derivative of {name}: the kernel has none\. .*{fix}"
        with pytest.raises(NotImplementedError, match=message):
            jax.grad(loss)(floats[differentiated])
        with pytest.raises(NotImplementedError, match=message):
            jax.jvp(loss, (floats[differentiated],), (floats[differentiated],))


def test_stopped_gradients_are_accepted():
    x, weight = half(2, 128), half(128)
    run = functools.partial(add_norm, interpret=plgpu.InterpretGPUParams())

    def loss(factor):
        return jnp.sum(factor * run(jax.lax.stop_gradient(x), None, weight)[1].astype(jnp.float32))

    np.testing.assert_allclose(jax.grad(loss)(2.0), 256, rtol=1e-2)


def test_selected_masks_may_depend_on_differentiated_arrays():
    options = {"block_size": 16, "implementation": "mosaic_gpu", "interpret": plgpu.InterpretGPUParams()}
    pages = ENTRIES["paged_decode"].ints
    spec = jattn.AttentionSpec(num_q_heads=8, num_kv_heads=8, head_dim=64)
    step = jattn.build_batch_metadata([2], [2], None)

    def chosen(x):
        yield select_blocks(x, KeyBounds(min_key=x, max_key=2 * x), **pages, num_selected=1, **options)
        kv = jattn.PackedKV(k=x, v=x, kv_start_loc=step.row_starts)
        yield select_prefill_blocks(x, kv, step, spec, mass=0.5, **options)

    loss = lambda x: x.sum() * sum(mask.blocks.sum().astype(x.dtype) for mask in chosen(x))
    assert jax.eval_shape(jax.grad(loss), half(2, 8, 64)).shape == (2, 8, 64)


def test_forbid_kernel_derivative_compiles_to_nothing():
    named = lambda x: forbid_kernel_derivative({"x": x, "none": None}, "a kernel", "Do without")["x"] + 1
    bare = lambda x: x + 1
    text = lambda f: jax.jit(f, donate_argnums=0).lower(half(2)).as_text()
    assert text(named) == text(bare)
    np.testing.assert_array_equal(jax.vmap(named)(jnp.ones(3)), jnp.full(3, 2.0))
