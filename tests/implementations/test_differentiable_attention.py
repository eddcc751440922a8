"""Gradients of attention over packed keys: accuracy, padding, memory and determinism."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.pytree import replace
from tests import oracle_gradients
from tests.contract import FACTORS, Problem, case_id, mark_every_second_slow
from tests.covering_array import covering_array
from tests.masks.test_attend_with_masks import MASKS

CHOICES = {
    "mask": [None, *MASKS],
    "region": ["prefill", "chunked", "mixed"],
    "causal": [True, False],
    "window": [None, (3, 2), (9, None)],
    "chunk_size": [None, 8],
    "soft_cap": [None, 5.0],
    "alibi": [None, "linear", "sqrt"],
    "sinks": [False, True],
    "heads": [(2, 2), (4, 2), (4, 1)],
    "head_dim": [8, 80],
    "dtype": ["float32", "bfloat16", "float16"],
    "sparsity": [None, "strided", "group"],
    "padded": [False, True],
}
BASE = {name: values[0] for name, values in FACTORS.items()} | {"kv": "no_cache"}


def allowed(case: dict) -> bool:
    """Return whether a case is valid: mask arrays need the default heads, and a prefix mask is not causal."""
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


def gradients(problem, mask, loss_weights, implementation="xla", query=None, return_lse=True):
    """Return the gradients of the oracle's loss with respect to every float argument."""
    arguments = {"query": problem.query if query is None else query, "k": problem.kv.k, "v": problem.kv.v}
    arguments |= {"sinks": problem.sinks, "alibi_slopes": problem.slopes}
    arguments = {name: jnp.asarray(x) for name, x in arguments.items() if x is not None}

    def loss(arguments):
        kv = replace(problem.kv, k=arguments["k"], v=arguments["v"])
        per_head = {name: arguments.get(name) for name in ("sinks", "alibi_slopes")}
        out, lse = jattn.attend(
            arguments["query"], kv, problem.metadata, problem.spec, mask=mask,
            implementation=implementation, return_lse=True, **per_head,
        )  # fmt: skip
        lse_term = jnp.where(jnp.isneginf(lse), 0.0, lse).T * loss_weights.lse
        return (out.astype(jnp.float32) * loss_weights.out).sum() + (lse_term.sum() if return_lse else 0.0)

    return jax.jit(jax.grad(loss))(arguments)


@pytest.mark.kernels
@pytest.mark.parametrize("case", mark_every_second_slow(CASES), ids=case_id)
def test_gradients_equal_float64_for_every_pair_of_features(case):
    problem, mask = make(case)
    loss_weights = oracle_gradients.draw_weights(problem)
    oracle_gradients.check(problem, loss_weights, gradients(problem, mask, loss_weights))


@pytest.mark.kernels
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
def test_gradients_equal_float64(case):
    problem, mask = make(case)
    loss_weights = oracle_gradients.draw_weights(problem)
    oracle_gradients.check(problem, loss_weights, gradients(problem, mask, loss_weights))


def packed_problem(lens, num_heads=(4, 2), head_dim=16, dtype=jnp.float32, **fields):
    """Return spec, metadata and random arrays of self-attention."""
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
    """The reference would need 3.2 GiB for eight requests of 512 tokens."""

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


def test_gradients_are_bit_identical_when_run_twice():
    spec, metadata, arrays = packed_problem([70, 130])
    step = jax.jit(jax.grad(functools.partial(loss_of, spec, metadata, implementation="xla")))
    for first_run, second_run in zip(step(arrays), step(arrays), strict=True):
        np.testing.assert_array_equal(first_run, second_run)


@pytest.mark.kernels
@pytest.mark.parametrize("outer", ["backward", "forward"])
def test_second_derivatives_are_refused_by_name(outer):
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
def test_checkpoint_and_vmap_do_not_change_gradients():
    spec, metadata, arrays = packed_problem([9, 20])
    loss = functools.partial(loss_of, spec, metadata, implementation="xla")
    expected = jax.jit(jax.grad(loss))(arrays)
    again = jax.jit(jax.grad(jax.checkpoint(loss)))(arrays)
    twice = jax.jit(jax.vmap(jax.grad(loss)))(jax.tree.map(lambda x: jnp.stack([x, 2 * x]), arrays))
    for plain, checkpointed, batched in zip(expected, again, twice, strict=True):
        np.testing.assert_allclose(checkpointed, plain, rtol=0, atol=1e-6)
        np.testing.assert_allclose(batched[0], plain, rtol=0, atol=1e-5)


@pytest.mark.kernels
def test_gradients_of_combined_halves_equal_those_of_attention_to_all_keys():
    spec, _, (q, k, v) = packed_problem([16], causal=False)
    halves = jattn.build_cross_attention_metadata([16], [8], None)
    whole = jattn.build_cross_attention_metadata([16], [16], None)
    run = functools.partial(jattn.attend, implementation="xla", return_lse=True)
    kv = lambda k, v: jattn.PackedKV(k=k, v=v, kv_start_loc=jnp.zeros(1, jnp.int32))

    def combined(arrays):
        q, k, v = arrays
        states = [run(q, kv(k[half], v[half]), halves, spec) for half in (slice(0, 8), slice(8, 16))]
        return (jattn.merge_attn_states(*states[0], *states[1])[0] ** 2).sum()

    at_once = lambda arrays: (run(arrays[0], kv(*arrays[1:]), whole, spec)[0] ** 2).sum()
    for actual, expected in zip(jax.grad(combined)((q, k, v)), jax.grad(at_once)((q, k, v)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


@pytest.mark.kernels
def test_gradients_of_a_decode_region_equal_those_of_a_prefill_region():
    """Each request has one new token over its packed keys."""
    spec, _, (q, k, v) = packed_problem([40])
    kv = lambda k, v: jattn.PackedKV(k=k, v=v, kv_start_loc=jnp.asarray([0, 30], jnp.int32))
    decode = jattn.build_batch_metadata([1, 1], [30, 10], None)
    prefill = jattn.build_batch_metadata([1, 1], [30, 10], None, decode_query_len=2)
    assert decode.bucket.max_decodes == 2
    assert prefill.bucket.max_decodes == 0

    def loss(arrays, metadata):
        return (jattn.attend(arrays[0], kv(*arrays[1:]), metadata, spec, implementation="xla") ** 2).sum()

    decode_gradients, prefill_gradients = (
        jax.grad(loss)((q[:2], k, v), metadata) for metadata in (decode, prefill)
    )
    for actual, expected in zip(decode_gradients, prefill_gradients, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)


def test_derivatives_of_8_bit_keys_are_refused_by_name():
    spec, metadata, (q, k, v) = packed_problem([5])
    loss = lambda q: loss_of(spec, metadata, (q, *(x.astype(jnp.float8_e4m3fn) for x in (k, v))))
    with pytest.raises(
        NotImplementedError, match=r"xla does not support them over a paged cache or 8-bit keys"
    ):
        jax.grad(loss)(q)
