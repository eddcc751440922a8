"""varlen_prefill over the keys of one of several ranks, against the reference over all keys of a request."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jattn
from jattn import masks
from jattn.batch.context_parallel import get_dcp_local_seq_lens
from jattn.masks.sharded import visible_range
from jattn.pytree import replace
from tests.masks.mask_rules import tiling
from tests.regions import attend_region

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 2, 1, 64, 16
QUERY_LENS, SEQ_LENS = [70, 3], [150, 40]
INNER = {
    "causal": masks.Window() & masks.Causal(),
    "window": masks.Window(70, None) & masks.Causal(),
    "both sides": masks.Window(40, 9),
    "chunks": masks.Window() & masks.Causal() & masks.Chunked(48),
}


def step_of(lens, block_size):
    counts = [-(-length // block_size) for length in lens]
    table = np.split(np.random.default_rng(0).permutation(sum(counts)), np.cumsum(counts)[:-1])
    return jattn.build_batch_metadata(QUERY_LENS, lens, table, block_size=block_size, decode_query_len=999)


def cache_of(keys, metadata, positions):
    """Return a cache of the keys at some positions of each request, stored contiguously."""
    cache = jattn.PagedCache.create(
        jattn.CacheSpec(num_blocks=64, block_size=BLOCK, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    )
    rows = np.repeat(
        np.arange(len(positions)), [len(positions_of_request) for positions_of_request in positions]
    )
    local_positions = np.concatenate(
        [np.arange(len(positions_of_request)) for positions_of_request in positions]
    )
    slots = np.asarray(metadata.block_table)[rows, local_positions // BLOCK] * BLOCK + local_positions % BLOCK
    taken = [
        jnp.asarray(np.concatenate([np.asarray(array)[r, p] for r, p in enumerate(positions)]))
        for array in keys
    ]
    return jattn.write_kv(cache, *taken, jnp.asarray(slots))


@pytest.mark.usefixtures("few_thread_blocks")
@pytest.mark.parametrize(
    ("name", "size", "interleave"),
    [("causal", 2, 1), ("window", 3, 4), ("both sides", 2, 4), ("chunks", 3, 1)],
)
def test_prefill_uses_global_positions_of_a_ranks_keys(name, size, interleave):
    rng = np.random.default_rng(1)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    keys = [normal(len(SEQ_LENS), max(SEQ_LENS), KV_HEADS, HEAD_DIM) for _ in range(2)]
    query = normal(sum(QUERY_LENS), HEADS, HEAD_DIM)
    rank = size - 1
    stored = [[p for p in range(n) if p // interleave % size == rank] for n in SEQ_LENS]
    lens = get_dcp_local_seq_lens(SEQ_LENS, size, rank, interleave)
    assert [len(positions_of_request) for positions_of_request in stored] == lens.tolist()
    whole = step_of(SEQ_LENS, BLOCK)
    # The kernel receives the rank's keys, stored contiguously, and the queries after them.
    local = replace(whole, seq_lens=jnp.asarray(lens))
    arrays = {"rank": jnp.int32(rank), "shift": jnp.asarray(SEQ_LENS, jnp.int32) - lens}
    mask = masks.InterleavedMask(mask=INNER[name], **arrays, num_ranks=size, interleave=interleave)
    spec = jattn.AttentionSpec(num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, causal=False)
    run = lambda query, cache: attend_region(
        query, cache, local, spec, mask=mask, interpret=plgpu.InterpretGPUParams()
    )
    out, lse = jax.jit(run)(query, cache_of(keys, local, stored))
    is_mine = masks.MaskFunction(lambda head, query, key: key // interleave % size == rank)
    all_keys = cache_of(keys, whole, [list(range(n)) for n in SEQ_LENS])
    options = {"implementation": "reference", "return_lse": True}
    expected, expected_lse = jattn.attend(query, all_keys, whole, spec, mask=INNER[name] & is_mine, **options)
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(expected, np.float32), atol=2e-2)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-2)


def test_unsupported_features_are_rejected_by_name():
    arrays = {"rank": jnp.int32(0), "shift": jnp.zeros(1, jnp.int32)}
    mask = masks.InterleavedMask(
        mask=masks.LocalStrided() & masks.Causal(), **arrays, num_ranks=2, interleave=1
    )
    assert "no kernel for a LocalStrided over keys on several devices" in str(mask.why_no_kernel(tiling()))


def test_windows_longer_than_any_request_hide_no_key():
    query = jnp.asarray([0, 7, 300])
    low, high = visible_range(masks.Window(2**31 - 1, 2**31 - 1), query)
    assert low.tolist() == [0, 0, 0]
    assert high is None
