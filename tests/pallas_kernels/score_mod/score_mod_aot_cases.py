"""Kernels with score functions, to compile ahead of time."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

import jattn
from pallas_kernels.score_mod import KernelScoreMod, ScoreModType, TableType
from tests.pallas_kernels.varlen_prefill import prefill_aot_cases
from tests.pallas_kernels.varlen_prefill.sparse_aot_cases import abstract_metadata

Q_HEADS = 32
TABLES = (
    TableType((Q_HEADS, 33), jnp.dtype(jnp.bfloat16)),
    TableType((24, Q_HEADS), jnp.dtype(jnp.float32)),
    TableType((4096,), jnp.dtype(jnp.int32)),
    TableType((4096,), jnp.dtype(jnp.bool_)),
)


def every_lookup(score, batch, head, q_idx, kv_idx, table, gains, ids, is_special):
    """Look up by head and distance, by row and head, by query and by key."""
    score = score * gains[batch, head] + table[head, lax.clamp(0, q_idx - kv_idx + 16, 32)]
    return jnp.where(
        is_special[q_idx] & (ids[q_idx] == ids[kv_idx]), score, score - ids[kv_idx].astype(jnp.float32)
    )


def every_operation(score, batch, head, q_idx, kv_idx):
    """Use every operation that kernels evaluate, on scalars, vectors and tiles, floats and ints."""
    x, position = score, 0.0
    for index in (batch, head, q_idx, kv_idx, q_idx - kv_idx):
        y = lax.abs(index).astype(jnp.float32) * 0.01 + 1.0
        position += lax.exp(-y) + lax.exp2(-y) + lax.log(y) + lax.log1p(y) + lax.expm1(-y) + lax.logistic(y)
        position += (
            lax.sqrt(y) + lax.rsqrt(y) + lax.sin(y) * lax.cos(y) + lax.square(y) + lax.integer_pow(y, 3)
        )
        position += lax.floor(y) + lax.ceil(-y)
        position += lax.round(y) + lax.sign(y) + lax.integer_pow(y, -2) - lax.tanh(y) / y
        small = lax.clamp(0, index, 7)
        ints = (small << 2) ^ (small // 3) | (index % 5) & lax.sign(index)
        ints += (
            lax.shift_right_logical(small, 1) + lax.shift_right_arithmetic(index, 1) + lax.bitwise_not(small)
        )
        is_any = ((index > 2) | (index < 1)) & ~(index == 5) & ((index >= 0) != (index <= 9))
        position += jnp.where(is_any ^ jnp.isfinite(y), ints, lax.max(lax.neg(ints), small)).astype(
            jnp.float32
        )
        position += is_any.astype(jnp.float32) + (is_any & ints.astype(bool)).astype(jnp.int32)
    x = x * position + lax.exp(lax.min(x, 0.0)) + lax.log1p(lax.square(x)) + jax.nn.relu(x)
    x = (
        x
        + lax.logistic(x)
        - lax.tanh(x) * lax.sin(x)
        + lax.abs(x)
        + lax.sqrt(lax.square(x) + 1.0)
        + lax.sign(x)
    )
    return jnp.where(x > 30.0, 30.0, lax.stop_gradient(x) + lax.neg(x) / 3.0) + lax.integer_pow(x, 2)


SCORE_MODS = {"lookups": (every_lookup, TABLES), "operations": (every_operation, ())}


def prefill_case(name, *args, **options):
    """Return a case of prefill_aot_cases with one of SCORE_MODS."""
    function, tables = SCORE_MODS[name]
    run, (arrays,) = prefill_aot_cases.case(*args, **options)

    def run_with_score_mod(arrays, tables_in):
        return run({**arrays, "score_mod": KernelScoreMod.of(ScoreModType(function, tables), tables_in, 1)})

    return run_with_score_mod, (arrays, abstract(tables))


def abstract(tables):
    return [jax.ShapeDtypeStruct(table.shape, table.dtype) for table in tables]


def step_case(head_dim, *, group):
    """Return a step of decodes and prompts."""
    sizes = {"num_kv_heads": Q_HEADS // group, "head_dim": head_dim}
    spec = jattn.AttentionSpec(num_q_heads=Q_HEADS, **sizes)
    bucket = jattn.Bucket(max_decodes=8, max_prefills=2, max_prefill_tokens=4000, max_blocks=32)
    cache_spec = jattn.CacheSpec(num_blocks=64, block_size=16, **sizes)
    cache = jax.eval_shape(lambda: jattn.PagedCache.create(cache_spec))
    query = jax.ShapeDtypeStruct((bucket.max_tokens, Q_HEADS, head_dim), jnp.bfloat16)

    def run(query, cache, metadata, tables):
        mod = jattn.ScoreMod(every_lookup, *tables)
        with mock.patch("pallas_kernels.support.why_not_on", return_value=None):  # there is no GPU here
            return jattn.attend(query, cache, metadata, spec, score_mod=mod, implementation="mosaic_gpu")

    return run, (query, cache, abstract_metadata(bucket, 16), abstract(TABLES))


def training_case(head_dim, **options):
    """Return the gradients of queries, keys and values."""

    def loss(q, k, v, tables):
        mod = jattn.ScoreMod(every_lookup, *tables)
        with mock.patch("pallas_kernels.support.why_not_on", return_value=None):
            out = jattn.attention(q, k, v, score_mod=mod, implementation="mosaic_gpu", **options)
        return (out.astype(jnp.float32) ** 2).sum()

    shape = lambda heads: jax.ShapeDtypeStruct((2048, heads, head_dim), jnp.bfloat16)
    return jax.grad(loss, argnums=(0, 1, 2)), (shape(Q_HEADS), shape(8), shape(8), abstract(TABLES))


@functools.cache
def aot_cases():
    """Return (function, abstract arguments) by the name of the case."""
    bfloat16, few = jnp.dtype(jnp.bfloat16), prefill_aot_cases.FEW
    return {
        "prefill of packed heads": prefill_case(
            "lookups", 64, "NHD", 16, bfloat16, sizes=few, soft_cap=30.0, has_alibi=True
        ),
        "operations": prefill_case("operations", 64, "packed", None, bfloat16, window=(100, 0)),
        "step of groups of 4": step_case(128, group=4),
        "step of one kv head": step_case(64, group=Q_HEADS),
        "training": training_case(128, causal=True, soft_cap=30.0),
        "deterministic training": training_case(64, causal=True, deterministic=True),
    }
