"""Cache writes and block moves, checked slot by slot: bits, scales and donation."""

import jax
import jax.numpy as jnp
import numpy as np

import jattn

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def cache_of(case: dict, rng: np.random.Generator, **changes) -> jattn.PagedCache:
    """Return a cache of random finite values."""
    names = ("num_blocks", "block_size", "num_kv_heads", "head_dim", "dtype", "layout", "quantization")
    spec = jattn.CacheSpec(**{name: case[name] for name in names} | changes)
    arrays = {}
    for name, stored in zip(("k_scale", "v_scale"), spec.storage_formats, strict=True):
        shapes = [s for s in stored.scale_shapes(spec) if stored.scale in ("static", "channel")]
        if shapes:
            arrays[name] = jnp.asarray(rng.uniform(0.02, 0.1, shapes[rng.integers(len(shapes))]), jnp.float32)
    cache = jattn.PagedCache.create(spec, **arrays)
    fill = lambda x: jnp.asarray(rng.integers(-9, 9, x.shape)).astype(x.dtype) if x.ndim > 2 else x
    return jax.tree.map(fill, cache)


def by_slot(cache: jattn.PagedCache) -> dict[str, np.ndarray]:
    """Return the bits of each slot: keys and values [slots, kv_heads, head_dim], scales [slots, kv_heads]."""
    # Of a copy: an array that numpy looks into is not donated.
    cache = jax.tree.map(lambda x: x.copy(), cache)
    k, v = np.asarray(cache.k), np.asarray(cache.v)
    if cache.layout == "HND":
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    if cache.layout == "packed":
        k, v = k.transpose(0, 3, 1, 2, 4).reshape(*v.transpose(0, 3, 1, 2).shape), v.transpose(0, 3, 1, 2)
    by_name = {"k": k, "v": v}
    for name in ("k_scale", "v_scale"):
        scale = getattr(cache, name)
        if scale is not None and np.ndim(scale) == 3:
            by_name[name] = np.asarray(scale)
    return {name: np.ascontiguousarray(x).reshape(-1, *x.shape[2:]) for name, x in by_name.items()}


def write(case: dict, rng: np.random.Generator) -> None:
    cache = cache_of(case, rng)
    before, scales = by_slot(cache), {"k": cache.k_scale, "v": cache.v_scale}
    slots = rng.permutation(len(before["k"]))[: rng.integers(0, 12)]
    slots = np.where(rng.random(len(slots)) < 0.25, -rng.integers(1, 9, len(slots)), slots).astype(np.int32)
    dtype = jnp.dtype(case["dtype"])
    shape = len(slots) + rng.integers(0, 4), case["num_kv_heads"], case["head_dim"]
    rows = {name: rng.normal(size=shape).astype(dtype) for name in ("k", "v")}
    for x in rows.values():
        x[len(slots) :] = np.nan  # rows without a slot are padding
    new = jattn.write_kv(cache, jnp.asarray(rows["k"]), jnp.asarray(rows["v"]), jnp.asarray(slots))
    if len(slots):
        assert cache.k.is_deleted(), "the cache must be donated"
    actual = by_slot(new)
    for name in before:
        untouched = np.setdiff1d(np.arange(len(before["k"])), slots)
        np.testing.assert_array_equal(
            actual[name][untouched], before[name][untouched], err_msg=f"{name} elsewhere"
        )
    for t, slot in enumerate(slots):
        for name in ("k", "v") if slot >= 0 else ():
            has_token_scale = f"{name}_scale" in actual
            scale = actual[f"{name}_scale"][slot][:, None] if has_token_scale else scales[name]
            _check_stored(
                rows[name][t].astype(np.float64), actual[name][slot], scale, is_dynamic=has_token_scale
            )


def _check_stored(row: np.ndarray, stored: np.ndarray, scale, *, is_dynamic: bool) -> None:
    """Check that a stored row [kv_heads, head_dim] is the nearest 8-bit value, with ties to either side."""
    dtype = stored.dtype.name
    if scale is None:
        np.testing.assert_array_equal(stored, row.astype(stored.dtype))
        return
    scale = np.asarray(scale, np.float64)
    if is_dynamic:
        expected = np.maximum(np.abs(row).max(axis=-1, keepdims=True) / LARGEST[dtype], 1e-6)
        np.testing.assert_allclose(scale, expected, rtol=1e-6)
    scale = scale.reshape(-1, 1) if scale.ndim == 1 else scale
    scaled = row / scale
    if dtype == "int8":
        error = np.abs(stored.astype(np.float64) - np.clip(scaled, -128, 127))
        assert (error <= 0.5 + 1e-4).all(), f"int8 is off by {error.max()}"
    else:
        clipped = np.clip(scaled, -LARGEST[dtype], LARGEST[dtype])
        neighbours = [
            (clipped * (1 + shift)).astype(np.float32).clip(-LARGEST[dtype], LARGEST[dtype])
            for shift in (-1e-6, 1e-6)
        ]
        ends = np.sort([x.astype(stored.dtype).astype(np.float64) for x in neighbours], axis=0)
        stored = stored.astype(np.float64)
        assert ((stored >= ends[0]) & (stored <= ends[1])).all(), "fp8 is not the nearest"


def pairs_of(rng: np.random.Generator, num_source: int, num_target: int) -> np.ndarray:
    """Return (source, target) pairs with distinct targets; some are padding."""
    targets = rng.permutation(num_target)[: rng.integers(0, num_target + 1)]
    pairs = np.stack([rng.integers(0, num_source, len(targets)), targets], axis=1).astype(np.int32)
    padding = rng.choice([[-1, -1], [0, -1], [-3, 0]], rng.integers(0, 3)).reshape(-1, 2)
    return rng.permutation(np.concatenate([pairs, padding]).astype(np.int32))


def moved(source: dict, target: dict, pairs: np.ndarray, size: int) -> dict:
    by_name = {name: x.copy() for name, x in target.items()}
    for a, b in pairs:
        for name in by_name if a >= 0 and b >= 0 else ():
            by_name[name][b * size : (b + 1) * size] = source[name][a * size : (a + 1) * size]
    return by_name


def assert_same(actual: dict, expected: dict) -> None:
    for name in expected:
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)


def copy(case: dict, rng: np.random.Generator) -> None:
    caches = {"a": cache_of(case, rng), "b": [cache_of(case, rng)]}
    pairs, size = pairs_of(rng, case["num_blocks"], case["num_blocks"]), case["block_size"]
    olds = [by_slot(caches["a"]), by_slot(caches["b"][0])]
    first = caches["a"]
    new = jattn.copy_blocks(caches, pairs)
    assert first.k.is_deleted(), "the caches must be donated"
    for old, cache in zip(olds, (new["a"], new["b"][0]), strict=True):
        assert_same(by_slot(cache), moved(old, old, pairs, size))


def swap(case: dict, rng: np.random.Generator) -> None:
    num_target_blocks = int(rng.integers(1, 9))
    source, target = cache_of(case, rng), cache_of(case, rng, num_blocks=num_target_blocks)
    on_host = lambda cache: jax.tree.map(np.array, cache)
    source, target = (on_host(c) if rng.random() < 0.5 else c for c in (source, target))
    pairs, old, size = (
        pairs_of(rng, case["num_blocks"], num_target_blocks),
        by_slot(target),
        case["block_size"],
    )
    expected = moved(by_slot(source), old, pairs, size)
    is_on_host = isinstance(target.k, np.ndarray)
    before = by_slot(source)
    new = jattn.swap_blocks(source, target, pairs)
    assert isinstance(new.k, np.ndarray) == is_on_host
    assert_same(by_slot(new), expected)
    assert_same(by_slot(source), before)
