"""grouped_matmul against float64 in interpret mode and on a GPU; compilation, races and refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.architectures import ARCHITECTURES, target
from pallas_kernels.grouped_matmul import TILE_ROWS, grouped_matmul, grouped_matmul_reference
from pallas_kernels.grouped_matmul.kernel import GroupedMatmulDims, num_mma_stages
from tests import aot, assertions
from tests.contract import case_id
from tests.covering_array import covering_array
from tests.pallas_kernels.grouped_matmul import grouped_aot_cases

GROUPS = (2, 0, -1, 2, -1)  # group of each tile; groups 1 and 3 have none


class Problem:
    """Rows with a row of NaN inside a tile, and matrices that are NaN if no tile uses them."""

    def __init__(self, inputs, outputs, *, outputs_first, dtype=jnp.bfloat16):
        keys = jax.random.split(jax.random.key(0))
        x = jax.random.normal(keys[0], (len(GROUPS) * TILE_ROWS, inputs), dtype)
        self.x = x.at[TILE_ROWS + 3].set(jnp.nan)
        shape = (4, outputs, inputs) if outputs_first else (4, inputs, outputs)
        self.weights = jax.random.normal(keys[1], shape, dtype).at[1::2].set(jnp.nan)
        self.groups = jnp.asarray(GROUPS, jnp.int32)
        self.outputs_first = outputs_first

    def run(self, interpret=None):
        run = functools.partial(grouped_matmul, outputs_first=self.outputs_first, interpret=interpret)
        return jax.jit(run)(self.x, self.weights, self.groups)

    def check(self, out):
        assert out.dtype == self.x.dtype
        live = np.repeat(np.asarray(GROUPS) >= 0, TILE_ROWS)
        options = {"outputs_first": self.outputs_first}
        expected = np.asarray(grouped_matmul_reference(self.x, self.weights, self.groups, **options))[live]
        actual = np.asarray(out.astype(jnp.float32))[live]
        np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
        assert np.nanmax(np.abs(actual - expected)) <= 2**-8 * np.nanmax(np.abs(expected))


@pytest.mark.parametrize("outputs_first", [False, True])
def test_reference_matches_float64(outputs_first):
    problem = Problem(64, 128, outputs_first=outputs_first)
    options = {"outputs_first": outputs_first}
    actual = np.asarray(grouped_matmul_reference(problem.x, problem.weights, problem.groups, **options))
    for tile, group in enumerate(GROUPS):
        rows = slice(tile * TILE_ROWS, (tile + 1) * TILE_ROWS)
        matrix = np.asarray(problem.weights[max(group, 0)], np.float64)
        expected = np.asarray(problem.x[rows], np.float64) @ (matrix.T if outputs_first else matrix)
        np.testing.assert_allclose(
            actual[rows], expected if group >= 0 else np.zeros_like(expected), atol=1e-4
        )


SIZES = [(64, 64), (192, 128), (128, 192), (320, 256)]


@pytest.mark.parametrize("outputs_first", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_each_tile_is_multiplied_by_its_groups_matrix(inputs, outputs, outputs_first):
    problem = Problem(inputs, outputs, outputs_first=outputs_first)
    out = problem.run(plgpu.InterpretGPUParams())
    problem.check(out)
    repeated = np.asarray(problem.run(plgpu.InterpretGPUParams()).astype(jnp.float32))
    live = np.repeat(np.asarray(GROUPS) >= 0, TILE_ROWS)
    np.testing.assert_array_equal(repeated[live], np.asarray(out.astype(jnp.float32))[live])


WITHOUT_WGMMA = [gpu for gpu, architecture in ARCHITECTURES.items() if not architecture.has_wgmma]


@pytest.mark.parametrize(
    ("gpu", "inputs", "outputs", "outputs_first"),
    [
        ("8.0", 320, 256, False),
        ("8.6", 128, 192, True),
        *(
            pytest.param("8.6", *sizes, outputs_first, marks=pytest.mark.slow)
            for sizes in SIZES
            for outputs_first in (False, True)
        ),
    ],
)
def test_each_tile_is_multiplied_by_its_groups_matrix_without_wgmma(gpu, inputs, outputs, outputs_first):
    with target(gpu):
        problem = Problem(inputs, outputs, outputs_first=outputs_first)
        problem.check(problem.run(plgpu.InterpretGPUParams()))


@pytest.mark.parametrize("gpu", WITHOUT_WGMMA)
@pytest.mark.parametrize("outputs", [64, 2880, 5760, 2048, 1536])
def test_stages_fit_shared_memory(gpu, outputs):
    tile = GroupedMatmulDims(inputs=64, outputs=outputs, outputs_first=True, gpu=gpu).tile
    smem_bytes = ARCHITECTURES[gpu].smem_bytes
    stages = num_mma_stages(tile, smem_bytes)
    assert 2 <= stages <= 4
    assert stages * 64 * 2 * (TILE_ROWS + tile) <= smem_bytes - 1024


def test_grouped_matmul_has_no_races():
    problem = Problem(320, 128, outputs_first=True)
    with assertions.assert_no_races(num_kernels=1):
        problem.run(plgpu.InterpretGPUParams(detect_races=True)).block_until_ready()


def test_grouped_matmul_supports_float16():
    problem = Problem(128, 64, outputs_first=True, dtype=jnp.float16)
    problem.check(problem.run(plgpu.InterpretGPUParams()))


ON_GPU = {
    "gpu": [None, "8.0", "8.6"],
    "sizes": [*SIZES, (768, 2048), (2880, 2880), (2048, 1536)],
    "outputs_first": [False, True],
    "dtype": ["bfloat16", "float16"],
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", covering_array(ON_GPU), ids=case_id)
def test_each_tile_is_multiplied_by_its_groups_matrix_on_a_gpu(case):
    options = {"outputs_first": case["outputs_first"], "dtype": jnp.dtype(case["dtype"])}
    problem = Problem(*case["sizes"], **options)
    with target(case["gpu"]):
        problem.check(problem.run())
        assert jnp.array_equal(problem.run()[:TILE_ROWS], problem.run()[:TILE_ROWS])


def test_shipped_kernels_compile_without_spills():
    check_spills([*grouped_aot_cases.aot_cases()], "9.0")


def test_a_sample_compiles_without_spills_for_another_architecture():
    check_spills(["qwen3_30b_a3b_down-bfloat16", "gpt_oss_20b_down-float16"], "8.6")


@pytest.mark.slow
@pytest.mark.parametrize("gpu", WITHOUT_WGMMA)
def test_all_shipped_kernels_compile_without_spills_for_other_architectures(gpu):
    check_spills([*grouped_aot_cases.aot_cases()], gpu)


def check_spills(names, gpu):
    aot.require_plugin()
    for name, kernels in aot.compile_all(grouped_aot_cases.__name__, names, gpu).items():
        assert [kernel.spilled_bytes for kernel in kernels if "grouped_matmul" in kernel.name] == [0], name


def test_empty_input_returns_an_empty_result():
    out = grouped_matmul(
        jnp.zeros((0, 64), jnp.bfloat16), jnp.zeros((2, 64, 128), jnp.bfloat16), jnp.zeros(0, jnp.int32)
    )
    assert out.shape == (0, 128)


def arguments(rows=128, inputs=64, outputs=64, tiles=1, dtype=jnp.bfloat16, weights=None):
    weights = (2, inputs, outputs) if weights is None else weights
    return jnp.zeros((rows, inputs), dtype), jnp.zeros(weights, jnp.bfloat16), jnp.zeros(tiles, jnp.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rows": 100}, ValueError, r"x must have a multiple of 128 rows, got \(100, 64\)"),
        ({"weights": (2, 128, 64)}, ValueError, r"weights must have 64 inputs, as x, got \(2, 128, 64\)"),
        (
            {"tiles": 2},
            ValueError,
            r"group_of_tile must have shape \(1,\) \(one group per tile\), got \(2,\)",
        ),
        (
            {"dtype": jnp.float32},
            NotImplementedError,
            "dtype=float32 is not supported; supported: bfloat16, float16",
        ),
        (
            {"dtype": jnp.float16},
            NotImplementedError,
            "rows of float16 are not supported with weights of bfloat16",
        ),
        ({"inputs": 96}, NotImplementedError, "inputs=96 is not supported; supported: multiples of 64"),
        ({"outputs": 32}, NotImplementedError, "outputs=32 is not supported; supported: multiples of 64"),
    ],
)
def test_unsupported_arguments_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        grouped_matmul(*arguments(**change))
