"""Metadata, writes, moves of blocks, merges, cascades and decode loops against loops in numpy."""

import random

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from tests import oracle
from tests.fuzz import metadata
from tests.fuzz.draw import one_of

FORMATS = list(jattn.spec.QUANTIZATIONS)
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def draw(seed: int) -> dict:
    """What is tried; all else comes from the seed."""
    rng = random.Random(f"moves-{seed}")
    what = one_of(rng, metadata=4, write=4, copy=2, swap=2, merge=1, cascade=1, loop=2)
    case = {"seed": seed, "what": what, "layout": rng.choice(jattn.spec.LAYOUTS)}
    case |= {"quantization": rng.choice(FORMATS), "dtype": rng.choice(["float32", "bfloat16", "float16"])}
    case |= {"block_size": rng.choice([1, 3, 4, 8, 16]), "num_kv_heads": rng.choice([1, 2, 3])}
    return case | {"head_dim": rng.choice([16, 32, 48]), "num_blocks": rng.randint(1, 9)}


def check(case: dict) -> None:
    rng = np.random.default_rng(case["seed"])
    checks = {"write": write, "copy": copy, "swap": swap, "merge": merge, "cascade": cascade, "loop": loop}
    (checks | {"metadata": metadata.check})[case["what"]](case, rng)


# ---------------------------------------------------------------------------------------- the cache
def cache_of(case: dict, rng: np.random.Generator, **changes) -> jattn.PagedCache:
    """Of random bits that are numbers."""
    names = ("num_blocks", "block_size", "num_kv_heads", "head_dim", "dtype", "layout", "quantization")
    spec = jattn.CacheSpec(**{name: case[name] for name in names} | changes)
    made = {}
    for name, stored in zip(("k_scale", "v_scale"), spec.stored, strict=True):
        shapes = [s for s in stored.scale_shapes(spec) if stored.scale in ("static", "channel")]
        if shapes:
            made[name] = jnp.asarray(rng.uniform(0.02, 0.1, shapes[rng.integers(len(shapes))]), jnp.float32)
    cache = jattn.PagedCache.create(spec, **made)
    fill = lambda x: jnp.asarray(rng.integers(-9, 9, x.shape)).astype(x.dtype) if x.ndim > 2 else x
    return jax.tree.map(fill, cache)


def by_slot(cache: jattn.PagedCache) -> dict[str, np.ndarray]:
    """Bits of each slot: keys and values [slots, kv_heads, head_dim], scales [slots, kv_heads]."""
    # Of a copy: an array that numpy looks into is not donated.
    cache = jax.tree.map(lambda x: x.copy(), cache)
    k, v = np.asarray(cache.k), np.asarray(cache.v)
    if cache.layout == "HND":
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    if cache.layout == "packed":
        k, v = k.transpose(0, 3, 1, 2, 4).reshape(*v.transpose(0, 3, 1, 2).shape), v.transpose(0, 3, 1, 2)
    found = {"k": k, "v": v}
    for name in ("k_scale", "v_scale"):
        scale = getattr(cache, name)
        if scale is not None and np.ndim(scale) == 3:
            found[name] = np.asarray(scale)
    return {name: np.ascontiguousarray(x).reshape(-1, *x.shape[2:]) for name, x in found.items()}


def write(case: dict, rng: np.random.Generator) -> None:
    cache = cache_of(case, rng)
    before, scales = by_slot(cache), {"k": cache.k_scale, "v": cache.v_scale}
    slots = rng.permutation(len(before["k"]))[: rng.integers(0, 12)]
    slots = np.where(rng.random(len(slots)) < 0.25, -rng.integers(1, 9, len(slots)), slots).astype(np.int32)
    dtype = jnp.dtype(case["dtype"])
    shape = len(slots) + rng.integers(0, 4), case["num_kv_heads"], case["head_dim"]
    rows = {name: rng.normal(size=shape).astype(dtype) for name in ("k", "v")}
    for x in rows.values():
        x[len(slots) :] = np.nan  # behind the slots: padding
    new = jattn.write_kv(cache, jnp.asarray(rows["k"]), jnp.asarray(rows["v"]), jnp.asarray(slots))
    if len(slots):
        assert cache.k.is_deleted(), "the cache must be donated"
    got = by_slot(new)
    for name in before:
        untouched = np.setdiff1d(np.arange(len(before["k"])), slots)
        np.testing.assert_array_equal(
            got[name][untouched], before[name][untouched], err_msg=f"{name} elsewhere"
        )
    for t, slot in enumerate(slots):
        for name in ("k", "v") if slot >= 0 else ():
            has_token_scale = f"{name}_scale" in got
            scale = got[f"{name}_scale"][slot][:, None] if has_token_scale else scales[name]
            _check_stored(
                rows[name][t].astype(np.float64), got[name][slot], scale, is_dynamic=has_token_scale
            )


def _check_stored(row: np.ndarray, held: np.ndarray, scale, *, is_dynamic: bool) -> None:
    """What is held of a row [kv_heads, head_dim]: the nearest, ties either way."""
    dtype = held.dtype.name
    if scale is None:
        np.testing.assert_array_equal(held, row.astype(held.dtype))
        return
    scale = np.asarray(scale, np.float64)
    if is_dynamic:
        want = np.maximum(np.abs(row).max(axis=-1, keepdims=True) / LARGEST[dtype], 1e-6)
        np.testing.assert_allclose(scale, want, rtol=1e-6)
    scale = scale.reshape(-1, 1) if scale.ndim == 1 else scale
    scaled = row / scale
    if dtype == "int8":
        error = np.abs(held.astype(np.float64) - np.clip(scaled, -128, 127))
        assert (error <= 0.5 + 1e-4).all(), f"int8 is off by {error.max()}"
    else:
        clipped = np.clip(scaled, -LARGEST[dtype], LARGEST[dtype])
        near = [
            (clipped * (1 + shift)).astype(np.float32).clip(-LARGEST[dtype], LARGEST[dtype])
            for shift in (-1e-6, 1e-6)
        ]
        ends = np.sort([x.astype(held.dtype).astype(np.float64) for x in near], axis=0)
        held = held.astype(np.float64)
        assert ((held >= ends[0]) & (held <= ends[1])).all(), "fp8 is not the nearest"


def pairs_of(rng: np.random.Generator, num_source: int, num_target: int) -> np.ndarray:
    """Of (source, target): targets differ; some pairs are padding."""
    targets = rng.permutation(num_target)[: rng.integers(0, num_target + 1)]
    pairs = np.stack([rng.integers(0, num_source, len(targets)), targets], axis=1).astype(np.int32)
    padding = rng.choice([[-1, -1], [0, -1], [-3, 0]], rng.integers(0, 3)).reshape(-1, 2)
    return rng.permutation(np.concatenate([pairs, padding]).astype(np.int32))


def moved(source: dict, target: dict, pairs: np.ndarray, size: int) -> dict:
    found = {name: x.copy() for name, x in target.items()}
    for a, b in pairs:
        for name in found if a >= 0 and b >= 0 else ():
            found[name][b * size : (b + 1) * size] = source[name][a * size : (a + 1) * size]
    return found


def assert_same(got: dict, want: dict) -> None:
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


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
    others = int(rng.integers(1, 9))
    source, target = cache_of(case, rng), cache_of(case, rng, num_blocks=others)
    on_host = lambda cache: jax.tree.map(np.array, cache)
    source, target = (on_host(c) if rng.random() < 0.5 else c for c in (source, target))
    pairs, old, size = pairs_of(rng, case["num_blocks"], others), by_slot(target), case["block_size"]
    want = moved(by_slot(source), old, pairs, size)
    is_on_host = isinstance(target.k, np.ndarray)
    before = by_slot(source)
    new = jattn.swap_blocks(source, target, pairs)
    assert isinstance(new.k, np.ndarray) == is_on_host
    assert_same(by_slot(new), want)
    assert_same(by_slot(source), before)


# ------------------------------------------------------------------------------------------ merging
def merge(case: dict, rng: np.random.Generator) -> None:
    """Sides without keys hold anything."""
    tokens, heads, dim = rng.integers(1, 9), rng.integers(1, 4), 8
    outs, lses = rng.normal(size=(2, tokens, heads, dim)), rng.normal(size=(2, heads, tokens)) * 20
    is_empty = rng.random(lses.shape) < 0.3
    lses = np.where(is_empty, rng.choice([-np.inf, np.inf], lses.shape), lses)
    given = outs.copy()
    given[is_empty.swapaxes(1, 2) & ~is_empty.all(axis=0).T] = rng.choice([np.nan, np.inf, 3.0])
    dtype = jnp.dtype(case["dtype"])
    arrays = [jnp.asarray(x) for x in (given[0].astype(dtype), lses[0].astype(np.float32))]
    arrays += [jnp.asarray(x) for x in (given[1].astype(dtype), lses[1].astype(np.float32))]
    out, lse = (np.asarray(x, np.float64) for x in jattn.merge_attn_states(*arrays))
    for t in range(tokens):
        for h in range(heads):
            parts = [
                (lses[n, h, t], outs[n, t, h].astype(dtype).astype(np.float64))
                for n in range(2)
                if not is_empty[n, h, t]
            ]
            if not parts:
                assert np.isneginf(lse[h, t])
                np.testing.assert_array_equal(out[t, h], np.asarray(arrays[0], np.float64)[t, h])
                continue
            top = max(l for l, _ in parts)
            total = sum(np.exp(l - top) for l, _ in parts)
            want = sum(np.exp(l - top) / total * o for l, o in parts)
            np.testing.assert_allclose(lse[h, t], top + np.log(total), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(
                out[t, h],
                want,
                rtol=1e-2 if dtype.itemsize == 2 else 1e-5,
                atol=1e-5 if dtype.itemsize == 4 else 2e-2,
            )


def cascade(case: dict, rng: np.random.Generator) -> None:
    """A shared prefix, and what each request has besides."""
    size, heads, dim = case["block_size"], (4, 2), 16
    shared, num_reqs = int(rng.integers(1, 4)), int(rng.integers(1, 5))
    query_lens = np.sort(rng.integers(1, 6, num_reqs))
    seq_lens = shared * size + query_lens + rng.integers(0, 20, num_reqs)
    widths = -(-seq_lens // size)
    ids = rng.permutation(np.arange(1, 2 + shared + int(widths.sum())))
    table = np.full((num_reqs, widths.max() + 1), 10_000)
    used = shared
    for r, width in enumerate(widths):
        table[r, :shared], table[r, shared:width] = ids[:shared], ids[used : used + width - shared]
        used += width - shared
    k, v = rng.normal(size=(2, len(ids) + 2, size, 2, dim)).astype(np.float32)
    owned = np.unique(np.concatenate([row[:width] for row, width in zip(table, widths, strict=True)]))
    nobodys = np.setdiff1d(np.arange(len(k)), owned)
    k[nobodys] = v[nobodys] = np.nan
    cap = float(rng.choice([0.0, 5.0])) or None
    spec = jattn.AttentionSpec(num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=dim, soft_cap=cap)
    bucket = None
    if rng.random() < 0.5:
        decodes = int((query_lens == 1).sum())
        bucket = jattn.Bucket(
            max_decodes=decodes + 2, max_prefills=num_reqs + 1, max_prefill_tokens=int(query_lens.sum()) + 5,
            max_blocks=table.shape[1] + 1,
        )  # fmt: skip
    step = jattn.build_batch_metadata(query_lens, seq_lens, table, block_size=size, bucket=bucket)
    starts = jattn.requests.token_starts(query_lens, step.bucket)
    query = np.full((step.bucket.max_tokens, heads[0], dim), np.nan, np.float32)
    q = [rng.normal(size=(n, heads[0], dim)).astype(np.float32) for n in query_lens]
    for start, x in zip(starts, q, strict=True):
        query[start : start + len(x)] = x
    sinks = rng.normal(size=heads[0]).astype(np.float32) if rng.random() < 0.5 else None
    of = lambda x, r: x[table[r, : widths[r]]].reshape(-1, 2, dim)[: seq_lens[r]].astype(np.float64)
    told = oracle.Step(
        q=[x.astype(np.float64) for x in q],
        k=[of(k, r) for r in range(num_reqs)],
        v=[of(v, r) for r in range(num_reqs)],
        is_decode=[True] * num_reqs,
        sinks=None if sinks is None else sinks.astype(np.float64),
    )

    @jax.jit
    def run(query, cache, step, sinks):
        parts = jattn.build_cascade_metadata(step, shared * size)
        call = {"implementation": "xla", "return_lse": True}
        return jattn.cascade_attend(query, cache, parts, spec, sinks=sinks, **call)

    cache = jattn.PagedCache(k=jnp.asarray(k), v=jnp.asarray(v))
    out, lse = run(jnp.asarray(query), cache, step, None if sinks is None else jnp.asarray(sinks))
    oracle.check(spec, told, np.float32, starts, np.asarray(out, np.float64), np.asarray(lse, np.float64).T)


# -------------------------------------------------------------------------------------- decode_loop
def step(params, caches, metadata, tokens):
    """The next token follows from this one and the request's length; the cache keeps what was fed."""
    rows = jnp.broadcast_to(tokens[:, None, None].astype(jnp.float32), (*tokens.shape, 1, 8))
    cache = jattn.write_kv(caches, rows, rows, metadata.slot_mapping)
    following = (tokens * 5 + metadata.seq_lens + params) % 13
    return jax.nn.one_hot(following, 13), cache


def greedy(logits, index):
    return jnp.argmax(logits, axis=-1)


def loop(case: dict, rng: np.random.Generator) -> None:
    size, rows, columns = case["block_size"], int(rng.integers(1, 6)), int(rng.integers(1, 6))
    live = int(rng.integers(1, rows + 1))
    seq_lens = rng.integers(1, size * columns + 1, live)
    table = rng.permutation(np.arange(1, rows * columns + 1)).reshape(rows, columns)[:live]
    bucket = jattn.Bucket(max_decodes=rows, max_blocks=columns)
    metadata = jattn.build_batch_metadata([1] * live, seq_lens, table, block_size=size, bucket=bucket)
    tokens = rng.integers(0, 13, rows)
    num_steps = int(rng.integers(1, 9))
    stops = rng.integers(0, 13, rng.integers(0, 3))
    max_lens = rng.integers(1, size * columns + 4, rows) if rng.random() < 0.5 else None
    shape = jattn.CacheSpec(
        num_blocks=rows * columns + 1, block_size=size, num_kv_heads=1, head_dim=8, dtype=jnp.float32
    )
    got = jattn.decode_loop(
        step, jnp.int32(3), jattn.PagedCache.create(shape), metadata, tokens,
        num_steps=num_steps, sample=greedy, stop_ids=stops, max_lens=max_lens,
    )  # fmt: skip
    made = np.full((rows, num_steps), -1)
    slots, last, lens = np.zeros(shape.num_blocks * size), np.zeros(rows, int), np.zeros(rows, int)
    for r in range(live):
        token, length = int(tokens[r]), int(seq_lens[r])
        longest = min(columns * size + 1, 10**9 if max_lens is None else int(max_lens[r]))
        is_running, n = length < longest, 0
        while is_running and n < num_steps:
            slots[table[r, (length - 1) // size] * size + (length - 1) % size] = token
            token = (token * 5 + length + 3) % 13
            made[r, n], n, length = token, n + 1, length + 1
            is_running = token not in stops and length < longest
        last[r], lens[r] = (token, length) if is_running else (0, 0)
    np.testing.assert_array_equal(got.tokens, made)
    np.testing.assert_array_equal(got.num_tokens, (made >= 0).sum(axis=1))
    assert int(got.num_steps) == (made >= 0).any(axis=0).sum()
    np.testing.assert_array_equal(got.last_tokens, last)
    np.testing.assert_array_equal(got.metadata.seq_lens, lens)
    np.testing.assert_array_equal(by_slot(got.caches)["k"][:, 0, 0], slots)
