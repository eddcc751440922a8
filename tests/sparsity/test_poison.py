"""What the lists of a mask leave out is never read: it is NaN here, as is all that no request owns.

`Problem` fills with NaN every slot that no query sees: blocks that are not listed, for the kv head that does
not list them, what stands behind the ends of requests, the null block, padding queries. Nothing is cleaned.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jattn import masks
from jattn.implementations import kernel_work, mosaic_gpu
from tests import contract
from tests.contract import FACTORS, AttentionContract, Problem

# Decodes, prompts, chunks; ends within a block, and requests of whose blocks few are listed.
REGION = {"sparse": ([1, 1, 70, 3], [129, 17, 150, 3], 1)}
RNG = np.random.default_rng(3)
OWN = RNG.random((4, 2, 4, 4)) < 0.4  # [reqs, kv_heads, ...], blocks of 64
OF_ALL = RNG.random((4, 2, 1, 16)) < 0.3  # for all queries, blocks of 16
STRIDED = masks.LocalStrided(block_size=64, local_blocks=1, vert_stride=3, homo_head=True)
MASKS = {
    "blocks": (
        masks.BlockMask(blocks=OWN, block_q=64, block_kv=64),
        lambda r, h, i, j: OWN[r, h // 2, i // 64, j // 64],
    ),
    "of_all_queries": (
        masks.BlockMask(blocks=OF_ALL.repeat(4, axis=3)[..., :4], block_q=None, block_kv=64),
        lambda r, h, i, j: OF_ALL[r, h // 2, 0, j // 64 // 4],
    ),
    "narrow": (
        masks.BlockMask(blocks=OF_ALL, block_q=None, block_kv=16),
        lambda r, h, i, j: OF_ALL[r, h // 2, 0, j // 16],
    ),
    "strided": (
        STRIDED,
        lambda r, h, i, j: j // 64 <= i // 64 and (i // 64 == j // 64 or (j // 64 + 1) % 3 == 0),
    ),
    "both": (
        masks.BlockMask(blocks=OWN, block_q=64, block_kv=64) & STRIDED,
        lambda r, h, i, j: OWN[r, h // 2, i // 64, j // 64] and MASKS["strided"][1](r, h, i, j),
    ),
}
OPTIONS = [("NHD", 16, True), ("HND", 64, False), ("NHD", 32, False), ("HND", 16, True)]


@pytest.fixture(autouse=True)
def _region(monkeypatch):
    monkeypatch.setattr(contract, "REGIONS", contract.REGIONS | REGION)


def problem_of(name, kv, block_size, is_padded):
    """The problem, and the mask with its rows."""
    plain = {factor: values[0] for factor, values in FACTORS.items()}
    mask, rule = MASKS[name]
    case = {"region": "sparse", "heads": (4, 2), "head_dim": 64, "kv": kv, "block_size": block_size}
    case |= {"dtype": "bfloat16", "padded": is_padded}
    problem = Problem(plain | case, mask=rule)
    return problem, mask.of_requests(problem.metadata)


def share_of_poison(problem):
    """How much of requests' whole blocks is NaN."""
    keys, table = np.asarray(problem.kv.k, np.float32), np.asarray(problem.metadata.block_table)
    lens = np.asarray(problem.metadata.seq_lens) // problem.case["block_size"]
    return np.isnan(keys[np.concatenate([row[:num] for row, num in zip(table, lens, strict=True)])]).mean()


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("options", [*OPTIONS, ("packed", 16, True), ("no_cache", 16, False)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_nothing_that_is_left_out_is_read(name, options, implementation):
    problem, mask = problem_of(name, *options)
    plain = AttentionContract()
    plain.implementation = implementation
    problem.check(*plain.attend(problem, mask=mask))


def by_kernels(problem, mask, monkeypatch):
    """Both regions by the interpreted kernels, with few thread blocks."""
    tiles = kernel_work.decode_kernel.Tiles(stages=2, ctas=4)
    monkeypatch.setattr(kernel_work.decode_kernel, "default_tiles", lambda *args, **kwargs: tiles)
    metadata, spec = problem.metadata, problem.spec
    first, rows = metadata.bucket.max_decode_tokens, metadata.bucket.max_decodes

    def run(query, kv, metadata, mask):
        attend = functools.partial(
            mosaic_gpu.attend, spec=spec, sinks=None, alibi_slopes=None, interpret=plgpu.InterpretGPUParams()
        )
        parts = (
            attend(query[:first], kv, metadata.decode_part, mask=mask),
            attend(query[first:], kv, metadata.prefill_part, mask=mask.of_rows_from(rows)),
        )
        outs, lses = zip(*parts, strict=True)
        return jnp.concatenate(outs), jnp.concatenate(lses, axis=1)

    return jax.jit(run)(jnp.asarray(problem.query), problem.kv, metadata, mask)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("of_all_queries", OPTIONS[0]),
        pytest.param("blocks", OPTIONS[1], marks=pytest.mark.slow),
        pytest.param("narrow", OPTIONS[3], marks=pytest.mark.slow),
        pytest.param("strided", OPTIONS[0], marks=pytest.mark.slow),
        pytest.param("both", OPTIONS[2], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_kernels_read_nothing_that_is_left_out(name, options, monkeypatch):
    problem, mask = problem_of(name, *options)
    assert share_of_poison(problem) > 0.2
    problem.check(*by_kernels(problem, mask, monkeypatch))
