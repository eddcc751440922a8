"""Score functions equal a dense definition in float64, with gradients of their arrays."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn


@pytest.fixture(autouse=True)
def standard_promotion():
    """Score functions combine scores with ints, as in FlexAttention."""
    with jax.numpy_dtype_promotion("standard"):
        yield


RNG = np.random.default_rng(0)
BATCH, TOKENS, Q_HEADS, KV_HEADS, HEAD_DIM = 2, 37, 4, 2, 16


def relative_bias(score, batch, head, q_idx, kv_idx, table):
    return score + table[head, jnp.clip(q_idx - kv_idx + 16, 0, 32)]


def gained(score, batch, head, q_idx, kv_idx, gains, ids):
    return score * gains[batch, head] + 0.01 * ids[kv_idx]


def log_distance(score, batch, head, q_idx, kv_idx, slope):
    """Is NaN for later keys, which a causal mask hides."""
    return score - slope[head] * jnp.log(1.0 + q_idx - kv_idx)


def soft_cap(score, batch, head, q_idx, kv_idx):
    return 5.0 * jnp.tanh(score / 5.0)


def alibi(score, batch, head, q_idx, kv_idx, slopes):
    return score + slopes[head] * (kv_idx - q_idx)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


MODS = {
    "relative": (relative_bias, (normal(Q_HEADS, 33),)),
    "gains": (gained, (normal(BATCH, Q_HEADS), jnp.arange(64, dtype=jnp.int32))),
    "log": (log_distance, (normal(Q_HEADS),)),
    "function": (soft_cap, ()),
}
QUERY, KEY, VALUE = (normal(BATCH, TOKENS, heads, HEAD_DIM) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))


def dense(function, arrays, q, k, v, causal, window):
    """Compute attention with a score function from its definition."""
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None, :]
    visible = (j <= i if causal else j >= 0) & (i - j <= window)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * HEAD_DIM**-0.5
    indices = [jnp.arange(n, dtype=jnp.int32) for n in scores.shape]
    safe = jnp.where(visible, j, 0)  # visible to all queries of the cases below whose function needs it

    def one(score, b, h, qi, ki):
        return function(score, b, h, qi, safe[qi, ki], *arrays)

    for mapped in ((0, 4), (0, 3), (0, 2), (0, 1)):  # the score and one index at a time
        one = jax.vmap(one, in_axes=[0 if i in mapped else None for i in range(5)])
    scores = jnp.where(visible, one(scores, *indices), -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(
    ("name", "causal", "window"),
    [("relative", False, 99), ("gains", True, 99), ("log", True, 99), ("function", True, 8)],
)
def test_attention_and_its_gradients_equal_the_definition(name, causal, window, implementation):
    function, arrays = MODS[name]
    floats = [array for array in arrays if array.dtype == jnp.float32]
    weights = normal(*QUERY.shape)

    def with_floats(floats):
        new = iter(floats)
        return [next(new) if array.dtype == jnp.float32 else array for array in arrays]

    def loss(q, k, v, floats):
        mod = jattn.ScoreMod(function, *with_floats(floats)) if arrays else function
        options = {"window": None if window == 99 else (window, None), "implementation": implementation}
        out = jattn.attention(q, k, v, causal=causal, score_mod=mod, **options)
        return (out * weights).sum(), out

    def expected_loss(q, k, v, floats):
        out = dense(
            function,
            [x.astype(jnp.float64) if x.dtype == jnp.float32 else x for x in with_floats(floats)],
            q,
            k,
            v,
            causal,
            window,
        )
        return (out * weights).sum(), out

    grads, out = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(QUERY, KEY, VALUE, floats)
    with jax.enable_x64(True):
        args = jax.tree.map(lambda x: x.astype(jnp.float64), (QUERY, KEY, VALUE, floats))
        expected_grads, expected = jax.jit(jax.grad(expected_loss, argnums=(0, 1, 2, 3), has_aux=True))(*args)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    for grad, expected_grad in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(grad, expected_grad, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_built_ins_written_as_score_functions_are_equal(implementation):
    slopes = jnp.asarray([-0.5, -0.25, 0.125, 0.0625])
    options = {"causal": True, "implementation": implementation}
    for built_in, mod in (
        ({"soft_cap": 5.0}, soft_cap),
        ({"alibi_slopes": slopes}, jattn.ScoreMod(alibi, slopes)),
    ):
        expected = jattn.attention(QUERY, KEY, VALUE, **built_in, **options)
        np.testing.assert_allclose(
            jattn.attention(QUERY, KEY, VALUE, score_mod=mod, **options), expected, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_paged_steps_get_the_positions_and_rows_of_the_step(implementation):
    """A decode row and a prompt chunk equal the rows of dense attention."""
    function, (gains, ids) = MODS["gains"]
    mod, lens = jattn.ScoreMod(function, gains, ids), (TOKENS, TOKENS - 5)
    expected = jattn.attention(QUERY, KEY, VALUE, causal=True, score_mod=mod, implementation="reference")
    spec = jattn.AttentionSpec(num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    cache_spec = jattn.CacheSpec(
        num_blocks=12, block_size=8, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=jnp.float32
    )
    cache, tables = jattn.PagedCache.create(cache_spec), [[1, 3, 5, 7, 9], [2, 4, 6, 8, 10]]
    everything = jattn.build_batch_metadata(list(lens), list(lens), tables, block_size=8)
    k, v = (jnp.concatenate([x[b, :n] for b, n in enumerate(lens)]) for x in (KEY, VALUE))
    cache = jattn.write_kv(cache, k, v, everything.slot_mapping)
    bucket = jattn.Bucket(max_decodes=1, max_prefills=1, max_prefill_tokens=8, max_blocks=5)
    metadata = jattn.build_batch_metadata([1, 6], list(lens), tables, block_size=8, bucket=bucket)
    query = jnp.concatenate([QUERY[0, lens[0] - 1 : lens[0]], QUERY[1, lens[1] - 6 : lens[1]], QUERY[0, :2]])
    options = {"implementation": implementation}
    plan = jattn.plan(metadata, spec, cache_spec, score_mod=mod, query_dtype=jnp.float32, **options)
    for step_plan in (None, plan):
        out = jattn.attend(query, cache, metadata, spec, step_plan, score_mod=mod, **options)
        np.testing.assert_allclose(out[:1], expected[0, lens[0] - 1 : lens[0]], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(out[1:7], expected[1, lens[1] - 6 : lens[1]], rtol=1e-5, atol=1e-6)


def test_plan_without_the_score_function_is_an_error():
    spec = jattn.AttentionSpec(num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    metadata = jattn.build_batch_metadata([3], [3], None)
    kv = jattn.PackedKV(k=KEY[0, :3], v=VALUE[0, :3], kv_start_loc=jnp.zeros(1, jnp.int32))
    plan = jattn.plan(metadata, spec, implementation="xla", query_dtype=jnp.float32)
    with pytest.raises(ValueError, match="score_mod=soft_cap"):
        jattn.attend(QUERY[0, :3], kv, metadata, spec, plan, score_mod=soft_cap)


def powered(score, batch, head, q_idx, kv_idx):
    return score - (1.0 + kv_idx) ** 0.3


def test_plan_says_why_a_score_function_has_no_kernel():
    spec = jattn.AttentionSpec(num_q_heads=8, num_kv_heads=8, head_dim=128)
    metadata = jattn.build_batch_metadata([8], [8], None)
    options = {"implementation": ("mosaic_gpu", "xla"), "device": "h100"}
    reason = "there is no kernel for the score function powered: it uses pow"
    assert reason in str(jattn.plan(metadata, spec, score_mod=powered, **options))
    with pytest.raises(NotImplementedError, match=reason):
        jattn.plan(metadata, spec, score_mod=powered, implementation="mosaic_gpu", device="h100")


@pytest.mark.parametrize("name", MODS)
def test_plan_has_kernels_for_elementwise_functions_and_lookups(name):
    function, arrays = MODS[name]
    spec = jattn.AttentionSpec(num_q_heads=8, num_kv_heads=8, head_dim=128)
    cache = jattn.CacheSpec(num_blocks=8, block_size=16, num_kv_heads=8, head_dim=128)
    metadata = jattn.build_batch_metadata([1, 8], [9, 8], [[1], [2]], block_size=16)
    mod = jattn.ScoreMod(function, *arrays)
    plan = jattn.plan(metadata, spec, cache, score_mod=mod, implementation="mosaic_gpu", device="h100")
    assert [choice.implementation for _, choice in plan.layers[0].choices] == ["mosaic_gpu"] * 2


@pytest.mark.parametrize(
    ("score_mod", "message"),
    [
        (lambda score, b, h, q: score, "must take score, batch, head, q_idx and kv_idx"),
        (relative_bias, "Pass arrays as jattn.ScoreMod"),
        (lambda score, b, h, q, k: q < k, "must return a scalar of float dtype"),
    ],
    ids=["too few arguments", "too many", "bool"],
)
def test_what_is_no_score_function_is_an_error(score_mod, message):
    with pytest.raises(ValueError, match=message):
        jattn.attention(QUERY, KEY, VALUE, score_mod=score_mod)


def test_gradients_of_arrays_have_no_kernel():
    function, (gains, ids) = MODS["gains"]
    q, k, v = (x[0].astype(jnp.bfloat16) for x in (QUERY, KEY, VALUE))
    q, k, v = (jnp.tile(x, (1, 1, 4)) for x in (q, k, v))  # heads of 64

    def loss(q, gains, implementation=None):
        mod = jattn.ScoreMod(function, gains, ids)
        return (
            jattn.attention(q, k, v, score_mod=mod, implementation=implementation).astype(jnp.float32).sum()
        )

    reason = "there is no kernel for the gradients of a score function's arrays"
    with mock.patch("pallas_kernels.support.why_not_on", return_value=None):
        jax.eval_shape(jax.grad(functools.partial(loss, implementation="mosaic_gpu")), q, gains)
        with pytest.warns(
            jattn.KernelFallbackWarning, match=f"fall back to xla on a GPU, which is slow: {reason}"
        ):
            jax.eval_shape(jax.grad(loss, argnums=1), q, gains)
        with pytest.raises(NotImplementedError, match=reason):
            jax.eval_shape(
                jax.grad(functools.partial(loss, implementation="mosaic_gpu"), argnums=1), q, gains
            )


def falling_to_zero(score, batch, head, q_idx, kv_idx):
    """Is NaN past the last of 20 queries."""
    return score + jnp.log(20.0 - q_idx)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_function_that_is_nan_past_the_last_query_has_gradients(implementation):
    """Fewer queries than keys are padded; no padding query changes the gradients."""
    q = QUERY[:, :20]
    weights = normal(*q.shape)

    def loss(q, k, v):
        out = jattn.attention(q, k, v, score_mod=falling_to_zero, implementation=implementation)
        return (out * weights).sum()

    def expected_loss(q, k, v):
        return (dense(falling_to_zero, (), q, k, v, causal=False, window=99) * weights).sum()

    grads = jax.grad(loss, argnums=(0, 1, 2))(q, KEY, VALUE)
    with jax.enable_x64(True):
        args = (x.astype(jnp.float64) for x in (q, KEY, VALUE))
        expected = jax.jit(jax.grad(expected_loss, argnums=(0, 1, 2)))(*args)
    for grad, expected_grad in zip(grads, expected, strict=True):
        np.testing.assert_allclose(grad, expected_grad, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_traced_arrays_that_a_function_captures_have_gradients(implementation):
    """The function may take some arrays as arguments and capture others, of any dtype."""
    function, (gains, ids) = MODS["gains"]

    def loss(q, gains, ids, *, captured):
        def captures_ids(score, batch, head, q_idx, kv_idx, gains):
            return function(score, batch, head, q_idx, kv_idx, gains, ids)

        def captures_both(score, batch, head, q_idx, kv_idx):
            return function(score, batch, head, q_idx, kv_idx, gains, ids)

        mods = {
            "none": jattn.ScoreMod(function, gains, ids),
            "ids": jattn.ScoreMod(captures_ids, gains),
            "both": captures_both,
        }
        options = {"score_mod": mods[captured], "implementation": implementation}
        return (jattn.attention(q, KEY, VALUE, causal=True, **options) ** 2).sum()

    gradients = jax.grad(loss, argnums=(0, 1))
    expected = gradients(QUERY, gains, ids, captured="none")
    for captured in ("ids", "both"):
        run = jax.jit(functools.partial(gradients, captured=captured))
        for grad, expected_grad in zip(run(QUERY, gains, ids), expected, strict=True):
            np.testing.assert_allclose(grad, expected_grad, rtol=1e-5, atol=1e-5)
