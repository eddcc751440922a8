"""Checks of the kernels on problems that split requests into several tiles and spans, as in the contract."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jattn
from jattn import masks
from jattn.implementations.mosaic_gpu import tile_lists
from pallas_kernels import paged_decode, varlen_backward, varlen_prefill
from pallas_kernels.shared.score import Score
from pallas_kernels.varlen_prefill import sizes as prefill_sizes
from tests import contract
from tests.attention_problems import AttentionProblem, Setting
from tests.implementations.mosaic_gpu import test_query_rows, test_score_mods
from tests.pallas_kernels.varlen_backward import backward_problem, test_tile_lists
from tests.pallas_kernels.varlen_prefill import test_rows_per_token
from tests.pallas_kernels.varlen_prefill.split_everywhere import MOST, split_every_tile
from tests.score_functions import relative, scaled

WINDOW = (100, 0)
# Each block of queries sees its own block of keys.
BLOCKS = (np.random.default_rng(0).random((4, 5, 5)) < 0.4) | np.eye(5, dtype=bool)


def problem_of(query_lens, seq_lens, window=None, head_dim=64, **setting) -> AttentionProblem:
    spec = jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=head_dim, window=window)
    lens = {"query_lens": query_lens, "seq_lens": seq_lens}
    return AttentionProblem(Setting(spec=spec, dtype="bfloat16", **lens, **setting))


def score_of(spec: jattn.AttentionSpec) -> Score:
    return Score(scale=spec.softmax_scale, window=spec.window or (None, None))


def run(kernel, problem: AttentionProblem, **arrays) -> None:
    """Run a kernel in interpret mode and check its results."""
    kernel = functools.partial(kernel, score=score_of(problem.spec), interpret=plgpu.InterpretGPUParams())
    problem.check(*jax.jit(kernel)(jnp.asarray(problem.query), problem.kv.k, problem.kv.v, **arrays))


# Few thread blocks, so that a span has more tiles than stages.
CP_ASYNC = paged_decode.DecodeSizes(stages=2, ctas=2, per_warp_mma=True, gpu="8.0", uses_tma=False)


def check_decode(window=None, split_kv=None, sizes=None) -> None:
    """Check a request with one key, and two that are split into tiles and spans."""
    problem = problem_of([1, 1, 1], [330, 1, 200], window)
    sizes = sizes or paged_decode.DecodeSizes(stages=2, ctas=12, split_kv=split_kv)
    metadata = problem.metadata
    arrays = {"block_table": metadata.block_table, "seq_lens": metadata.seq_lens}
    run(functools.partial(paged_decode.paged_decode, sizes=sizes), problem, **arrays)


# Prefill on GPUs without wgmma.
PER_WARP = varlen_prefill.PrefillSizes(
    tile_kv=64, stages=2, warpgroups=1, query_buffers=1, ctas=3, per_warp_mma=True, gpu="8.0"
)
PER_WARP_BACKWARD = varlen_backward.BackwardSizes(stages=1, ctas=3, dq_sizes=PER_WARP)


def check_prefill(window=None, max_splits=1, sizes=None) -> None:
    """Check prompts of several tiles, one with context."""
    problem = problem_of([150, 3, 70], [150, 3, 270], window)
    sizes = sizes or varlen_prefill.PrefillSizes(tile_kv=64, ctas=3, max_splits=max_splits)
    metadata = problem.metadata
    lens = {"query_start_loc": metadata.query_start_loc, "seq_lens": metadata.seq_lens}
    kernel = functools.partial(varlen_prefill.varlen_prefill, sizes=sizes, return_lse=True)
    run(kernel, problem, block_table=metadata.block_table, **lens)


def check_splits() -> None:
    """Check the same prompts with the keys of each tile divided into splits."""
    with pytest.MonkeyPatch.context() as patch:
        split_every_tile(patch)
        check_prefill(max_splits=MOST)


def check_packed_heads() -> None:
    """Check short requests with packed GQA heads, which have different slopes and sinks."""
    problem = problem_of([40, 3, 70], [150, 3, 270], has_alibi=True, has_sinks=True)
    sizes = varlen_prefill.PrefillSizes(tile_kv=64, ctas=3, pack_gqa=2)
    metadata = problem.metadata
    lens = {"query_start_loc": metadata.query_start_loc, "seq_lens": metadata.seq_lens}
    per_head = {"alibi_slopes": jnp.asarray(problem.slopes), "sinks": jnp.asarray(problem.sinks)}
    kernel = functools.partial(varlen_prefill.varlen_prefill, sizes=sizes, return_lse=True)
    run(kernel, problem, block_table=metadata.block_table, **lens, **per_head)


def check_prefill_rows() -> None:
    """Check prompts whose rows are 16 heads of each token, with different sinks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contract, "REGIONS", contract.REGIONS | test_rows_per_token.REGIONS)
        few = dataclasses.replace(prefill_sizes.LIST_TABLE[128], ctas=2)
        patch.setattr(prefill_sizes, "LIST_TABLE", prefill_sizes.LIST_TABLE | {128: few})
        case = {"blocks": (1, 64), "region": "prompts", "kv": "no_cache", "sinks": True}
        test_rows_per_token.solved(case, plgpu.InterpretGPUParams())


def check_quantized() -> None:
    """Check 8-bit keys and values with a scale per KV head and head_dim 128."""
    problem = problem_of([40, 3, 70], [150, 3, 270], head_dim=128, stored="fp8_head")
    sizes = varlen_prefill.PrefillSizes(tile_kv=64, ctas=3)
    metadata, kv = problem.metadata, problem.kv
    lens = {"query_start_loc": metadata.query_start_loc, "seq_lens": metadata.seq_lens}
    scales = {"k_scale": jnp.asarray(kv.stored_k_scale), "v_scale": jnp.asarray(kv.stored_v_scale)}
    kernel = functools.partial(varlen_prefill.varlen_prefill, sizes=sizes, return_lse=True)
    run(kernel, problem, block_table=metadata.block_table, **lens, **scales)


def check_lists(sizes=None) -> None:
    """Check tile lists: blocks that differ by head, and a mask that is evaluated in the kernel."""
    mask = masks.BlockMask(blocks=BLOCKS, block_q=64, block_kv=64) & masks.Dilated(400, 3)
    visible = lambda r, h, i, j: bool(BLOCKS[h, i // 64, j // 64]) and abs(i - j) % 3 == 0
    problem = problem_of([150, 3, 270], [150, 3, 270], visible=visible)
    sizes = sizes or varlen_prefill.PrefillSizes(tile_kv=64, ctas=3)
    metadata, spec = problem.metadata, problem.spec

    def kernel(query, key, value, query_start_loc, seq_lens, block_table, **options):
        make = functools.partial(varlen_prefill.make_schedule, num_tokens=query.shape[0], has_lists=True)
        schedule = make(query_start_loc, seq_lens, score=options["score"], sizes=sizes)
        bounds = tile_lists.MaskBounds(block_table.shape[1] * metadata.block_size)
        planned = tile_lists.plan_mask(mask, spec, schedule, sizes, bounds)
        return varlen_prefill.varlen_prefill(
            query, key, value, query_start_loc, seq_lens, block_table=block_table, sizes=sizes,
            schedule=schedule, lists=planned.lists, mask=planned.pair_mask, return_lse=True, **options,
        )  # fmt: skip

    lens = {"query_start_loc": metadata.query_start_loc, "seq_lens": metadata.seq_lens}
    run(kernel, problem, block_table=metadata.block_table, **lens)


def check_backward(window=(None, None), *, deterministic=False, sizes=None) -> None:
    """Check documents of several tiles, one with context."""
    score = Score(scale=0.125, window=window)
    lens = {"query_lens": (150, 3, 270), "seq_lens": (150, 3, 300)}
    problem = backward_problem.BackwardProblem(backward_problem.Setting(score=score, heads=(4, 2), **lens))
    dq_sizes = varlen_prefill.PrefillSizes(ctas=3, stages=3) if deterministic else None
    sizes = sizes or varlen_backward.BackwardSizes(tile_q=128, ctas=3, dq_sizes=dq_sizes)
    static = {"sizes": sizes, "interpret": plgpu.InterpretGPUParams()}
    kernel = functools.partial(varlen_backward.varlen_backward, score=score, **static)
    problem.check(jax.jit(kernel)(**problem.arguments))


def check_backward_lists(mask="strided") -> None:
    """Check two backward kernels over lists: blocks of 64, two per key tile, or bits of a mask's arrays."""
    problem, sizes = test_tile_lists.problem_of(mask), test_tile_lists.two_kernels(64)
    interpret = plgpu.InterpretGPUParams()
    problem.check(test_tile_lists.grads_of(problem, sizes=sizes, interpret=interpret))


def check_backward_blocks() -> None:
    """Check a backward kernel whose tiles hold two listed blocks of 32 queries, or one."""
    problem = test_tile_lists.problem_of("small_blocks", lens=(3, 150))
    sizes = test_tile_lists.one_block(test_tile_lists.sizes_for(problem))
    problem.check(test_tile_lists.grads_of(problem, sizes=sizes, interpret=plgpu.InterpretGPUParams()))


def check_query_rows() -> None:
    """Check backward kernels whose rows are four heads of each query, over lists in four splits."""
    problem = test_query_rows.problem_of("4_heads")
    problem.check(test_query_rows.interpreted_grads_of(problem))


def check_score_mod() -> None:
    """Check prompts with lookups by distance."""
    test_score_mods.check(relative, test_score_mods.PREFILL, kv="NHD")


def check_score_mod_gradients() -> None:
    """Check gradients of a score function with derivatives of both signs."""
    test_score_mods.check_gradients(scaled)
