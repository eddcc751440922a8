"""A step's arrays, made so that errors show: needles in what is seen, poison in the rest.

All queries of a kv head have one direction in common, and in every 64 keys of a request there is a needle: a
key of that direction, with a large value. A tile that is lost, seen twice or by whom it should not be changes
some output by far more than rounding does. What no query sees is NaN, or scores high with a huge value.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jattn
from tests import oracle

NEEDLE_EVERY = 64  # keys of a request
NEEDLE_SCORE = 4.5  # beside others of about 0: as much weight as 64 of them together
NEEDLE_VALUE = 4.0  # times as large as others
UNSEEN_SCORE = 20.0
UNSEEN_VALUE = 3000.0
NO_BLOCK = 10_000  # an id that no pool has
# Keys and values of caches where the two differ.
STORED = {"int8_static_v": ("int8_token_head", "int8_channel"), "int8_k_only": ("int8_token_head", "plain")}


@dataclasses.dataclass(kw_only=True)
class Setting:
    """What a problem is made of.

    Attributes:
        spec: The layer.
        query_lens: New tokens of each request.
        seq_lens: Its keys.
        decode_query_len: Tokens of a decode row.
        bucket: What the step is padded to; None = nothing.
        block_size: Tokens of a cache block.
        dtype: Of queries.
        cache_dtype: Of what is stored as it is; None = dtype.
        stored: "plain", or a kind and its scale: "int8_token_head", "fp8_scalar", ...; or one of STORED.
        kv: A cache's layout, or "no_cache".
        has_sinks: Whether heads have sinks.
        has_alibi: Whether heads have slopes.
        visible: What of (request, head, i, j) a query sees besides what the spec says.
        seen: Or all that it sees, the spec included: of each request bool [q_heads, query_len, seq_len].
        is_cross: Whether keys are another sequence's, which need not cover the queries.
        shared_blocks: Blocks at the start of every request that all of them share.
        frees_blocks: Whether block table entries of blocks that no query sees are garbage.
        seed: Of all that is drawn.
    """

    spec: jattn.AttentionSpec
    query_lens: list[int]
    seq_lens: list[int]
    decode_query_len: int = 1
    bucket: jattn.Bucket | None = None
    block_size: int = 16
    dtype: str = "float32"
    cache_dtype: str | None = None
    stored: str = "plain"
    kv: str = "NHD"
    has_sinks: bool = False
    has_alibi: bool = False
    visible: Callable[[int, int, int, int], bool] | None = None
    seen: list[np.ndarray] | None = None
    is_cross: bool = False
    shared_blocks: int = 0
    frees_blocks: bool = False
    seed: int = 0


class AttentionProblem:
    """A setting's arrays: for jattn, and in the oracle's terms.

    Attributes:
        metadata: The step's.
        starts: Where the first token of each request stands.
        query: Padding is NaN.
        kv: The cache, or keys outside of one.
        sinks: Of each head, or None.
        slopes: Of each head, or None; the last head of each kv head looks far.
        step: The same for the oracle.
    """

    def __init__(self, setting: Setting):
        self.setting, self.spec, self.dtype = setting, setting.spec, jnp.dtype(setting.dtype)
        self.query_lens, self.seq_lens = setting.query_lens, setting.seq_lens
        self.rng = np.random.default_rng(setting.seed)
        table = self._block_table()
        size = setting.block_size
        self.slots = [
            (row[:, None] * size + np.arange(size)).reshape(-1)[:n]
            for row, n in zip(table, self.seq_lens, strict=True)
        ]
        q = self._draw_queries()
        self._draw_heads_numbers()
        self.step = self._step_without_keys(q)
        seen = oracle.reachable(self.spec, self.step)
        self._draw_cache(seen)
        self._build_metadata(self._freed(table, seen) if setting.frees_blocks else table)
        self.query = np.full((self.metadata.bucket.max_tokens, *q[0].shape[1:]), np.nan, self.dtype)
        for start, x in zip(self.starts, q, strict=True):
            self.query[start : start + len(x)] = x

    def row_of_request(self):
        """The metadata's row of each request."""
        return jattn.batch.requests.row_indices(np.asarray(self.query_lens), self.metadata.bucket)

    def check(self, out, lse):
        """Compares with the oracle; padding must be zeros and -inf."""
        out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64).T
        oracle.check(self.spec, self.step, self.dtype, self.starts, out, lse)

    def check_output(self, out):
        """The same without an LSE."""
        out = np.asarray(out, np.float64)
        oracle.check(self.spec, self.step, self.dtype, self.starts, out, None)

    # ------------------------------------------------------------------------------------ what is drawn
    def _block_table(self) -> np.ndarray:
        needed = [-(-n // self.setting.block_size) for n in self.seq_lens]
        self.num_blocks = sum(needed) + 3
        order = self.rng.permutation(np.arange(1, self.num_blocks))
        table = np.full((len(needed), max(needed, default=0) + 2), NO_BLOCK, np.int64)
        shared, order = order[: self.setting.shared_blocks], order[self.setting.shared_blocks :]
        for r, n in enumerate(needed):
            own = n - len(shared)
            table[r, :n], order = [*shared, *order[:own]], order[own:]
        return table

    def _draw_queries(self) -> list[np.ndarray]:
        spec, dim = self.spec, self.spec.head_dim
        self.directions = self.rng.choice([-1.0, 1.0], (spec.num_kv_heads, dim)) * dim**-0.5
        score, cap = NEEDLE_SCORE, spec.soft_cap
        if cap is not None:
            score = cap * np.arctanh(min(NEEDLE_SCORE / cap, 0.9))
        self.length = (
            score / spec.softmax_scale
        ) ** 0.5  # of queries and needles: their product is the score
        q = self.rng.normal(size=(sum(self.query_lens), spec.num_q_heads, dim))
        for h in range(spec.num_q_heads):
            q[:, h] = along(q[:, h], self.directions[h // spec.q_heads_per_kv_head], self.length)
        q = without_ties(q.astype(self.dtype), spec.query_quantization)
        return np.split(q, np.cumsum(self.query_lens)[:-1])

    def _draw_heads_numbers(self) -> None:
        heads, group = self.spec.num_q_heads, self.spec.q_heads_per_kv_head
        per_head = lambda low, high: self.rng.uniform(low, high, heads).astype(np.float32)
        self.sinks = per_head(-1, 3) if self.setting.has_sinks else None
        self.slopes = None
        if self.setting.has_alibi:
            is_mild = np.arange(heads) % group == group - 1
            self.slopes = np.where(is_mild, per_head(0.001, 0.005), per_head(0.02, 0.5))

    def _step_without_keys(self, q: list[np.ndarray]) -> oracle.Step:
        nothing = [np.zeros((n, self.spec.num_kv_heads, self.spec.head_dim)) for n in self.seq_lens]
        decodes = jattn.batch.requests.count_decodes(
            np.asarray(self.query_lens), self.setting.decode_query_len
        )
        in_float64 = lambda x: None if x is None else x.astype(np.float64)
        return oracle.Step(
            q=[as_seen(x, self.spec.query_quantization) for x in q],
            k=nothing,
            v=nothing,
            is_decode=[r < decodes for r in range(len(self.query_lens))],
            sinks=in_float64(self.sinks),
            alibi_slopes=in_float64(self.slopes),
            mask=self.setting.visible,
            seen=self.setting.seen,
        )

    def _draw_cache(self, seen: list[np.ndarray]) -> None:
        shape = self.num_blocks * self.setting.block_size, self.spec.num_kv_heads
        live, values = np.zeros(shape, bool), self.rng.normal(size=(2, *shape, self.spec.head_dim))
        is_needle = np.zeros(shape, bool)
        for slots, hit, met in zip(self.slots, seen, self._met(seen), strict=True):
            live[slots] |= met
            for g in range(self.spec.num_kv_heads):
                is_needle[slots[needle_places(hit[:, g], self.rng)], g] = True
        for g, direction in enumerate(self.directions):
            values[0, :, g] = along(values[0, :, g], direction, np.where(is_needle[:, g], self.length, 0.0))
        values[1][is_needle] *= NEEDLE_VALUE
        unseen = UNSEEN_SCORE / self.spec.softmax_scale / self.length * self.directions, UNSEEN_VALUE
        is_huge = ~live & (self.rng.random(live.shape) < 0.25)
        held, means, cache_dtype = [], [], jnp.dtype(self.setting.cache_dtype or self.dtype)
        kinds = STORED.get(self.setting.stored, (self.setting.stored,) * 2)
        for x, how, huge in zip(values, kinds, unseen, strict=True):
            array, scale, meant = stored_and_scale(x, how, cache_dtype, self.rng)
            if np.shape(scale) == live.shape:
                scale = np.where(live, scale, np.where(is_huge, 1.0, np.nan))
            held.append((poisoned(array, live, is_huge, np.broadcast_to(huge, x.shape)), scale))
            means.append([meant[slots] for slots in self.slots])
        self.step.k, self.step.v = means
        self._held = held

    def _met(self, seen: list[np.ndarray]) -> list[np.ndarray]:
        """What must hold numbers of each request and kv head: what some query sees, and no more."""
        return seen

    def _freed(self, table: np.ndarray, seen: list[np.ndarray]) -> np.ndarray:
        """The table with garbage for blocks of context that no query of the request sees."""
        table, size = table.copy(), self.setting.block_size
        for r, (hit, n) in enumerate(zip(seen, self.seq_lens, strict=True)):
            for column in range((n - self.query_lens[r]) // size):
                if not hit[column * size : (column + 1) * size].any():
                    table[r, column] = NO_BLOCK
        return table

    # ------------------------------------------------------------------------------------ for jattn
    def _build_metadata(self, table: np.ndarray) -> None:
        how = {"block_size": self.setting.block_size, "decode_query_len": self.setting.decode_query_len}
        is_cross = self.setting.is_cross
        build = jattn.build_cross_attention_metadata if is_cross else jattn.build_batch_metadata
        self.metadata = build(self.query_lens, self.seq_lens, table, bucket=self.setting.bucket, **how)
        self.starts = jattn.batch.requests.request_token_starts(
            np.asarray(self.query_lens), self.metadata.bucket
        )

    @functools.cached_property
    def kv(self) -> jattn.PagedCache | jattn.PackedKV:
        with jax.ensure_compile_time_eval():  # asked for inside jit, too
            return self._made_kv()

    def _made_kv(self) -> jattn.PagedCache | jattn.PackedKV:
        (k, k_scale), (v, v_scale) = self._held
        if self.setting.kv == "no_cache":
            return self._packed_kv(k, v)
        size, layout, scales = self.setting.block_size, self.setting.kv, {}
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if np.shape(scale) == k.shape[:2]:
                scale = scale.reshape(-1, size, k.shape[1])
            scales[name] = None if scale is None else jnp.asarray(scale, jnp.float32)
        k, v = (
            jnp.asarray(in_layout(x, size, layout, is_key=is_key)) for x, is_key in ((k, True), (v, False))
        )
        return jattn.PagedCache(k=k, v=v, layout=layout, **scales)

    def _packed_kv(self, k: np.ndarray, v: np.ndarray) -> jattn.PackedKV:
        flat = np.concatenate([*self.slots, np.zeros(5, np.int64)])  # nobody's slot 0
        starts = np.zeros(self.metadata.bucket.max_reqs, np.int32)
        starts[self.row_of_request()] = np.cumsum(self.seq_lens) - self.seq_lens
        return jattn.PackedKV(
            k=jnp.asarray(k[flat]), v=jnp.asarray(v[flat]), kv_start_loc=jnp.asarray(starts)
        )


def in_layout(x: np.ndarray, block_size: int, layout: str, *, is_key: bool) -> np.ndarray:
    """What a cache holds of each slot [slots, kv_heads, head_dim], in its layout."""
    x = x.reshape(-1, block_size, *x.shape[1:])
    if layout == "HND":
        return x.swapaxes(1, 2)
    if layout == "packed" and is_key:
        width = 16 // x.dtype.itemsize
        return x.reshape(*x.shape[:3], -1, width).transpose(0, 2, 3, 1, 4)
    return x.transpose(0, 2, 3, 1) if layout == "packed" else x


# ---------------------------------------------------------------------------------------- values
def along(x: np.ndarray, direction: np.ndarray, length: float | np.ndarray) -> np.ndarray:
    """x [..., head_dim] with its part along a unit vector made so long."""
    return x + (length - x @ direction)[..., None] * direction


def needle_places(seen: np.ndarray, rng: np.random.Generator, every: int = NEEDLE_EVERY) -> np.ndarray:
    """Of the keys of a request and kv head that some query sees: the first, the last, and one in `every`."""
    places = np.flatnonzero(seen)
    tiles = np.split(places, np.flatnonzero(np.diff(places // every)) + 1)
    drawn = [rng.choice(tile) for tile in tiles if tile.size]
    return np.unique([*drawn, *places[:1], *places[-1:]]).astype(int)


def stored_and_scale(values: np.ndarray, stored: str, dtype, rng: np.random.Generator):
    """What the cache holds for values [slots, kv_heads, head_dim], its scale, and what they mean."""
    slots, heads, dim = values.shape
    kind, _, how = stored.partition("_")
    if stored == "plain":
        held = values.astype(dtype)
        return held, None, held.astype(np.float64)
    shapes = {"scalar": (1, 1, 1), "head": (1, heads, 1), "channel": (1, heads, dim)}
    shape = shapes.get(how, (slots, heads, 1))
    if kind == "int8":  # hardly anything is out of range
        of_one = {"scalar": (0, 1, 2), "head": (0, 2), "channel": 0, "token_head": 2}[how]
        largest = np.abs(values).max(axis=of_one, keepdims=True)
        scale = (largest / 127 * rng.uniform(0.95, 1.5, shape)).astype(np.float32)
        held = np.clip(np.round(values / scale), -128, 127).astype(np.int8)
    else:
        between = (0.37, 0.37) if how == "scalar" else (0.05, 0.5)
        scale = rng.uniform(*between, shape).astype(np.float32)
        kinds = {"plain": dtype, "fp8e5": jnp.float8_e5m2, "fp8": jnp.float8_e4m3fn}
        held = (values / scale).astype(kinds[kind])
    flat = {"scalar": (), "head": (heads,), "channel": (heads, dim)}.get(how, (slots, heads))
    return held, scale.reshape(flat), held.astype(np.float64) * scale


LARGEST = {"int8": 127, "fp8_e4m3": 448}


def rounded_to(scaled: np.ndarray, quantization: str) -> np.ndarray:
    """To the nearest integer or fp8."""
    held = np.round(scaled) if quantization == "int8" else scaled.astype(np.float32).astype(jnp.float8_e4m3fn)
    return held.astype(np.float64)


def as_seen(q: np.ndarray, quantization: str | None) -> np.ndarray:
    """What keys meet of queries that are rounded per token and head."""
    if quantization is None:
        return q.astype(np.float64)
    exact, largest = q.astype(np.float64), LARGEST[quantization]
    amax = np.maximum(np.abs(exact).max(-1, keepdims=True), 1e-6 * largest)
    return rounded_to(exact * largest / amax, quantization) * amax / largest  # a tie stays one


def without_ties(q: np.ndarray, quantization: str | None) -> np.ndarray:
    """Queries of which none lies halfway between two numbers: either of these would be right."""
    for _ in range(0 if quantization is None else 8):
        exact = q.astype(np.float64)
        scaled = exact / np.abs(exact).max(-1, keepdims=True) * LARGEST[quantization]
        down, up = (rounded_to(scaled * (1 + shift), quantization) for shift in (-1e-5, 1e-5))
        q = np.where(up != down, q * np.asarray(0.98, q.dtype), q)
    return q


def poisoned(held: np.ndarray, live: np.ndarray, is_huge: np.ndarray, huge: np.ndarray) -> np.ndarray:
    """What a cache holds [slots, kv_heads, head_dim] where some query sees it; else NaN, in places `huge`."""
    if held.dtype == np.int8:
        return np.where(live[..., None], held, np.where(huge > 0, 127, -127).astype(np.int8))
    largest = float(ml_dtypes.finfo(held.dtype).max)
    rest = np.where(is_huge[..., None], np.clip(huge, -largest, largest), np.nan).astype(held.dtype)
    return np.where(live[..., None], held, rest)
