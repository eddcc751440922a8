"""attend with any mask, against the float64 oracle, for every region, layout and modifier."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks
from tests.contract import FACTORS, AttentionContract, Problem
from tests.covering_array import covering_array
from tests.dense.test_training import as_on_a_gpu

RNG = np.random.default_rng(0)
BLOCKS = RNG.random((5, 2, 24, 24)) < 0.4  # [reqs, heads, ...]: as far as the widest block table
DOCUMENTS = np.cumsum(RNG.random((5, 100)) < 0.05, axis=1).astype(np.int32)
LENGTHS = np.array([4, 30, 0, 11, 50], np.int32)
COLUMNS, SLASHES = RNG.random((2, 100)) < 0.1, RNG.random((2, 100)) < 0.2
strange = lambda head, query, key: (query * 3 + key + head) % 4 != 0

# A mask of five requests, and its rule (request, head, i, j).
MASKS = {
    "streaming": (
        masks.streaming_heads([1], num_first=2, num_recent=5),
        lambda r, h, i, j: h == 1 or j < 2 or i - j < 5,
    ),
    "blocks": (
        masks.BlockMask(blocks=BLOCKS, block_q=5, block_kv=5),
        lambda r, h, i, j: BLOCKS[r, h // 2, i // 5, j // 5],
    ),
    "documents": (masks.Document(ids=DOCUMENTS), lambda r, h, i, j: DOCUMENTS[r, i] == DOCUMENTS[r, j]),
    "prefix": (
        masks.Prefix(length=LENGTHS) | masks.Window(left=3, right=0),
        lambda r, h, i, j: max(i, j) < LENGTHS[r] or 0 <= i - j <= 3,
    ),
    "vertical_slash": (
        masks.VerticalSlash(columns=COLUMNS[[0, 1, 0, 1]], slashes=SLASHES[[0, 0, 1, 1]]),
        lambda r, h, i, j: COLUMNS[h % 2, j] or (i >= j and SLASHES[h // 2, i - j]),
    ),
    "gathered": (
        masks.VerticalSlash(columns=COLUMNS[[0, 1, 0, 1]], slashes=SLASHES[[0, 0, 1, 1]], num_gathered=6),
        lambda r, h, i, j: MASKS["vertical_slash"][1](r, h, i, j),
    ),
    "function": (masks.MaskFunction(strange), lambda r, h, i, j: strange(h, i, j)),
}
CHOICES = {
    "mask": list(MASKS),
    "region": ["decode", "speculative", "chunked", "mixed"],
    "causal": [True, False],
    "soft_cap": [None, 5.0],
    "alibi": [None, "linear"],
    "sinks": [False, True],
    "kv": ["NHD", "HND", "packed", "no_cache"],
    "padded": [False, True],
}
CASES = covering_array(CHOICES, lambda case: not (case.get("mask") == "prefix" and case.get("causal", False)))


def masked(case, make=Problem):
    """Return a case's problem under its mask, and the mask with the rows of the problem's step."""
    plain = {name: values[0] for name, values in FACTORS.items()} | {"heads": (4, 2), "head_dim": 16}
    mask, rule = MASKS[case["mask"]]
    problem = make(plain | case, mask=rule)
    num_reqs = len(problem.query_lens)
    request_mask = mask.map_rows(lambda array: array[:num_reqs])
    return problem, request_mask.to_batch_rows(problem.metadata)


@pytest.mark.kernels
@pytest.mark.parametrize("implementation", ["xla", pytest.param("reference", marks=pytest.mark.kernels)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_attend_with_any_mask_equals_float64(case, implementation):
    problem, mask = masked(case)
    contract = AttentionContract()
    contract.implementation = implementation
    problem.check(*contract.attend(problem, mask=mask))


def test_masks_of_spec_and_call_are_both_applied():
    problem, mask = masked({"mask": "documents", "region": "chunked", "sparsity": "strided"})
    contract = AttentionContract()
    contract.implementation = "xla"
    problem.check(*contract.attend(problem, mask=mask))


@pytest.mark.kernels
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("order", ["as_built", "padded"])
def test_prefix_lm_mask_is_bidirectional_in_the_prefix_for_any_row_order(implementation, order):
    case = {"mask": "prefix", "region": "mixed", "causal": False, "padded": order == "padded"}
    plain = {name: values[0] for name, values in FACTORS.items()} | {"heads": (4, 2), "head_dim": 16}
    lengths = np.array([0, 0, 5, 0, 61], np.int32)
    problem = Problem(plain | case, mask=lambda r, h, i, j: j <= i or max(i, j) < lengths[r])
    mask = (masks.Causal() | masks.Prefix(length=lengths)).to_batch_rows(problem.metadata)
    contract = AttentionContract()
    contract.implementation = implementation
    problem.check(*contract.attend(problem, mask=mask))


def test_reference_is_differentiable_with_a_mask():
    problem = Problem(AttentionContract().plain_case(region="chunked"))
    contract = AttentionContract()
    contract.implementation = "reference"
    mask = masks.Sinks(1) | masks.Window(left=4)
    loss = lambda q: contract.attend(problem, query=q, mask=mask)[0].sum()
    gradient = jax.grad(loss)(jnp.asarray(problem.query))
    assert np.isfinite(gradient).all()
    assert (np.asarray(gradient) != 0).any()


def test_masked_attention_selects_the_kernel_by_default(monkeypatch):
    monkeypatch.setattr("pallas_kernels.support.why_not_on", lambda *_: None)  # as on a Hopper GPU
    requested_implementations = []
    monkeypatch.setattr(
        "jattn.implementations.mosaic_gpu.attend",
        lambda inputs, *_, **__: requested_implementations.append(1) or (inputs.query, None),
    )
    spec = jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64, sparsity=masks.Sinks(2))
    metadata = jattn.build_batch_metadata([3], [3], [[1]], block_size=16)
    zeros = jnp.zeros((2, 16, 2, 64), jnp.bfloat16)
    cache = jattn.PagedCache(k=zeros, v=zeros)
    query = jnp.zeros((3, 4, 64), jnp.bfloat16)
    jattn.attend(query, cache, metadata, spec)
    assert requested_implementations


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_chunked_mask_equals_the_spec_for_more_queries_than_keys(implementation):
    """The first queries are before position 0, in chunks without keys."""
    metadata = jattn.build_cross_attention_metadata([9, 2, 5], [4, 6, 0], None)
    spec = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 8, "causal": False}
    query, key, value = (jax.random.normal(jax.random.key(i), (16, 2 - (i > 0), 8)) for i in range(3))
    kv = jattn.PackedKV(k=key[:10], v=value[:10], kv_start_loc=jnp.asarray([0, 4, 10], jnp.int32))
    attend = lambda mask, **chunks: jattn.attend(
        query, kv, metadata, jattn.AttentionSpec(**spec, **chunks), mask=mask, implementation=implementation
    )
    expected = attend(None, chunk_size=4)
    np.testing.assert_allclose(attend(masks.Chunked(4)), expected, rtol=1e-6, atol=1e-7)
    assert not np.any(expected[:5])
    assert np.any(expected[5:9])


@pytest.mark.kernels
@pytest.mark.parametrize(
    "mask",
    [
        masks.BlockMask(blocks=np.eye(6, dtype=bool)[None], block_q=64, block_kv=64),
        masks.BlockMask(blocks=np.ones((1, 1, 6), bool), block_q=None, block_kv=64),
    ],
)
def test_kernel_and_xla_agree_for_queries_before_position_0(mask):
    metadata = jattn.build_cross_attention_metadata(
        [250, 20], [70, 30], [[1, 2, 3, 4, 5], [6, 7]], block_size=16
    )
    k, v = jax.random.normal(jax.random.key(1), (2, 8, 16, 1, 64), jnp.bfloat16)
    query = jax.random.normal(jax.random.key(0), (270, 1, 64), jnp.bfloat16)
    spec = jattn.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=64, causal=False)
    attend = functools.partial(
        jattn.attend, query, jattn.PagedCache(k=k, v=v), metadata, spec, mask=mask, return_lse=True
    )
    expected, expected_lse = attend(implementation="xla")
    with as_on_a_gpu():
        actual, lse = attend(implementation="mosaic_gpu")
    np.testing.assert_allclose(actual.astype(jnp.float32), expected.astype(jnp.float32), rtol=0, atol=0.02)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=1e-4)
