"""Heads as rows of queries: gradients against float64, on a CPU and a GPU, and the masks they apply to."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jattn
from jattn import masks
from jattn.implementations import mosaic_gpu
from jattn.implementations.mosaic_gpu import backward
from jattn.implementations.mosaic_gpu.query_rows import heads_to_rows, num_rows_per_token, rows_to_heads
from jattn.implementations.region_inputs import OutputGradients, RegionInputs
from pallas_kernels import architectures
from pallas_kernels.shared.score import Score
from tests.pallas_kernels.varlen_backward.backward_problem import BackwardProblem, Setting

LENS, ALIGNED_LENS = (70, 3, 150), (72, 8, 150)
SLOW = pytest.mark.slow
RNG = np.random.default_rng(8)


def selected(kv_heads, block_q, block_kv, *, reqs=3, tokens=160):
    """Return a mask in which each block of queries of each KV head selects blocks of keys."""
    shape = reqs, kv_heads, -(-tokens // block_q), -(-tokens // block_kv)
    return masks.BlockMask(blocks=RNG.random(shape) < 0.3, block_q=block_q, block_kv=block_kv)


# Name -> heads, mask, and rows per token.
CASES = {
    "16_heads": ((32, 2), selected(2, 1, 64), 16),
    "8_heads": ((8, 1), selected(1, 1, 32), 8),
    "4_heads": ((8, 2), selected(2, 1, 64), 4),
    "2_heads": ((4, 2), selected(2, 2, 16), 2),
    "64_heads": ((64, 1), selected(1, 1, 32), 64),
    "blocks_of_32": ((8, 2), selected(1, 32, 32), 2),
    "blocks_of_4": ((16, 1), selected(1, 4, 64), 16),
    "two_masks": ((8, 1), selected(1, 1, 32) & selected(1, 16, 16), 8),
}


def problem_of(name, *, head_dim=128, query_lens=None, is_aligned=False, **changes):
    heads, mask, _ = CASES[name]
    lens = ALIGNED_LENS if is_aligned else LENS
    score = Score(scale=head_dim**-0.5, **changes)
    setting = Setting(
        query_lens=query_lens or lens, seq_lens=lens, score=score, heads=heads, head_dim=head_dim, mask=mask,
        has_grad_lse=True, is_aligned=is_aligned,
    )  # fmt: skip
    return BackwardProblem(setting)


def rows_per_token(mask, q_heads, kv_heads, *, num_tokens=8192, num_reqs=1):
    spec = spec_of_heads(q_heads, kv_heads)
    return num_rows_per_token(mask, spec, num_tokens=num_tokens, num_reqs=num_reqs)


def spec_of_heads(q_heads, kv_heads):
    return jattn.AttentionSpec(num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=128)


def spec_of(problem):
    setting, score = problem.setting, problem.setting.score
    return jattn.AttentionSpec(
        num_q_heads=setting.heads[0], num_kv_heads=setting.heads[1], head_dim=setting.head_dim,
        causal=score.causal, window=None if score.window == (None, None) else score.window,
        chunk_size=score.chunk_size, scale=score.scale,
    )  # fmt: skip


def grads_of(problem, interpret=None):
    """Return the gradients of a problem."""
    setting, arrays = problem.setting, problem.arguments
    metadata = jattn.build_batch_metadata(setting.query_lens, setting.seq_lens, None)
    kv = jattn.PackedKV(
        k=arrays["key"], v=arrays["value"], kv_start_loc=arrays["kv_start_loc"],
        is_in_order=True, is_aligned=setting.is_aligned,
    )  # fmt: skip
    outputs = OutputGradients(arrays["out"], arrays["lse"], arrays["grad_out"], arrays["grad_lse"])

    @jax.jit
    def run(query, kv, mask, outputs):
        inputs = RegionInputs(query=query, kv=kv, metadata=metadata, mask=mask, spec=spec_of(problem))
        return mosaic_gpu.gradients(inputs, outputs, interpret=interpret)

    return run(arrays["query"], kv, setting.mask, outputs)


def test_heads_that_share_a_mask_are_rows_as_long_as_blocks_fit_in_a_tile():
    for heads, mask, expected in CASES.values():
        assert rows_per_token(mask, *heads) == expected
    assert rows_per_token(selected(2, 64, 64), 8, 2) == 1
    assert rows_per_token(selected(8, 1, 64), 8, 2) == 1  # each head has its own blocks
    assert rows_per_token(selected(1, 1, 64), 24, 8) == 1  # no power of two
    assert rows_per_token(selected(1, 1, 64), 8, 4) == 1  # a tile would have 32 tokens
    assert rows_per_token(selected(1, 1, 1), 8, 2) == 1  # single keys
    assert rows_per_token(selected(1, 1, 64) & masks.Window(left=9), 8, 2) == 1


@pytest.mark.parametrize(("tokens", "reqs", "rows"), [(65_000, 1, 64), (65_536, 1, 32), (65_000, 640, 32)])
def test_rows_of_a_batch_fit_in_lists_of_tiles(tokens, reqs, rows):
    assert rows_per_token(selected(1, 1, 64), 64, 1, num_tokens=tokens, num_reqs=reqs) == rows
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    lse = jax.ShapeDtypeStruct((64, tokens), jnp.float32)
    metadata = jattn.build_batch_metadata([tokens // reqs] * reqs, [tokens // reqs] * reqs, None)
    spec, mask = spec_of_heads(64, 1), selected(1, 1, 64, reqs=1, tokens=tokens)

    def run(query, key, outputs):
        kv = jattn.PackedKV(k=key, v=key, kv_start_loc=metadata.query_start_loc[:-1], is_in_order=True)
        inputs = RegionInputs(query=query, kv=kv, metadata=metadata, mask=mask, spec=spec)
        return mosaic_gpu.gradients(inputs, outputs)

    query = array(tokens, 64, 128)
    dq, _, _ = jax.eval_shape(run, query, array(tokens, 1, 128), OutputGradients(query, lse, query, None))
    assert dq.shape == query.shape


def test_rows_of_a_token_are_consecutive_heads():
    x = jnp.arange(2 * 6 * 1).reshape(2, 6, 1)
    rows = heads_to_rows(x, 3)
    assert rows[..., 0].tolist() == [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]]
    np.testing.assert_array_equal(rows_to_heads(rows, 3), x)


def interpreted_grads_of(problem):
    """Return the interpreted gradients of a problem, with one thread block of dq: idle ones run, too."""

    def sizes_with_one_block(*arguments, **options):
        sizes = backward_sizes(*arguments, **options)
        return dataclasses.replace(sizes, dq_sizes=dataclasses.replace(sizes.dq_sizes, ctas=1))

    backward_sizes = backward.backward_sizes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backward, "backward_sizes", sizes_with_one_block)
        return grads_of(problem, interpret=plgpu.InterpretGPUParams())


@pytest.mark.kernels
class TestInterpreted:
    @pytest.mark.parametrize(
        ("name", "changes"),
        [
            ("16_heads", {}),
            ("16_heads", {"is_aligned": True}),
            pytest.param("8_heads", {"window": (40, None), "is_aligned": True}, marks=SLOW),
            ("4_heads", {"query_lens": (20, 3, 150)}),
            pytest.param("4_heads", {"causal": False, "head_dim": 64}, marks=SLOW),
            pytest.param("2_heads", {"chunk_size": 48}, marks=SLOW),
            pytest.param("64_heads", {}, marks=SLOW),
            pytest.param("blocks_of_32", {}, marks=SLOW),
            pytest.param("blocks_of_4", {"head_dim": 256}, marks=SLOW),
            pytest.param("two_masks", {"is_aligned": True}, marks=SLOW),
        ],
    )
    def test_gradients_equal_float64(self, name, changes):
        problem = problem_of(name, **changes)
        problem.check(interpreted_grads_of(problem))

    @pytest.mark.slow
    def test_gradients_of_an_older_architecture_equal_float64(self):
        problem = problem_of("16_heads", window=(40, None))
        with architectures.target("8.0"):
            problem.check(interpreted_grads_of(problem))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "changes", [{}, {"is_aligned": True}, {"window": (40, None), "head_dim": 64, "is_aligned": True}]
)
def test_gradients_on_a_gpu_equal_float64(name, changes):
    problem = problem_of(name, **changes)
    problem.check(grads_of(problem))
