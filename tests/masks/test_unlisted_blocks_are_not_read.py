"""Blocks that a mask leaves out are never read: they are NaN here, as are all slots of no request.

`Problem` fills every slot that no query attends to with NaN: blocks that a KV head does not list, slots after
the ends of requests, the null block, and padding queries. The kernels read full tiles of keys, so for them a
tile with at least one visible key is not NaN up to the request's end.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jattn import masks
from jattn.implementations.mosaic_gpu import kernel_selection
from tests import contract, oracle
from tests.contract import FACTORS, AttentionContract, Problem
from tests.regions import attend_region

pytestmark = pytest.mark.kernels  # minutes, together

# Decodes, prompts, chunks; ends within a block, and requests of whose blocks few are listed.
REGIONS = {
    "mixed": ([1, 1, 70, 3], [129, 17, 150, 3], 1),
    "decode": ([1, 1], [129, 17], 1),
    "prefill": ([70, 3], [150, 3], 1),
}
RNG = np.random.default_rng(4)
OWN = RNG.random((4, 2, 5, 5)) < 0.4  # [reqs, kv_heads, ...], blocks of 64
OF_ALL = RNG.random((4, 2, 1, 20)) < 0.3  # for all queries, blocks of 16
STRIDED = masks.LocalStrided(block_size=64, local_blocks=1, vert_stride=3, homo_head=True)
MASKS = {
    "blocks": (
        masks.BlockMask(blocks=OWN, block_q=64, block_kv=64),
        lambda r, h, i, j: OWN[r, h // 2, i // 64, j // 64],
    ),
    "of_all_queries": (
        masks.BlockMask(blocks=OF_ALL.repeat(4, axis=3)[..., :5], block_q=None, block_kv=64),
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
    monkeypatch.setattr(contract, "REGIONS", contract.REGIONS | REGIONS)


def problem_of(name, kv, block_size, is_padded, region="mixed"):
    """Return the problem and the mask with its rows."""
    plain = {factor: values[0] for factor, values in FACTORS.items()}
    mask, rule = MASKS[name]
    case = {"region": region, "heads": (4, 2), "head_dim": 64, "kv": kv, "block_size": block_size}
    case |= {"dtype": "bfloat16", "padded": is_padded}
    problem = Problem(plain | case, mask=rule)
    request_mask = mask.map_rows(lambda array: array[: len(problem.query_lens)])
    return problem, request_mask.to_batch_rows(problem.metadata)


def poisoned_fraction(problem):
    """Return the fraction of the requests' full blocks that is NaN."""
    keys, table = np.asarray(problem.kv.k, np.float32), np.asarray(problem.metadata.block_table)
    lens = np.asarray(problem.metadata.seq_lens) // problem.case["block_size"]
    return np.isnan(keys[np.concatenate([row[:num] for row, num in zip(table, lens, strict=True)])]).mean()


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("blocks", OPTIONS[0]),
        ("blocks", ("packed", 16, True)),
        ("of_all_queries", OPTIONS[1]),
        ("of_all_queries", ("no_cache", 16, True)),
        ("narrow", OPTIONS[3]),
        ("strided", ("no_cache", 16, False)),
        ("both", OPTIONS[2]),
    ],
    ids=str,
)
def test_attend_does_not_read_masked_blocks(name, options, implementation):
    problem, mask = problem_of(name, *options)
    plain = AttentionContract()
    plain.implementation = implementation
    problem.check(*plain.attend(problem, mask=mask))


def read_in_tiles(size):
    """Return a variant of `oracle.reachable` that reaches all keys of a tile with a visible key."""

    def reachable(spec, step):
        bidirectional_spec = dataclasses.replace(spec, causal=False)
        tiles = lambda visible: np.add.reduceat(visible, np.arange(0, len(visible), size)) > 0
        return [
            tiles(visible).repeat(size, axis=0)[: len(visible)] for visible in fine(bidirectional_spec, step)
        ]

    fine = oracle.reachable
    return reachable


@pytest.mark.parametrize(
    ("region", "name", "options", "tile"),
    [
        ("decode", "narrow", OPTIONS[0], 16),
        pytest.param("decode", "of_all_queries", OPTIONS[1], 64, marks=pytest.mark.slow),
        pytest.param("decode", "blocks", OPTIONS[3], 64, marks=pytest.mark.slow),
        pytest.param("decode", "strided", OPTIONS[2], 64, marks=pytest.mark.slow),
        pytest.param("prefill", "of_all_queries", OPTIONS[0], 64, marks=pytest.mark.slow),
        pytest.param("prefill", "blocks", OPTIONS[1], 64, marks=pytest.mark.slow),
        pytest.param("prefill", "strided", OPTIONS[2], 64, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_kernels_do_not_read_masked_blocks(region, name, options, tile, monkeypatch):
    sizes = kernel_selection.decode_kernel.DecodeSizes(stages=2, ctas=4)
    monkeypatch.setattr(kernel_selection.decode_kernel, "default_sizes", lambda *args, **kwargs: sizes)
    monkeypatch.setattr(oracle, "reachable", read_in_tiles(tile))
    problem, mask = problem_of(name, *options, region=region)
    assert poisoned_fraction(problem) > 0.2
    first = problem.metadata.bucket.max_decodes if region == "prefill" else 0
    tokens = problem.metadata.bucket.max_decode_tokens
    part = slice(tokens, None) if region == "prefill" else slice(0, tokens)

    def run(query, kv, metadata, mask):
        region_metadata = getattr(metadata, f"{region}_region")
        how = {"mask": mask.slice_rows(first), "interpret": plgpu.InterpretGPUParams()}
        return attend_region(query[part], kv, region_metadata, problem.spec, **how)

    out, lse = jax.jit(run)(jnp.asarray(problem.query), problem.kv, problem.metadata, mask)
    rest = len(problem.query) - len(out)
    before, after = (rest, 0) if region == "prefill" else (0, rest)
    out = jnp.pad(out, ((before, after), (0, 0), (0, 0)))
    problem.check(out, jnp.pad(lse, ((0, 0), (before, after)), constant_values=-jnp.inf))
