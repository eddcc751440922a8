"""The arrays of a step, filled so that errors show: needles in visible keys, poison in all others.

All queries of a KV head share one direction, and every 64 keys of a request contain a needle: a key along
that direction with a large value. If a kernel loses a tile, reads it twice or shows it to the wrong query,
some output changes by far more than rounding error. Keys that no query attends to are NaN, or have a high
score and a huge value.
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
NEEDLE_SCORE = 4.5  # other scores are about 0, so a needle has the weight of about 64 other keys
NEEDLE_VALUE = 4.0  # factor by which values of needles exceed other values
UNSEEN_SCORE = 20.0
UNSEEN_VALUE = 3000.0
NO_BLOCK = 10_000  # out of range of every pool
PACKED_KV = ("no_cache", "aligned")  # aligned: keys start at multiples of 8, as prefill needs
# Formats of keys and values of caches in which the two differ.
STORED = {"int8_static_v": ("int8_token_head", "int8_channel"), "int8_k_only": ("int8_token_head", "plain")}


@dataclasses.dataclass(kw_only=True)
class Setting:
    """Parameters of a problem.

    Attributes:
        spec: Specification of the layer.
        query_lens: Number of new tokens of each request.
        seq_lens: Number of keys of each request.
        decode_query_len: Number of tokens of a decode row.
        bucket: Bucket to which the step is padded; None means no padding.
        block_size: Tokens per cache block.
        dtype: Dtype of the queries.
        cache_dtype: Dtype of unquantized keys and values; None means `dtype`.
        stored: "plain", or an 8-bit kind and its scale ("int8_token_head", "fp8_scalar", ...), or a key of
            STORED.
        kv: Layout of the cache, or one of PACKED_KV.
        has_sinks: Whether heads have sinks.
        has_alibi: Whether heads have ALiBi slopes.
        visible: Predicate over (request, head, i, j) that is applied in addition to the spec.
        seen: Visibility that replaces spec and predicate: for each request bool [q_heads, query_len,
            seq_len].
        score_mod: Score function of the oracle over (scores, request, head, i, j).
        is_cross: Whether keys belong to another sequence, which need not cover the queries.
        shared_blocks: Number of leading blocks that all requests share.
        frees_blocks: Whether the block table has garbage in place of blocks that no query attends to.
        seed: Seed of all random numbers.
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
    score_mod: Callable[..., np.ndarray] | None = None
    is_cross: bool = False
    shared_blocks: int = 0
    frees_blocks: bool = False
    seed: int = 0


class AttentionProblem:
    """The arrays of a setting, for jattn and for the oracle.

    Attributes:
        metadata: Metadata of the step.
        starts: Index of the first token of each request.
        query: Queries; padding is NaN.
        kv: The cache, or packed keys and values.
        sinks: Sink of each head, or None.
        slopes: ALiBi slope of each head, or None; the last head of each group has a small slope.
        step: The same step for the oracle.
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
        self._draw_sinks_and_slopes()
        self.step = self._step_without_keys(q)
        seen = oracle.reachable(self.spec, self.step)
        self._draw_cache(seen)
        self._build_metadata(self._freed(table, seen) if setting.frees_blocks else table)
        self.query = np.full((self.metadata.bucket.max_tokens, *q[0].shape[1:]), np.nan, self.dtype)
        for start, x in zip(self.starts, q, strict=True):
            self.query[start : start + len(x)] = x

    def row_of_request(self):
        """Return the row of each request in the metadata."""
        return jattn.batch.bucket.row_indices(np.asarray(self.query_lens), self.metadata.bucket)

    def check(self, out, lse):
        """Assert that outputs and LSEs equal the oracle's and that padding is zeros and -inf."""
        out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64).T
        oracle.check(self.spec, self.step, self.dtype, self.starts, out, lse)

    def check_output(self, out):
        """Assert the same of outputs alone."""
        out = np.asarray(out, np.float64)
        oracle.check(self.spec, self.step, self.dtype, self.starts, out, None)

    # ------------------------------------------------------------------------------------ random arrays
    def _block_table(self) -> np.ndarray:
        num_blocks = [-(-n // self.setting.block_size) for n in self.seq_lens]
        self.num_blocks = sum(num_blocks) + 3
        order = self.rng.permutation(np.arange(1, self.num_blocks))
        table = np.full((len(num_blocks), max(num_blocks, default=0) + 2), NO_BLOCK, np.int64)
        shared, order = order[: self.setting.shared_blocks], order[self.setting.shared_blocks :]
        for r, n in enumerate(num_blocks):
            num_private = n - len(shared)
            table[r, :n], order = [*shared, *order[:num_private]], order[num_private:]
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

    def _draw_sinks_and_slopes(self) -> None:
        heads, group = self.spec.num_q_heads, self.spec.q_heads_per_kv_head
        per_head = lambda low, high: self.rng.uniform(low, high, heads).astype(np.float32)
        self.sinks = per_head(-1, 3) if self.setting.has_sinks else None
        self.slopes = None
        if self.setting.has_alibi:
            is_mild = np.arange(heads) % group == group - 1
            self.slopes = np.where(is_mild, per_head(0.001, 0.005), per_head(0.02, 0.5))

    def _step_without_keys(self, q: list[np.ndarray]) -> oracle.Step:
        nothing = [np.zeros((n, self.spec.num_kv_heads, self.spec.head_dim)) for n in self.seq_lens]
        decodes = jattn.batch.bucket.count_decodes(np.asarray(self.query_lens), self.setting.decode_query_len)
        in_float64 = lambda x: None if x is None else x.astype(np.float64)
        return oracle.Step(
            q=[quantize_queries(x, self.spec.query_quantization) for x in q],
            k=nothing,
            v=nothing,
            is_decode=[r < decodes for r in range(len(self.query_lens))],
            sinks=in_float64(self.sinks),
            alibi_slopes=in_float64(self.slopes),
            mask=self.setting.visible,
            seen=self.setting.seen,
            score_mod=self.setting.score_mod,
        )

    def _draw_cache(self, seen: list[np.ndarray]) -> None:
        shape = self.num_blocks * self.setting.block_size, self.spec.num_kv_heads
        live, values = np.zeros(shape, bool), self.rng.normal(size=(2, *shape, self.spec.head_dim))
        is_needle = np.zeros(shape, bool)
        for slots, visible, finite in zip(self.slots, seen, self._finite_keys(seen), strict=True):
            live[slots] |= finite
            for g in range(self.spec.num_kv_heads):
                is_needle[slots[needle_positions(visible[:, g], self.rng)], g] = True
        for g, direction in enumerate(self.directions):
            values[0, :, g] = along(values[0, :, g], direction, np.where(is_needle[:, g], self.length, 0.0))
        values[1][is_needle] *= NEEDLE_VALUE
        unseen = UNSEEN_SCORE / self.spec.softmax_scale / self.length * self.directions, UNSEEN_VALUE
        is_huge = ~live & (self.rng.random(live.shape) < 0.25)
        stored, dequantized_values, cache_dtype = [], [], jnp.dtype(self.setting.cache_dtype or self.dtype)
        kinds = STORED.get(self.setting.stored, (self.setting.stored,) * 2)
        for x, kind, poison_value in zip(values, kinds, unseen, strict=True):
            array, scale, dequantized = quantize_for_cache(x, kind, cache_dtype, self.rng)
            if np.shape(scale) == live.shape:
                scale = np.where(live, scale, np.where(is_huge, 1.0, np.nan))
            stored.append((poisoned(array, live, is_huge, np.broadcast_to(poison_value, x.shape)), scale))
            dequantized_values.append([dequantized[slots] for slots in self.slots])
        self.step.k, self.step.v = dequantized_values
        self._stored = stored

    def _finite_keys(self, seen: list[np.ndarray]) -> list[np.ndarray]:
        """Return the keys of each request and KV head that must be finite: those that some query sees."""
        return seen

    def _freed(self, table: np.ndarray, seen: list[np.ndarray]) -> np.ndarray:
        """Return the block table with garbage for context blocks that no query of the request attends to."""
        table, size = table.copy(), self.setting.block_size
        for r, (visible, n) in enumerate(zip(seen, self.seq_lens, strict=True)):
            for column in range((n - self.query_lens[r]) // size):
                if not visible[column * size : (column + 1) * size].any():
                    table[r, column] = NO_BLOCK
        return table

    # ------------------------------------------------------------------------------------ for jattn
    def _build_metadata(self, table: np.ndarray) -> None:
        sizes = {"block_size": self.setting.block_size, "decode_query_len": self.setting.decode_query_len}
        is_cross = self.setting.is_cross
        build = jattn.build_cross_attention_metadata if is_cross else jattn.build_batch_metadata
        self.metadata = build(self.query_lens, self.seq_lens, table, bucket=self.setting.bucket, **sizes)
        places = jattn.batch.bucket.place_requests(np.asarray(self.query_lens), self.metadata.bucket)
        self.starts = places.first_tokens

    @functools.cached_property
    def kv(self) -> jattn.PagedCache | jattn.PackedKV:
        with jax.ensure_compile_time_eval():  # may be evaluated inside jit
            return self._build_kv()

    def _build_kv(self) -> jattn.PagedCache | jattn.PackedKV:
        (k, k_scale), (v, v_scale) = self._stored
        if self.setting.kv in PACKED_KV:
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
        is_aligned = self.setting.kv == "aligned"
        room = [n + -n % 8 if is_aligned else n for n in self.seq_lens]
        # Slot 0 has no key: neither those between requests nor the last five belong to one.
        slots = [np.pad(x, (0, n - len(x))) for x, n in zip(self.slots, room, strict=True)]
        flat = np.concatenate([*slots, np.zeros(5, np.int64)])
        starts = np.zeros(self.metadata.bucket.max_reqs, np.int32)
        starts[self.row_of_request()] = np.cumsum(room) - room
        k, v, starts = (jnp.asarray(x) for x in (k[flat], v[flat], starts))
        return jattn.PackedKV(k=k, v=v, kv_start_loc=starts, is_aligned=is_aligned)


def in_layout(x: np.ndarray, block_size: int, layout: str, *, is_key: bool) -> np.ndarray:
    """Return an array [slots, kv_heads, head_dim] in a cache layout."""
    x = x.reshape(-1, block_size, *x.shape[1:])
    if layout == "HND":
        return x.swapaxes(1, 2)
    if layout == "packed" and is_key:
        width = 16 // x.dtype.itemsize
        return x.reshape(*x.shape[:3], -1, width).transpose(0, 2, 3, 1, 4)
    return x.transpose(0, 2, 3, 1) if layout == "packed" else x


# ---------------------------------------------------------------------------------------- values
def along(x: np.ndarray, direction: np.ndarray, length: float | np.ndarray) -> np.ndarray:
    """Return x [..., head_dim] with its component along a unit vector replaced by `length`."""
    return x + (length - x @ direction)[..., None] * direction


def needle_positions(seen: np.ndarray, rng: np.random.Generator, every: int = NEEDLE_EVERY) -> np.ndarray:
    """Return the positions of needles among visible keys: the first, the last and one in `every` keys."""
    positions = np.flatnonzero(seen)
    tiles = np.split(positions, np.flatnonzero(np.diff(positions // every)) + 1)
    drawn = [rng.choice(tile) for tile in tiles if tile.size]
    return np.unique([*drawn, *positions[:1], *positions[-1:]]).astype(int)


def quantize_for_cache(values: np.ndarray, stored: str, dtype, rng: np.random.Generator):
    """Return the stored array of values [slots, kv_heads, head_dim], its scale and dequantized values."""
    slots, heads, dim = values.shape
    kind, _, granularity = stored.partition("_")
    if stored == "plain":
        array = values.astype(dtype)
        return array, None, array.astype(np.float64)
    shapes = {"scalar": (1, 1, 1), "head": (1, heads, 1), "channel": (1, heads, dim)}
    shape = shapes.get(granularity, (slots, heads, 1))
    if kind == "int8":  # few values are out of range
        reduced_axes = {"scalar": (0, 1, 2), "head": (0, 2), "channel": 0, "token_head": 2}[granularity]
        largest = np.abs(values).max(axis=reduced_axes, keepdims=True)
        scale = (largest / 127 * rng.uniform(0.95, 1.5, shape)).astype(np.float32)
        array = np.clip(np.round(values / scale), -128, 127).astype(np.int8)
    else:
        scale_range = (0.37, 0.37) if granularity == "scalar" else (0.05, 0.5)
        scale = rng.uniform(*scale_range, shape).astype(np.float32)
        kinds = {"plain": dtype, "fp8e5": jnp.float8_e5m2, "fp8": jnp.float8_e4m3fn}
        array = (values / scale).astype(kinds[kind])
    flat = {"scalar": (), "head": (heads,), "channel": (heads, dim)}.get(granularity, (slots, heads))
    return array, scale.reshape(flat), array.astype(np.float64) * scale


LARGEST = {"int8": 127, "fp8_e4m3": 448}


def round_to_8_bits(scaled: np.ndarray, quantization: str) -> np.ndarray:
    """Round to the nearest integer or fp8 number."""
    rounded = (
        np.round(scaled) if quantization == "int8" else scaled.astype(np.float32).astype(jnp.float8_e4m3fn)
    )
    return rounded.astype(np.float64)


def quantize_queries(q: np.ndarray, quantization: str | None) -> np.ndarray:
    """Return queries as they are after quantization per token and head."""
    if quantization is None:
        return q.astype(np.float64)
    exact, largest = q.astype(np.float64), LARGEST[quantization]
    amax = np.maximum(np.abs(exact).max(-1, keepdims=True), 1e-6 * largest)
    return round_to_8_bits(exact * largest / amax, quantization) * amax / largest  # a tie stays one


def without_ties(q: np.ndarray, quantization: str | None) -> np.ndarray:
    """Shrink queries that lie halfway between two 8-bit numbers, since both roundings would be correct."""
    for _ in range(0 if quantization is None else 8):
        exact = q.astype(np.float64)
        scaled = exact / np.abs(exact).max(-1, keepdims=True) * LARGEST[quantization]
        lower, upper = (round_to_8_bits(scaled * (1 + shift), quantization) for shift in (-1e-5, 1e-5))
        q = np.where(upper != lower, q * np.asarray(0.98, q.dtype), q)
    return q


def poisoned(array: np.ndarray, live: np.ndarray, is_huge: np.ndarray, huge: np.ndarray) -> np.ndarray:
    """Return stored values where a query sees them; elsewhere NaN, or `huge` where `is_huge` is set."""
    if array.dtype == np.int8:
        return np.where(live[..., None], array, np.where(huge > 0, 127, -127).astype(np.int8))
    largest = float(ml_dtypes.finfo(array.dtype).max)
    poison = np.where(is_huge[..., None], np.clip(huge, -largest, largest), np.nan).astype(array.dtype)
    return np.where(live[..., None], array, poison)
