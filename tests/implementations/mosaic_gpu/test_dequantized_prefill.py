"""Prompts over 8-bit caches: any number of passes gives the same bits, and memory is bounded by a budget."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jattn
from jattn import masks
from jattn.implementations.mosaic_gpu import dequantized_prefill
from pallas_kernels.varlen_prefill import sizes as sizes_module
from tests import contract
from tests.contract import Problem
from tests.pallas_kernels.varlen_prefill.split_everywhere import split_every_tile
from tests.pallas_kernels.varlen_prefill.tile_list_problem import TileListCase
from tests.regions import attend_region

pytestmark = pytest.mark.kernels  # minutes, together

# Several requests of a pass, one alone, an empty one between, the longest last.
REGIONS = {"groups": ([20, 0, 3, 17, 5], [90, 0, 130, 70, 250], 1), "two": ([9, 30], [200, 131], 1)}
DILATED = masks.Dilated(20, 5)
sees_dilated = lambda r, h, i, j: abs(i - j) % 5 == 0 and abs(i - j) <= 100


@pytest.fixture
def attended(monkeypatch):
    """Return output and LSE of the problem's region by interpreted kernels, in passes of at most
    `num_bytes`.
    """
    monkeypatch.setattr(contract, "REGIONS", contract.REGIONS | REGIONS)
    for name in ("TABLE", "LIST_TABLE"):  # interpreted, thread blocks without work take time too
        few = {k: dataclasses.replace(sizes, ctas=2) for k, sizes in getattr(sizes_module, name).items()}
        monkeypatch.setattr(sizes_module, name, few)

    def run(problem, mask, max_bytes):
        monkeypatch.setattr(dequantized_prefill, "MAX_BYTES", max_bytes)
        attend = functools.partial(
            attend_region, spec=problem.spec, mask=mask, interpret=plgpu.InterpretGPUParams()
        )
        query, metadata = jnp.asarray(problem.query), problem.metadata.prefill_region
        sinks = None if problem.sinks is None else jnp.asarray(problem.sinks)
        return jax.jit(attend)(query, problem.kv, metadata, sinks=sinks)

    return run


CASES = {
    "by token": {"region": "groups", "stored": "int8_token_head", "sinks": True},
    "window": {"region": "groups", "stored": "fp8_scalar", "window": (40, None), "kv": "HND"},
    "chunk": {"region": "two", "stored": "int8_scalar", "chunk_size": 70},
    "splits": {"region": "groups", "stored": "int8_k_only", "sinks": True},
    "mask": {"region": "two", "stored": "int8_static_v", "mask": DILATED, "window": (64, None)},
}


SLOW = ("window", "chunk")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]
)
def test_passes_of_one_request_and_a_single_pass_have_the_same_bits(attended, name, monkeypatch):
    """Splits, too, where their number does not depend on the pass."""
    case = dict(CASES[name])
    cuts = split_every_tile(monkeypatch) if name == "splits" else []
    mask = case.pop("mask", None)
    plain = {factor: values[0] for factor, values in contract.FACTORS.items()}
    case = plain | {"heads": (2, 1), "head_dim": 64, "block_size": 16, "dtype": "bfloat16"} | case
    problem = Problem(case) if mask is None else TileListCase(case, mask=sees_dilated)
    metadata = problem.metadata.prefill_region
    at_once = attended(problem, mask, 2**31)
    assert dequantized_prefill.buffer_len(metadata, problem.spec) == dequantized_prefill.worst_buffer_len(
        metadata, problem.spec
    )
    problem.check(*at_once)
    in_passes = attended(problem, mask, 0)
    assert dequantized_prefill.buffer_len(metadata, problem.spec) < dequantized_prefill.worst_buffer_len(
        metadata, problem.spec
    )
    np.testing.assert_array_equal(at_once[0], in_passes[0])
    # XLA's CPU code computes an interpreted logarithm in a vector or alone; the last bits differ.
    np.testing.assert_allclose(at_once[1], in_passes[1], rtol=1e-6)
    assert len(cuts) == 2 * (name == "splits")


LLAMA = jattn.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
PROMPTS = jattn.Bucket(max_prefills=16, max_prefill_tokens=8192, max_blocks=131072 // 16)


def metadata_of(bucket):
    return jattn.batch.metadata.abstract_metadata(bucket, 16)


@pytest.mark.parametrize(
    ("changes", "worst", "rows"),
    [
        ({}, 16 * 131072, 2**31 // 4096),
        # The tokens' own keys, and 16 windows including the tiles at their ends.
        ({"window": (4095, 0)}, 76800, 76800),
        ({"chunk_size": 8192}, 8192 + 16 * (8192 + 192), 8192 + 16 * (8192 + 192)),
    ],
)
def test_memory_does_not_grow_with_requests_times_their_longest_length(changes, worst, rows):
    spec = dataclasses.replace(LLAMA, **changes)
    assert dequantized_prefill.worst_buffer_len(metadata_of(PROMPTS), spec) == worst
    assert dequantized_prefill.buffer_len(metadata_of(PROMPTS), spec) == rows


def test_the_longest_request_always_fits():
    bucket = dataclasses.replace(PROMPTS, max_blocks=2**20 // 16)
    assert dequantized_prefill.buffer_len(metadata_of(bucket), LLAMA) == 2**20


WINDOWS = {"fp8_e4m3": None, "int8_static_v": None, "int8_token_head": (4095, 0)}


@pytest.mark.parametrize(("quantization", "window"), WINDOWS.items())
def test_sixteen_prompts_of_131072_positions_have_a_kernel(monkeypatch, quantization, window):
    monkeypatch.setattr("pallas_kernels.support.why_not_on", lambda *_: None)  # as on a Hopper GPU
    spec = dataclasses.replace(LLAMA, window=window)
    sizes = {"num_blocks": 9000, "block_size": 16, "num_kv_heads": 8, "head_dim": 128}
    scale = {"v_scale": jnp.ones((8, 128))} if quantization == "int8_static_v" else {}
    create = functools.partial(jattn.PagedCache.create, **scale)
    cache = jax.eval_shape(lambda: create(jattn.CacheSpec(quantization=quantization, **sizes)))
    query = jax.ShapeDtypeStruct((8192, 32, 128), jnp.bfloat16)
    run = functools.partial(jattn.attend, spec=spec, implementation="mosaic_gpu")
    lowered = jax.jit(run).trace(query, cache, metadata_of(PROMPTS)).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert "cache_read" in text
    assert "varlen_prefill" in text
    assert ("stablehlo.while" in text) == (window is None)
