"""Gradients of attention over packed keys: against float64, at padding, in memory, and twice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.pytree import replace
from tests import oracle_gradients
from tests.contract import FACTORS, REGIONS, Problem, case_id
from tests.covering_array import covering_array
from tests.masks.test_attend_with_masks import MASKS

CHOICES = {
    "mask": [None, *MASKS],
    "region": list(REGIONS),
    "causal": [True, False],
    "window": FACTORS["window"],
    "chunk_size": [None, 8],
    "soft_cap": [None, 5.0],
    "alibi": [None, "linear", "sqrt"],
    "sinks": [False, True],
    "heads": FACTORS["heads"],
    "head_dim": [8, 80],
    "dtype": ["float32", "bfloat16", "float16"],
    "sparsity": FACTORS["sparsity"],
    "padded": [False, True],
}
BASE = {name: values[0] for name, values in FACTORS.items()} | {"kv": "no_cache"}


def allowed(case: dict) -> bool:
    """Arrays of masks are of 2 or 4 query heads; a prefix is not for causal layers."""
    is_masked, heads = case.get("mask") is not None, case.get("heads", (4, 2))
    return not (is_masked and heads != (4, 2)) and not (
        case.get("mask") == "prefix" and case.get("causal", False)
    )


CASES = covering_array(CHOICES, allowed)


def make(case: dict) -> tuple[Problem, jattn.masks.Mask | None]:
    case = BASE | case
    mask, rule = (None, None) if case.get("mask") is None else MASKS[case["mask"]]
    problem = Problem(case, mask=rule)
    if mask is not None:
        num_reqs = len(problem.query_lens)
        mask = mask.map_rows(lambda array: array[:num_reqs]).to_batch_rows(problem.metadata)
    return problem, mask


def gradients(problem, mask, expected, implementation="xla", query=None, return_lse=True):
    """Of what the oracle's loss is, by all that is a float."""
    given = {"query": problem.query if query is None else query, "k": problem.kv.k, "v": problem.kv.v}
    given |= {"sinks": problem.sinks, "alibi_slopes": problem.slopes}
    given = {name: jnp.asarray(x) for name, x in given.items() if x is not None}

    def loss(given):
        kv = replace(problem.kv, k=given["k"], v=given["v"])
        per_head = {name: given.get(name) for name in ("sinks", "alibi_slopes")}
        out, lse = jattn.attend(
            given["query"], kv, problem.metadata, problem.spec, mask=mask,
            implementation=implementation, return_lse=True, **per_head,
        )  # fmt: skip
        of_lse = jnp.where(jnp.isneginf(lse), 0.0, lse).T * expected.lse
        return (out.astype(jnp.float32) * expected.out).sum() + (of_lse.sum() if return_lse else 0.0)

    return jax.jit(jax.grad(loss))(given)


@pytest.mark.kernels
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_gradients_are_float64_s_under_every_pair_of_features(case):
    problem, mask = make(case)
    expected = oracle_gradients.draw_weights(problem)
    oracle_gradients.check(problem, expected, gradients(problem, mask, expected))


@pytest.mark.parametrize(
    "case",
    [
        {
            "region": "mixed",
            "heads": (4, 2),
            "sinks": True,
            "alibi": "linear",
            "soft_cap": 5.0,
            "padded": True,
        },
        {"region": "chunked", "heads": (4, 1), "dtype": "bfloat16", "window": (9, None), "causal": False},
        {"region": "prefill", "heads": (4, 2), "mask": "documents", "sinks": True},
    ],
    ids=case_id,
)
def test_gradients_are_float64_s(case):
    problem, mask = make(case)
    expected = oracle_gradients.draw_weights(problem)
    oracle_gradients.check(problem, expected, gradients(problem, mask, expected))


def packed_problem(lens, num_heads=(4, 2), head_dim=16, dtype=jnp.float32, **fields):
    """Random arrays of self-attention of some requests."""
    spec = jattn.AttentionSpec(
        num_q_heads=num_heads[0], num_kv_heads=num_heads[1], head_dim=head_dim, **fields
    )
    metadata = jattn.build_batch_metadata(lens, lens, None)
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (sum(lens), heads, head_dim), dtype)
        for key, heads in zip(keys, (num_heads[0], num_heads[1], num_heads[1]), strict=True)
    )
    return spec, metadata, (q, k, v)


def loss_of(spec, metadata, arrays, **options):
    q, k, v = arrays
    kv = jattn.PackedKV(k=k, v=v, kv_start_loc=metadata.row_starts)
    return (jattn.attend(q, kv, metadata, spec, **options).astype(jnp.float32) ** 2).sum()


@pytest.mark.kernels
def test_memory_of_a_training_step_is_linear_in_tokens():
    """Eight requests of 512 tokens took 3.2 GiB by the reference."""

    def temporary_bytes(tokens):
        spec, metadata, arrays = packed_problem(
            [tokens] * 8, num_heads=(8, 2), head_dim=64, dtype=jnp.bfloat16
        )
        step = jax.jit(jax.grad(functools.partial(loss_of, spec, metadata, implementation="xla")))
        return step.lower(arrays).compile().memory_analysis().temp_size_in_bytes

    used = [temporary_bytes(tokens) for tokens in (512, 1024, 2048)]
    assert used[0] < 100e6
    assert used[2] - used[1] < 2.2 * (used[1] - used[0])
    assert used[2] < 4 * used[0]


@pytest.mark.kernels
def test_finite_differences_agree():
    spec, metadata, arrays = packed_problem([7, 1, 12], soft_cap=3.0, window=(6, 0))
    loss = jax.jit(functools.partial(loss_of, spec, metadata, implementation="xla"))
    direction = jax.tree.map(lambda x: jax.random.normal(jax.random.key(5), x.shape), arrays)
    slope = sum(jnp.vdot(g, d) for g, d in zip(jax.grad(loss)(arrays), direction, strict=True))
    moved = lambda step: jax.tree.map(lambda x, d: x + step * d, arrays, direction)
    ends = loss(moved(1e-2)), loss(moved(-1e-2))
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / 2e-2, rtol=1e-2)


def test_the_same_bits_come_out_twice():
    spec, metadata, arrays = packed_problem([70, 130])
    step = jax.jit(jax.grad(functools.partial(loss_of, spec, metadata, implementation="xla")))
    for one, two in zip(step(arrays), step(arrays), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("outer", ["backward", "forward"])
def test_a_second_derivative_is_refused_by_name(outer):
    spec, metadata, arrays = packed_problem([5])
    loss = functools.partial(loss_of, spec, metadata)
    first = lambda arrays, by: jax.grad(functools.partial(loss, implementation=by))(arrays)[0].sum()
    second = jax.grad if outer == "backward" else jax.jacfwd
    message = r"Second derivatives of attention: .*implementation='reference'"
    with pytest.raises(NotImplementedError, match=message):
        second(lambda arrays: first(arrays, "xla"))(arrays)
    if outer == "backward":
        assert np.isfinite(second(lambda arrays: first(arrays, "reference"))(arrays)[0]).all()


@pytest.mark.kernels
def test_checkpoints_and_vmap_change_no_gradient():
    spec, metadata, arrays = packed_problem([9, 20])
    loss = functools.partial(loss_of, spec, metadata, implementation="xla")
    expected = jax.jit(jax.grad(loss))(arrays)
    again = jax.jit(jax.grad(jax.checkpoint(loss)))(arrays)
    twice = jax.jit(jax.vmap(jax.grad(loss)))(jax.tree.map(lambda x: jnp.stack([x, 2 * x]), arrays))
    for one, other, both in zip(expected, again, twice, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)
        np.testing.assert_allclose(both[0], one, rtol=0, atol=1e-5)


@pytest.mark.kernels
def test_gradients_of_lse_alone_and_of_merged_halves():
    """Attention to two halves of the keys, merged, has the gradient of attention to all of them."""
    spec, _, (q, k, v) = packed_problem([16], causal=False)
    halves = jattn.build_cross_attention_metadata([16], [8], None)
    whole = jattn.build_cross_attention_metadata([16], [16], None)
    run = functools.partial(jattn.attend, implementation="xla", return_lse=True)
    kv = lambda k, v: jattn.PackedKV(k=k, v=v, kv_start_loc=jnp.zeros(1, jnp.int32))

    def merged(arrays):
        q, k, v = arrays
        parts = [run(q, kv(k[at], v[at]), halves, spec) for at in (slice(0, 8), slice(8, 16))]
        return (jattn.merge_attn_states(*parts[0], *parts[1])[0] ** 2).sum()

    at_once = lambda arrays: (run(arrays[0], kv(*arrays[1:]), whole, spec)[0] ** 2).sum()
    for actual, expected in zip(jax.grad(merged)((q, k, v)), jax.grad(at_once)((q, k, v)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


@pytest.mark.kernels
def test_a_decode_region_has_the_gradients_of_a_prefill_region():
    """One new token of each request over its packed keys."""
    spec, _, (q, k, v) = packed_problem([40])
    kv = lambda k, v: jattn.PackedKV(k=k, v=v, kv_start_loc=jnp.asarray([0, 30], jnp.int32))
    decode = jattn.build_batch_metadata([1, 1], [30, 10], None)
    prefill = jattn.build_batch_metadata([1, 1], [30, 10], None, decode_query_len=2)
    assert decode.bucket.max_decodes == 2
    assert prefill.bucket.max_decodes == 0

    def loss(arrays, metadata):
        return (jattn.attend(arrays[0], kv(*arrays[1:]), metadata, spec, implementation="xla") ** 2).sum()

    one, other = (jax.grad(loss)((q[:2], k, v), metadata) for metadata in (decode, prefill))
    for actual, expected in zip(one, other, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)


def test_eight_bit_keys_have_no_derivative_and_say_so():
    spec, metadata, (q, k, v) = packed_problem([5])
    loss = lambda q: loss_of(spec, metadata, (q, *(x.astype(jnp.float8_e4m3fn) for x in (k, v))))
    with pytest.raises(
        NotImplementedError, match=r"xla does not support them over a paged cache or 8-bit keys"
    ):
        jax.grad(loss)(q)
