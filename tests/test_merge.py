"""merge_attn_states and cascade_attend: parts of an attention combine to the whole, with any of them
empty.
"""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from tests import oracle

SPEC = jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=8)


@pytest.mark.parametrize("case", range(6))
def test_scalars_merge_as_in_vllm(metadata_cases, case):
    case = metadata_cases["merge_attn_states_scalar"][case]
    out = lambda name: jnp.full((1, 1, 1), float(case[name]))
    lse = lambda name: jnp.full((1, 1), float(case[name]))
    actual, actual_lse = jattn.merge_attn_states(
        out("prefix_out"), lse("prefix_lse"), out("suffix_out"), lse("suffix_lse")
    )
    np.testing.assert_allclose(actual[0, 0, 0], float(case["expected_out"]), rtol=1e-6)
    np.testing.assert_allclose(actual_lse[0, 0], float(case["expected_lse"]), rtol=1e-6)


def test_state_without_keys_may_have_any_value():
    ones, lse = jnp.ones((2, 3, 4)), jnp.zeros((3, 2))
    for empty in (-jnp.inf, jnp.inf):
        out, out_lse = jattn.merge_attn_states(ones * jnp.nan, jnp.full_like(lse, empty), ones, lse)
        assert (np.asarray(out) == 1).all()
        assert (np.asarray(out_lse) == 0).all()


def test_two_empty_states_give_the_prefix_and_minus_infinity():
    ones, empty = jnp.ones((2, 3, 4), jnp.bfloat16), jnp.full((3, 2), -jnp.inf)
    out, lse = jattn.merge_attn_states(ones * 0, empty, ones, empty)
    assert out.dtype == jnp.bfloat16
    assert (np.asarray(out, np.float32) == 0).all()
    assert np.isneginf(lse).all()


@pytest.mark.kernels
def test_states_without_keys_do_not_affect_gradients():
    out, lse = jax.random.normal(jax.random.key(0), (2, 3, 2, 4)), jnp.zeros((2, 2, 3))
    lse = lse.at[:, 0, 0].set(-jnp.inf).at[1, 1, 1].set(-jnp.inf)  # both sides, and the suffix alone
    out = out.at[:, 0, 0].set(jnp.nan).at[1, 1, 1].set(jnp.nan)

    def loss(out, lse):
        merged, merged_lse = jattn.merge_attn_states(out[0], lse[0], out[1], lse[1])
        has_keys = ~jnp.isneginf(merged_lse)
        return (jnp.where(has_keys.T[..., None], merged, 0) ** 2).sum() + jnp.where(
            has_keys, merged_lse, 0
        ).sum()

    out_grad, lse_grad = jax.grad(loss, argnums=(0, 1))(out, lse)
    assert np.isfinite(out_grad).all()
    assert np.isfinite(lse_grad).all()
    np.testing.assert_allclose(lse_grad[:, 1, 1], [1, 0])
    np.testing.assert_allclose(out_grad[0, 1, 1], 2 * out[0, 1, 1], rtol=1e-6)


def test_large_scores_do_not_overflow():
    ones, lse = jnp.ones((1, 1, 1)), jnp.full((1, 1), 5e4)
    out, out_lse = jattn.merge_attn_states(ones, lse, 3 * ones, lse)
    assert float(out[0, 0, 0]) == 2
    np.testing.assert_allclose(out_lse[0, 0], 5e4 + np.log(2))


@pytest.mark.parametrize("case", range(2))
def test_cascade_metadata_is_vllms(metadata_cases, case):
    case = metadata_cases["cascade_build"][case]
    width = -(-max(case["seq_lens"]) // 8)
    table = np.arange(2 * width).reshape(2, width)
    metadata = jattn.build_batch_metadata(case["query_lens"], case["seq_lens"], table, block_size=8)
    cascade = jattn.build_cascade_metadata(metadata, case["common_prefix_len"])
    expected = case["expected"]
    assert cascade.suffix.seq_lens.tolist() == expected["suffix_kv_lens"]
    assert cascade.prefix.seq_lens.tolist() == expected.get("prefix_kv_lens", [8])
    total = sum(case["query_lens"])
    assert cascade.prefix.query_start_loc.tolist() == expected.get("cu_prefix_query_lens", [0, total])
    skipped = case["common_prefix_len"] // 8
    assert cascade.suffix.block_table[1, 0] == table[1, skipped]


def test_cascade_metadata_is_traced_once_for_all_prefixes():
    traces = []

    @jax.jit
    def build(metadata, length):
        traces.append(1)
        return jattn.build_cascade_metadata(metadata, length)

    metadata = jattn.build_batch_metadata([1, 1], [9, 13], [[1, 2, 3], [1, 2, 4, 5]], block_size=4)
    for length in (4, 8):
        assert build(metadata, jnp.int32(length)).suffix.seq_lens.tolist() == [9 - length, 13 - length]
    assert len(traces) == 1


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("length", "message"),
    [
        (0, r"common_prefix_len must be a positive multiple.*\(4\), got 0"),
        (6, r"common_prefix_len must be a positive multiple.*\(4\), got 6"),
        (np.int64(0), r"positive multiple.*\(4\), got 0"),
        (np.int64(6), r"positive multiple.*\(4\), got 6"),
        (4.0, "common_prefix_len must be an int, got 4.0"),
        (True, "common_prefix_len must be an int, got True"),
        (jnp.float32(4.5), r"common_prefix_len must be an int, got float32 of shape \(\)"),
        (jnp.asarray(True), r"common_prefix_len must be an int, got bool of shape \(\)"),
        (jnp.asarray([4]), r"common_prefix_len must be an int, got int32 of shape \(1,\)"),
    ],
    ids=str,
)
def test_build_cascade_metadata_rejects_invalid_prefix_lengths(length, message):
    metadata = jattn.build_batch_metadata([1], [9], [[1, 2, 3]], block_size=4)
    with pytest.raises(ValueError, match=message):
        jattn.build_cascade_metadata(metadata, length)


def test_prefix_longer_than_a_row_is_rejected():
    metadata, cache_spec, _, specs, _, _ = cascade_problem(np.random.default_rng(0), [None])
    with pytest.raises(ValueError, match=r"common_prefix_len must be at most row 2's 9 keys, got 12\."):
        jattn.plan(metadata, specs, cache_spec, common_prefix_len=12)


@pytest.mark.parametrize(
    "change", [{"window": (3, 0)}, {"chunk_size": 4}, {"sparsity": jattn.LocalStrided()}]
)
def test_cascade_rejects_masks_that_depend_on_distance(change):
    spec = jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=8, **change)
    metadata = jattn.build_batch_metadata([1], [9], [[1, 2, 3]], block_size=4)
    cache = jattn.PagedCache(k=jnp.zeros((4, 4, 2, 8)), v=jnp.zeros((4, 4, 2, 8)))
    with pytest.raises(NotImplementedError, match=rf"spec.{next(iter(change))}=.*Call attend"):
        jattn.cascade_attend(jnp.zeros((1, 4, 8)), cache, jattn.build_cascade_metadata(metadata, 4), spec)


@pytest.mark.kernels
def test_causal_rows_start_at_or_after_the_last_token_of_a_prefix():
    """The prefix is attended to without a causal mask, so queries inside it would see future keys."""
    bucket = jattn.Bucket(max_decodes=4, max_prefills=3, max_prefill_tokens=12, max_blocks=3)
    options = {"block_size": 4, "bucket": bucket}
    metadata = jattn.build_batch_metadata([1, 4, 4], [9, 11, 8], [[1, 2, 3]] * 3, **options)
    cache = jattn.PagedCache(k=jnp.zeros((4, 4, 2, 8)), v=jnp.zeros((4, 4, 2, 8)))
    spec, query = jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=8), jnp.zeros((16, 4, 8))
    cascade = {length: jattn.build_cascade_metadata(metadata, length) for length in (4, 8)}
    jattn.cascade_attend(query, cache, cascade[4], spec)
    jattn.cascade_attend(query, cache, cascade[8], dataclasses.replace(spec, causal=False))
    message = r"common_prefix_len must be at most 5 \(the context length of row 5 plus 1\) .*causal.*, got 8"
    with pytest.raises(ValueError, match=message):
        jattn.cascade_attend(query, cache, cascade[8], spec)


def test_parts_of_an_attention_combine_to_the_whole():
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(1, 4, 8)), rng.normal(size=(30, 2, 8)), rng.normal(size=(30, 2, 8))
    step = lambda a, b: oracle.Step([q], [k[a:b]], [v[a:b]], [True])
    parts = [oracle.attention(SPEC, step(a, b)) for a, b in ((0, 11), (11, 30))]
    flat = [
        x
        for out, lse in parts
        for x in (jnp.asarray(out[0], jnp.float32), jnp.asarray(lse[0].T, jnp.float32))
    ]
    out, lse = jattn.merge_attn_states(*flat)
    expected, expected_lse = oracle.attention(SPEC, step(0, 30))
    np.testing.assert_allclose(out, expected[0], atol=1e-6)
    np.testing.assert_allclose(np.asarray(lse).T, expected_lse[0], atol=1e-6)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (0, (12, 4), r"prefix_out must have 3 axes, tokens, q_heads and head_dim, got \(12, 4\)"),
        (1, (3, 4), r"prefix_lse must have shape \(4, 3\) \(q_heads, tokens\), got \(3, 4\)"),
        (
            2,
            (3, 4, 9),
            r"suffix_out must have shape \(3, 4, 8\) \(the shape of prefix_out\), got \(3, 4, 9\)",
        ),
        (3, (4, 1), r"suffix_lse must have shape \(4, 3\) \(q_heads, tokens\), got \(4, 1\)"),
    ],
)
def test_states_of_inconsistent_shapes_are_rejected_by_name(index, shape, message):
    shapes = [(3, 4, 8), (4, 3), (3, 4, 8), (4, 3)]
    shapes[index] = shape
    with pytest.raises(ValueError, match=message):
        jattn.merge_attn_states(*map(jnp.zeros, shapes))


@pytest.mark.usefixtures("types_unchecked")
def test_outputs_must_be_floats():
    out, lse = jnp.ones((3, 4, 8)), jnp.zeros((4, 3))
    with pytest.raises(ValueError, match="suffix_out must hold floats, got int32"):
        jattn.merge_attn_states(out, lse, out.astype(jnp.int32), lse)


def cascade_problem(rng, windows):
    """Return four rows over a prefix of two blocks, and a plan of layers with different windows."""
    table = [[1, 2, 3, 7], [1, 2, 4, 8], [1, 2, 5], [1, 2, 6]]
    metadata = jattn.build_batch_metadata([1] * 4, [14, 16, 9, 10], table, block_size=4)
    cache_spec = jattn.CacheSpec(num_blocks=9, block_size=4, num_kv_heads=2, head_dim=8, dtype=jnp.float32)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    cache = jattn.PagedCache(k=draw(9, 4, 2, 8), v=draw(9, 4, 2, 8))
    specs = [jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=8, window=w) for w in windows]
    return metadata, cache_spec, cache, specs, draw(4, 4, 8), draw(4)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.kernels
def test_plan_with_a_common_prefix_applies_to_all_layers(implementation):
    metadata, cache_spec, cache, specs, query, sinks = cascade_problem(
        np.random.default_rng(0), [None, (5, 0)]
    )
    plan_of = lambda **prefix: jattn.plan(
        metadata, specs, cache_spec, implementation=implementation, query_dtype=jnp.float32, **prefix
    )
    plain, cascade = plan_of(), plan_of(common_prefix_len=8)
    assert plain.cascade is None
    assert [len(part.layers) for part in (cascade.cascade.prefix, cascade.cascade.suffix)] == [1, 1]
    for spec in specs:
        for more in ({}, {"sinks": sinks}, {"alibi_slopes": sinks}):
            expected, expected_lse = jattn.attend(
                query, cache, metadata, spec, plain, return_lse=True, **more
            )
            actual, actual_lse = jattn.attend(query, cache, metadata, spec, cascade, return_lse=True, **more)
            np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-6)
            np.testing.assert_allclose(actual_lse, expected_lse, rtol=2e-5, atol=2e-6)
            alone = jattn.attend(query, cache, metadata, spec, cascade, **more)
            np.testing.assert_array_equal(alone, actual)


def test_plan_reads_a_common_prefix_from_the_first_rows_blocks_only():
    metadata, cache_spec, cache, specs, query, _ = cascade_problem(np.random.default_rng(1), [None])
    plan = jattn.plan(metadata, specs, cache_spec, query_dtype=jnp.float32, common_prefix_len=8)
    expected = jattn.attend(query, cache, metadata, specs[0], plan)
    other_table = metadata.block_table.at[1:, :2].set(0)
    moved = jattn.pytree.replace(metadata, block_table=other_table)
    plan = jattn.plan(moved, specs, cache_spec, query_dtype=jnp.float32, common_prefix_len=8)
    np.testing.assert_array_equal(jattn.attend(query, cache, moved, specs[0], plan), expected)


def test_other_prefix_lengths_do_not_retrace(traced_once):
    metadata, cache_spec, cache, specs, query, _ = cascade_problem(np.random.default_rng(2), [None])

    def run(length):
        plan = jattn.plan(metadata, specs, cache_spec, query_dtype=jnp.float32, common_prefix_len=length)
        return jattn.attend(query, cache, metadata, specs[0], plan)

    four, eight = traced_once(run, (jnp.int32(4),), (jnp.int32(8),))
    np.testing.assert_allclose(four, eight, rtol=2e-5, atol=2e-6)


@pytest.mark.kernels
@pytest.mark.parametrize("sinks", [None, jnp.asarray([0.3, -1.0, 2.0, 0.0])], ids=["plain", "sinks"])
def test_row_may_have_no_key_after_the_prefix(sinks):
    spec = jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16)
    sizes = {"num_blocks": 4, "block_size": 8, "num_kv_heads": 2, "head_dim": 16}
    cache = jattn.PagedCache.create(jattn.CacheSpec(**sizes, dtype=jnp.float32))
    key, value = (jax.random.normal(jax.random.key(i), (12, 2, 16)) for i in (1, 2))
    cache = jattn.write_kv(cache, key, value, jnp.arange(8, 20))
    metadata = jattn.build_batch_metadata([1, 1], [8, 12], [[1], [1, 2]], block_size=8)
    query = jax.random.normal(jax.random.key(3), (2, 4, 16))
    options = {"sinks": sinks, "return_lse": True}
    expected = jattn.attend(query, cache, metadata, spec, implementation="reference", **options)
    actual = jattn.cascade_attend(query, cache, jattn.build_cascade_metadata(metadata, 8), spec, **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), actual, expected)


@pytest.mark.usefixtures("types_unchecked")
def test_sinks_may_be_a_list():
    metadata, cache_spec, cache, (spec,), query, _ = cascade_problem(np.random.default_rng(6), [None])
    plan = jattn.plan(metadata, spec, cache_spec, query_dtype=jnp.float32, common_prefix_len=8)
    sinks = [0.5, -1.0, 2.0, 0.0]
    expected = jattn.attend(query, cache, metadata, spec, sinks=sinks)
    actual = jattn.attend(query, cache, metadata, spec, plan, sinks=sinks)
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("max_blocks", "max_splits"), [(544, 16), (128, 1)])
def test_keys_of_a_long_prefix_may_be_split(max_blocks, max_splits):
    bucket = jattn.Bucket(max_decodes=64, max_blocks=max_blocks)
    cache_spec = jattn.CacheSpec(num_blocks=8000, num_kv_heads=8, head_dim=128)
    spec = jattn.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
    prefix_of = lambda length: jattn.plan(metadata, spec, cache_spec, common_prefix_len=length).cascade.prefix
    metadata = jattn.build_batch_metadata([1], [2048], [[1] * 128], bucket=bucket)
    with mock.patch("pallas_kernels.support.why_not_on", return_value=None):
        (layer,) = jax.eval_shape(prefix_of, jax.ShapeDtypeStruct((), jnp.int32)).layers
    assert layer.prefill.kernel.sizes.max_splits == max_splits


def test_common_prefix_has_no_effect_on_packed_keys():
    metadata, cache_spec, cache, (spec,), query, _ = cascade_problem(np.random.default_rng(5), [None])
    keys_of_rows = lambda array: array[metadata.block_table].reshape(64, 2, 8)
    starts = jnp.arange(4, dtype=jnp.int32) * 16
    outside = jattn.PackedKV(k=keys_of_rows(cache.k), v=keys_of_rows(cache.v), kv_start_loc=starts)
    expected = jattn.attend(query, cache, metadata, spec)
    for caches in ([None, cache_spec], None):
        options = {"query_dtype": jnp.float32, "common_prefix_len": 8}
        plan = jattn.plan(metadata, [spec, spec], caches, **options)
        actual = jattn.attend(query, outside, metadata, spec, plan)
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-6)


def test_common_prefix_with_a_mask_is_rejected():
    metadata, cache_spec, _, specs, _, _ = cascade_problem(np.random.default_rng(3), [None])
    mask = jattn.masks.Document(ids=jnp.zeros(16, jnp.int32))
    with pytest.raises(NotImplementedError, match="common_prefix_len with a mask: masks are not supported"):
        jattn.plan(metadata, specs, cache_spec, mask=mask, common_prefix_len=4)


def test_mask_argument_with_a_common_prefix_is_rejected():
    metadata, cache_spec, cache, specs, query, _ = cascade_problem(np.random.default_rng(4), [None])
    plan = jattn.plan(metadata, specs, cache_spec, query_dtype=jnp.float32, common_prefix_len=8)
    with pytest.raises(ValueError, match=r"both a mask and a plan\. Pass the mask to plan\(\)"):
        jattn.attend(query, cache, metadata, specs[0], plan, mask=jattn.masks.Sinks(4))


@pytest.mark.usefixtures("types_unchecked")
def test_cascade_over_packed_keys_is_rejected():
    metadata = jattn.build_batch_metadata([1], [6], [[1, 2]], block_size=4)
    parts = jattn.build_cascade_metadata(metadata, 4)
    spec = jattn.AttentionSpec(num_q_heads=2, num_kv_heads=2, head_dim=8)
    kv = jattn.PackedKV(k=jnp.ones((6, 2, 8)), v=jnp.ones((6, 2, 8)), kv_start_loc=jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match=r"cache must be a PagedCache .*, got PackedKV"):
        jattn.cascade_attend(jnp.ones((1, 2, 8)), kv, parts, spec)
    with pytest.raises(ValueError, match=r"spec must be a AttentionSpec .*, got NoneType"):
        jattn.cascade_attend(jnp.ones((1, 2, 8)), kv, parts, None)


@pytest.mark.kernels
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_float64_cascades_are_combined_in_float64(implementation):
    """Float32 log-sum-exps would limit the result to seven digits."""
    with jax.enable_x64(True):
        metadata, _, cache, (spec,), query, _ = cascade_problem(np.random.default_rng(6), [None])
        query, sinks = query.astype(jnp.float64), jnp.asarray([0.5, -1.0, 2.0, 0.0])
        options = {"sinks": sinks, "implementation": implementation, "return_lse": True}
        expected, expected_lse = jattn.attend(query, cache, metadata, spec, **options)
        actual, lse = jattn.cascade_attend(
            query, cache, jattn.build_cascade_metadata(metadata, 8), spec, **options
        )
        assert actual.dtype == jnp.float64
        assert lse.dtype == expected_lse.dtype == jnp.float32
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)
