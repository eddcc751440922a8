"""cache_write: each token in its slot and nowhere else, in place; interpret mode, compiled, and on a GPU."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cache_write import Tiles, cache_write, reference
from pallas_kernels.support import why_not_write
from tests import aot

SLOTS = [7, -1, 0, 30, -5, 12, 13, 9, 63]


def problem(layout, tokens=9, heads=2, dim=64, blocks=8, size=8, dtype=jnp.bfloat16):
    shape = (blocks, size, heads, dim) if layout == "NHD" else (blocks, heads, size, dim)
    keys = jax.random.split(jax.random.key(0), 4)
    key, value = (jax.random.normal(k, (tokens, heads, dim), dtype) for k in keys[:2])
    caches = tuple(jax.random.normal(k, shape, dtype) for k in keys[2:])
    slots = np.random.default_rng(0).permutation(blocks * size)[:tokens].astype(np.int32)
    slots[::5] = -1
    return key, value, *caches, jnp.asarray(SLOTS, jnp.int32) if tokens == len(SLOTS) else jnp.asarray(slots)


def check(arguments, layout, **options):
    want = reference.cache_write(*arguments, layout=layout)
    write = jax.jit(functools.partial(cache_write, layout=layout, **options), donate_argnums=(2, 3))
    for got, array in zip(write(*arguments), want, strict=True):
        np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda d: d.__name__)
def test_each_token_lands_in_its_slot_and_nowhere_else(layout, rows, dtype):
    arguments = problem(layout, dtype=dtype)
    check(arguments, layout, tiles=Tiles(rows=rows), interpret=plgpu.InterpretGPUParams())


def aot_cases():
    """The writes that ship: both layouts, models' widths, one token and a long prompt."""
    shape = jax.ShapeDtypeStruct
    cases = {}
    for layout in ("NHD", "HND"):
        for tokens, heads, dim in ((1, 8, 128), (64, 8, 64), (64, 32, 128), (8192, 8, 128), (33, 2, 256)):
            per_block = (16, heads) if layout == "NHD" else (heads, 16)
            new, cache = (shape(s, jnp.bfloat16) for s in ((tokens, heads, dim), (100_000, *per_block, dim)))
            run = functools.partial(cache_write, layout=layout)
            cases[f"{layout}-{tokens}-{heads}-{dim}"] = (
                run,
                (new, new, cache, cache, shape((tokens,), jnp.int32)),
            )
    return cases


def test_the_writes_that_ship_compile_without_spills():
    aot.require_plugin()
    kernels = aot.compile_all("tests.pallas_kernels.test_cache_write", list(aot_cases()))
    assert len(kernels) == len(aot_cases())
    for name, (kernel,) in kernels.items():
        assert kernel.spilled_bytes == 0, name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_quantized": True, "cache_dtype": jnp.int8}, "a quantised cache of int8"),
        ({"layout": "packed"}, "the packed layout .NHD, HND have one"),
        ({"head_dim": 4, "kv_heads": 1}, "keys of 8 bytes a token"),
        ({"layout": "HND", "head_dim": 32, "kv_heads": 1}, "HND keys of 64 bytes a token"),
        ({"layout": "HND", "head_dim": 4, "kv_heads": 16}, "HND heads of 8 bytes"),
        ({"layout": "HND", "kv_heads": 512}, r"HND keys of 512 heads \(at most 256\)"),
    ],
)
def test_what_has_no_kernel_is_named(change, message):
    good = {"cache_dtype": jnp.bfloat16, "layout": "NHD", "kv_heads": 2, "head_dim": 64}
    assert why_not_write(**good) is None
    assert re.search(message, why_not_write(**(good | change)))


def test_arguments_that_disagree_are_named():
    key, value, k, v, slots = problem("NHD")
    for arguments, message in (
        ((key, value, k[:, :4], v, slots), r"v_cache must have shape \(8, 4, 2, 64\).*got \(8, 8, 2, 64\)"),
        ((key, value.astype(jnp.float16), k, v, slots), "value.dtype must be one of .*bfloat16.*float16"),
    ):
        with pytest.raises(ValueError, match=message):
            cache_write(*arguments)
    with pytest.raises(NotImplementedError, match="cache_write: there is no kernel for HND keys of 64 bytes"):
        cache_write(*problem("HND", heads=1, dim=32), layout="HND")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("tokens", [1, 9, 64, 133, 1000])
@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (1, 64), (32, 128), (2, 256), (4, 80)])
def test_on_a_gpu(layout, tokens, heads, dim):
    check(problem(layout, tokens=tokens, heads=heads, dim=dim, blocks=200, size=16), layout)
