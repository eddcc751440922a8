"""Head groups of 1 to 16 and 64 query heads against float64."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jattn.implementations.mosaic_gpu import kernel_selection
from pallas_kernels.shared.memory import EIGHT_BIT_HEAD_DIMS, HEAD_DIMS
from tests import contract
from tests.contract import Problem
from tests.covering_array import select_each_value
from tests.pallas_kernels.paged_decode import test_entry as decode_tests
from tests.pallas_kernels.varlen_prefill import test_entry
from tests.regions import attend_region

GROUPS = [*range(1, 17), 64]
STORED = ["plain", "int8_token_head", "fp8_head", "int8_static_v"]
REGIONS = ["decode", "speculative", "chunked"]
# Every group with every head_dim; regions, formats, layouts and numbers of KV heads alternate.
CASES = [
    {
        "region": REGIONS[(i + j) % 3],
        "heads": (group * (1 + i % 3), 1 + i % 3),
        "head_dim": width,
        "stored": STORED[(i // 3 + j) % 4] if width in EIGHT_BIT_HEAD_DIMS else "plain",
        "kv": ("NHD", "HND")[i % 2],
        "block_size": 16,
        "dtype": ("bfloat16", "float16")[(i + j) // 2 % 2],
    }
    for i, group in enumerate(GROUPS)
    for j, width in enumerate(HEAD_DIMS)
]
FAST = [
    {"region": "decode", "heads": (7, 1), "head_dim": 64},
    {"region": "chunked", "heads": (5, 1), "head_dim": 32},
]


def case_id(case):
    return "-".join(map(str, case.values())).replace(" ", "")


def solved(case, monkeypatch, interpret=None):
    plain = {factor: values[0] for factor, values in contract.FACTORS.items()}
    case = plain | {"dtype": "bfloat16", "block_size": 16} | case
    problem = Problem(case)
    metadata = problem.metadata
    region = metadata.decode_region if metadata.bucket.max_decodes else metadata.prefill_region
    query = jnp.asarray(problem.query)
    if interpret is not None:
        few = decode_tests.sizes_of(case), test_entry.sizes_of(case)
        for kernel, sizes in zip(("decode_kernel", "prefill_kernel"), few, strict=True):
            make = lambda *_, sizes=sizes, **__: sizes
            monkeypatch.setattr(getattr(kernel_selection, kernel), "default_sizes", make)

    run = functools.partial(attend_region, spec=problem.spec, interpret=interpret)
    problem.check(*jax.jit(run)(query, problem.kv, region))


@pytest.mark.gpu
@pytest.mark.parametrize("case", select_each_value(CASES, pairs_of=("region", "heads")), ids=case_id)
def test_every_head_group_matches_float64_in_every_region_on_a_gpu(case, monkeypatch):
    solved(case, monkeypatch)


@pytest.mark.parametrize("case", FAST, ids=case_id)
def test_odd_head_groups_match_float64(case, monkeypatch):
    solved(case, monkeypatch, plgpu.InterpretGPUParams())


@pytest.mark.slow
@pytest.mark.parametrize("region", ["decode", "chunked"])
@pytest.mark.parametrize("group", [3, 16, 64])
def test_small_and_large_head_groups_match_float64(region, group, monkeypatch):
    case = {"region": region, "heads": (group, 1), "head_dim": 64}
    solved(case, monkeypatch, plgpu.InterpretGPUParams())
