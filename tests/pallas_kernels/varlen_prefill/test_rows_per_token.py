"""varlen_prefill with query heads as rows of one head, under masks that they share: against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jattn
from jattn import masks
from jattn.implementations.mosaic_gpu import prefill
from pallas_kernels import architectures
from pallas_kernels.varlen_prefill import varlen_prefill
from tests import contract
from tests.attention_problems import PACKED_KV
from tests.contract import FACTORS, case_id
from tests.covering_array import covering_array, select_each_value
from tests.pallas_kernels.varlen_prefill.tile_list_problem import TileListCase
from tests.regions import attend_region, kernel_for

pytestmark = pytest.mark.usefixtures("few_thread_blocks")

INTERPRET = plgpu.InterpretGPUParams()
REGIONS = {
    "prompts": ([150, 0, 3, 70], [150, 0, 3, 70], 1),
    "behind": ([70, 3, 31], [370, 130, 232], 1),
    "prompt_206": ([206], [206], 1),
}
RNG = np.random.default_rng(3)
FIRST = np.array([2, 0, 3, 1], np.int32)
BLOCKS = {
    (block_q, block_kv): RNG.random((2, 384 // block_q, 384 // block_kv)) < 0.3
    for block_q, block_kv in ((1, 64), (1, 32), (2, 16), (4, 128))
}
CHOICES = {
    "blocks": list(BLOCKS),
    "first": [False, True],
    "heads": [(32, 2), (32, 1), (64, 2)],
    "region": ["prompts", "behind"],
    "causal": [True, False],
    "window": [None, (200, None)],
    "soft_cap": [None, 5.0],
    "alibi": [None, None, None, "linear"],  # without rows per token
    "stored": ["plain", "plain", "fp8_scalar"],
    "sinks": [False, True],
    "head_dim": [64, 128, 256],
    "dtype": ["bfloat16", "float16"],
    "kv": ["NHD", "HND", *PACKED_KV],
    "block_size": [16, 64],
}
CASES = covering_array(
    CHOICES, lambda case: case.get("kv") not in PACKED_KV or case.get("stored") != "fp8_scalar"
)


@pytest.fixture(autouse=True)
def _regions(monkeypatch):
    monkeypatch.setattr(contract, "REGIONS", contract.REGIONS | REGIONS)


def solved(case, interpret=None, *, is_sparse=False):
    """Check a region's outputs; with `is_sparse` only blocks that some query selects contain numbers."""
    plain = {name: values[0] for name, values in FACTORS.items()}
    defaults = {"heads": (32, 2), "dtype": "bfloat16", "head_dim": 128, "block_size": 16, "kv": "NHD"}
    case = plain | defaults | {"first": False} | case
    (block_q, block_kv), (q_heads, kv_heads) = case["blocks"], case["heads"]
    blocks, rows_per_block = BLOCKS[case["blocks"]][:kv_heads], q_heads // kv_heads * block_q
    first = FIRST if case["first"] else np.zeros(4, np.int32)

    def sees(r, h, i, j):
        query = i // block_q - first[r]
        return 0 <= query < blocks.shape[1] and blocks[h * kv_heads // q_heads, query, j // block_kv]

    mask = masks.BlockMask(
        blocks=blocks, first_q_block=first if case["first"] else None, block_q=block_q, block_kv=block_kv
    )
    problem = TileListCase(case, mask=sees, sparse_tile_kv=min(block_kv, 64) if is_sparse else None)
    region = problem.metadata.prefill_region
    kernel = kernel_for(jnp.asarray(problem.query), problem.kv, region, problem.spec, mask)
    assert kernel.rows_per_token == min(rows_per_block, 64) // block_q
    problem.check_region(region, mask, interpret)


@pytest.mark.parametrize(
    "case",
    [
        {"blocks": (1, 64), "kv": "no_cache", "sinks": True},
        {"blocks": (1, 32), "kv": "aligned"},
        {"blocks": (1, 32), "kv": "HND", "region": "behind", "window": (200, None)},
        {"blocks": (4, 128), "heads": (32, 1), "region": "behind", "first": True},
    ],
    ids=case_id,
)
def test_prefill_equals_float64(case):
    solved({"region": "prompts"} | case, INTERPRET)


def test_prefill_on_an_older_architecture_equals_float64():
    with architectures.target("8.0"):
        solved({"region": "prompts", "blocks": (1, 64), "kv": "HND"}, INTERPRET)


@pytest.mark.parametrize("blocks", [(1, 64), (2, 16)], ids=str)
def test_blocks_that_no_token_of_a_tile_selects_are_never_read(blocks):
    case = {"region": "prompt_206", "blocks": blocks, "kv": "HND", "heads": (32, 1), "causal": False}
    solved(case, INTERPRET, is_sparse=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_prefill_equals_float64_for_combinations_of_features(case):
    solved(case, INTERPRET)


@pytest.mark.gpu
@pytest.mark.parametrize("case", select_each_value(CASES), ids=case_id)
def test_prefill_equals_float64_on_a_gpu(case):
    solved(case)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_blocks_that_no_token_of_a_tile_selects_are_never_read_on_a_gpu(blocks):
    solved({"region": "prompt_206", "blocks": blocks, "kv": "HND", "causal": False}, is_sparse=True)


def test_few_heads_are_packed_by_tma_instead():
    """Packed heads need no copy of the queries; without wgmma, tiles cannot pack heads of a mask."""
    spec = jattn.AttentionSpec(num_q_heads=16, num_kv_heads=2, head_dim=128)
    metadata = jattn.build_batch_metadata([128], [128], None)
    query, key = (jnp.zeros((128, heads, 128), jnp.bfloat16) for heads in (16, 2))
    kv = jattn.PackedKV(k=key, v=key, kv_start_loc=jnp.zeros(1, jnp.int32), is_in_order=True)
    mask = masks.BlockMask(blocks=BLOCKS[1, 64], block_q=1, block_kv=64)
    kernel = kernel_for(query, kv, metadata, spec, mask)
    assert (kernel.rows_per_token, kernel.sizes.pack_gqa) == (1, 8)
    assert kernel.tiles.endswith("8 heads of 8 tokens each")
    with architectures.target("8.0"):
        kernel = kernel_for(query, kv, metadata, spec, mask)
    assert (kernel.rows_per_token, kernel.sizes.pack_gqa) == (8, 1)
    assert kernel.tiles.endswith("8 heads of 8 tokens each")


def test_heads_with_alibi_are_packed_by_tma(monkeypatch):
    """A row of several heads has no slope, but tiles of one head would visit the keys of 64 tokens."""
    called = []

    def record(*args, **options):
        called.append((options["score"].rows_per_token, options["sizes"].pack_gqa))
        return varlen_prefill(*args, **options)

    monkeypatch.setattr(prefill, "varlen_prefill", record)
    spec = jattn.AttentionSpec(num_q_heads=32, num_kv_heads=2, head_dim=128)
    metadata = jattn.build_batch_metadata([128], [128], None)
    query, key = (jnp.zeros((128, heads, 128), jnp.bfloat16) for heads in (32, 2))
    kv = jattn.PackedKV(k=key, v=key, kv_start_loc=jnp.zeros(1, jnp.int32), is_in_order=True)
    mask = masks.BlockMask(blocks=BLOCKS[1, 64], block_q=1, block_kv=64)
    run = functools.partial(attend_region, kv=kv, metadata=metadata, spec=spec, mask=mask)
    for slopes in (None, jnp.ones(32)):
        jax.eval_shape(functools.partial(run, alibi_slopes=slopes), query)
    assert called == [(16, 1), (1, 8)]


@pytest.mark.parametrize("changes", [{"batch_invariant": True}, {"score_mod": True}])
def test_a_row_that_must_tell_its_head_or_repeat_its_bits_is_one_token(changes):
    spec = jattn.AttentionSpec(
        num_q_heads=16, num_kv_heads=1, head_dim=128, batch_invariant="batch_invariant" in changes
    )
    metadata = jattn.build_batch_metadata([128], [128], [list(range(1, 9))], block_size=16)
    cache = jattn.PagedCache(k=jnp.zeros((9, 16, 1, 128)), v=jnp.zeros((9, 16, 1, 128)))
    score_mod = jattn.ScoreMod(lambda score, b, h, i, j: 0.5 * score) if "score_mod" in changes else None
    query, mask = jnp.zeros((128, 16, 128)), masks.BlockMask(blocks=BLOCKS[1, 64][:1], block_q=1, block_kv=64)
    as_bf16 = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
    kernel = kernel_for(as_bf16(query), as_bf16(cache), metadata.prefill_region, spec, mask, score_mod)
    assert kernel.rows_per_token == 1
