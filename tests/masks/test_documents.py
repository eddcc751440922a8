"""Documents in any order: their runs, the arrays for the kernels, and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jattn
from jattn import masks
from jattn.implementations.mosaic_gpu import tile_lists
from jattn.masks.base import leaves
from jattn.masks.documents import DocumentRuns, document_runs, has_contiguous_ids
from pallas_kernels.shared import Score
from pallas_kernels.varlen_prefill import PrefillSizes, make_schedule
from tests.masks.mask_rules import tiling

rows = st.lists(
    st.lists(st.integers(-2, 4), min_size=12, max_size=12).map(lambda ids: np.asarray(ids, np.int32)),
    min_size=1,
    max_size=2,
).map(np.stack)


@settings(max_examples=30)
@given(rows)
def test_runs_are_documents_with_unique_ids(ids):
    runs = np.asarray(document_runs(jnp.asarray(ids)).ids)
    for row, given_ids in zip(runs, ids, strict=True):
        edges = given_ids[1:] != given_ids[:-1]
        np.testing.assert_array_equal(np.diff(row), edges)
    pairs = lambda x: x[:, :, None] == x[:, None, :]
    assert has_contiguous_ids(ids) == (pairs(runs) == pairs(ids)).all()
    np.testing.assert_array_equal(document_runs(jnp.asarray(ids[0])).ids, runs[0])


def test_document_masks_become_runs():
    document = masks.Document(ids=np.asarray([5, 5, 2, 2, 0]))
    mask = ((~document | masks.Sinks(2)) & masks.Causal() & document).for_kernels()
    assert [type(leaf) for leaf in leaves(mask)] == [DocumentRuns, masks.Sinks, masks.Causal, DocumentRuns]
    assert [ids.tolist() for ids in jax.tree.leaves(mask)] == [[0, 0, 1, 1, 2]] * 2
    assert mask.masks[-1].for_kernels() is mask.masks[-1]


@pytest.mark.parametrize(
    ("ids", "is_right"),
    [([0, 0, 1, 1], True), ([1, 1, 2, 2, 0, 0], True), ([3, -1, 2], True), ([0, 0, 1, 0], False)],
)
def test_kernels_reject_repeated_document_ids_if_they_are_concrete(ids, is_right):
    mask = masks.Causal() & masks.Document(ids=np.asarray([[7] * len(ids), ids]))
    message = "there is no kernel for a Document whose ids are not contiguous"
    assert mask.why_no_kernel(tiling()) == (None if is_right else message)
    assert (
        jax.eval_shape(lambda: mask).why_no_kernel(tiling()) is None
    )  # the values of traced ids are unknown


def test_kernel_tile_lists_are_exact_for_descending_document_ids():
    """The usual packing, followed by padding with id 0 or -1."""
    spec = jattn.AttentionSpec(num_q_heads=2, num_kv_heads=2, head_dim=64, causal=False)
    sizes, tokens = PrefillSizes(tile_kv=64, warpgroups=2), 512
    ids = np.r_[np.repeat([1, 2, 3], [100, 120, 130]), np.zeros(162, int)].astype(np.int32)
    lens = jnp.asarray([0, tokens]), jnp.asarray([tokens]), jnp.asarray([0])
    schedule = make_schedule(
        *lens, num_tokens=tokens, score=Score(scale=1.0, causal=False), sizes=sizes, has_lists=True
    )
    bounds, mask = tile_lists.MaskBounds(tokens, is_aligned=False), masks.Document(ids=ids).for_kernels()
    codes = np.asarray(tile_lists.packed_codes(mask, spec, schedule, sizes, bounds))[:, 0]
    seen = ids[:, None] == ids[None, :]
    any_visible = seen.reshape(-1, sizes.tile_q, tokens // 64, 64).any(axis=(1, 3))
    np.testing.assert_array_equal((codes != 0)[: len(any_visible), : any_visible.shape[1]], any_visible)


def test_attention_with_descending_document_ids_equals_separate_calls():
    ids = jnp.asarray([1] * 9 + [2] * 7 + [0] * 4, jnp.int32)
    q, k, v = (jax.random.normal(jax.random.key(h), (1, 20, h, 8)) for h in (4, 2, 2))
    for given_ids in (ids, jnp.roll(ids, 2)):  # rolled, 0 comes again
        out = jattn.attention(q, k, v, causal=True, mask=masks.Document(ids=given_ids))
        expected = jattn.attention(q, k, v, causal=True, mask=given_ids[:, None] == given_ids[None, :])
        np.testing.assert_allclose(out, expected, atol=1e-6)
