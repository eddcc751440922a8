"""The backward kernels of GPUs without wgmma: contract, tile lists, races, sizes and compilation."""

import dataclasses
import itertools

import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import support, target
from pallas_kernels.architectures import ARCHITECTURES
from pallas_kernels.shared.memory import head_chunks
from pallas_kernels.shared.score import Score
from pallas_kernels.support import KERNELS, WARP_RESERVED_BYTES
from pallas_kernels.varlen_backward import default_sizes, varlen_backward
from tests import aot, assertions
from tests.covering_array import select_each_value
from tests.pallas_kernels.varlen_backward import test_tile_lists
from tests.pallas_kernels.varlen_backward.backward_aot_cases import aot_cases
from tests.pallas_kernels.varlen_backward.backward_problem import BackwardProblem, Setting
from tests.pallas_kernels.varlen_backward.test_entry import (
    CASES,
    FAST_CASES,
    case_id,
    grads_of,
    plain_arguments,
    problem_of,
    two_blocks,
)
from tests.pallas_kernels.varlen_backward.test_tile_lists import MASKS

WITHOUT_WGMMA = [gpu for gpu, architecture in ARCHITECTURES.items() if not architecture.has_wgmma]
INTERPRETED = plgpu.InterpretGPUParams()
PLAIN = {
    **{"lens": "prompts", "causal": True, "window": (None, None), "chunk_size": None, "soft_cap": None},
    **{"alibi": None, "sinks": False, "grad_lse": True, "heads": (2, 1), "head_dim": 64, "dtype": "bfloat16"},
}


def why_not(head_dim, gpu):
    return support.why_not_backward(dtypes={"query": "bfloat16"}, head_dim=head_dim, gpu=gpu)


def supported(cases, gpu):
    return [case for case in cases if why_not(case["head_dim"], gpu) is None]


def cases_of_older_architectures():
    """Return cases with every head_dim, for which 8.0 and 8.9 have different tiles."""
    on_each = [case | {"gpu": gpu} for gpu in ("8.0", "8.9") for case in supported(CASES, gpu)]
    return select_each_value(on_each, pairs_of=("gpu", "head_dim"))


def sizes_of(head_dim, *, stages=1, warpgroups=2):
    """Return sizes for two thread blocks per kernel, so that each has several work tiles."""
    sizes = two_blocks(default_sizes(head_dim, gpu="8.0"))
    changes = {"stages": stages, "warpgroups": warpgroups}
    return dataclasses.replace(sizes, dq_sizes=dataclasses.replace(sizes.dq_sizes, **changes), **changes)


def check(case, **options):
    problem = problem_of(case)
    problem.check(grads_of(problem, INTERPRETED, sizes_of(case["head_dim"], **options)))


class TestContract:
    def test_one_stage(self):
        check(PLAIN | {"alibi": "linear", "head_dim": 80, "dtype": "float16"})

    def test_two_stages(self):
        changes = {"lens": "behind", "window": (70, 2), "soft_cap": 5.0, "sinks": True, "heads": (2, 2)}
        check(PLAIN | changes, stages=2)

    @pytest.mark.slow
    @pytest.mark.parametrize("stages", [1, 2])
    @pytest.mark.parametrize("warpgroups", [1, 2])
    @pytest.mark.parametrize("head_dim", [96, 192, 256])
    def test_wide_heads_and_one_warpgroup(self, head_dim, warpgroups, stages):
        """Separate kernels of dk and dv, and work tiles of 64 keys."""
        case = PLAIN | {"lens": "behind", "window": (70, 2), "head_dim": head_dim}
        check(case, stages=stages, warpgroups=warpgroups)

    @pytest.mark.slow
    @pytest.mark.parametrize("stages", [1, 2])
    @pytest.mark.parametrize("case", supported(CASES, "8.0")[::3] + FAST_CASES[::2], ids=case_id)
    def test_combinations_of_features(self, case, stages):
        check(case, stages=stages)

    @pytest.mark.parametrize(
        "name", [pytest.param(name, marks=() if name == "pairs" else pytest.mark.slow) for name in MASKS]
    )
    def test_gradients_under_masks(self, name):
        """Two stages for every other mask; lists of a head may be empty."""
        problem = test_tile_lists.problem_of(name)
        sizes = sizes_of(64, stages=1 + list(MASKS).index(name) % 2)
        problem.check(test_tile_lists.grads_of(problem, sizes=sizes, interpret=INTERPRETED))

    @pytest.mark.slow
    @pytest.mark.parametrize("head_dim", [192, 256])
    def test_wide_heads_under_a_mask(self, head_dim):
        problem = test_tile_lists.problem_of("blocks_of_16", head_dim=head_dim, lens=(3, 135))
        sizes = sizes_of(head_dim, warpgroups=1)
        problem.check(test_tile_lists.grads_of(problem, sizes=sizes, interpret=INTERPRETED))

    @pytest.mark.slow
    @pytest.mark.parametrize(("head_dim", "stages"), [(64, 1), (64, 2), (192, 1)])
    def test_kernels_have_no_races(self, head_dim, stages):
        layer = {"score": Score(scale=0.1), "heads": (2, 2), "gap": 0, "head_dim": head_dim}
        problem = BackwardProblem(Setting(query_lens=(256,), seq_lens=(256,), **layer))
        interpret = plgpu.InterpretGPUParams(detect_races=True)
        with assertions.assert_no_races(num_kernels=2 if head_dim == 64 else 3):
            problem.check(grads_of(problem, interpret, sizes_of(head_dim, stages=stages)))


class TestSizes:
    @pytest.mark.parametrize("head_dim", KERNELS["varlen_backward"].head_dims)
    @pytest.mark.parametrize("gpu", WITHOUT_WGMMA)
    def test_supported_head_dims_have_sizes_that_fit(self, gpu, head_dim):
        if why_not(head_dim, gpu) is not None:
            return
        sizes = default_sizes(head_dim, gpu=gpu)
        assert (sizes.per_warp_mma, sizes.gpu, sizes.dq_computes_delta) == (True, gpu, False)
        width, smem_bytes = head_chunks(head_dim).padded_dim, ARCHITECTURES[gpu].smem_bytes
        assert sizes.shared_memory(width) <= smem_bytes
        dq_bytes = sizes.dq_sizes.shared_memory(width) + 2 * sizes.dq_sizes.tile_q * width
        assert dq_bytes + WARP_RESERVED_BYTES <= smem_bytes

    @pytest.mark.parametrize(
        ("change", "message"),
        [({"stages": 3}, "stages must be one of 1, 2, got 3"),
         ({"tile_q": 128}, "tile_q must be one of 64, got 128"),
         ({"warpgroups": 3}, "warpgroups must be one of 1, 2, got 3")],
    )  # fmt: skip
    def test_invalid_sizes_are_rejected(self, change, message):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(default_sizes(64, gpu="8.0"), **change)

    def test_heads_of_256_have_no_kernel_if_they_do_not_fit_shared_memory(self):
        dims = KERNELS["varlen_backward"].head_dims
        unsupported = {gpu: [dim for dim in dims if why_not(dim, gpu) is not None] for gpu in ARCHITECTURES}
        small = {gpu for gpu, dims in unsupported.items() if dims == [256]}
        assert small == {"8.6", "8.9", "12.0", "12.1"}
        assert not any(unsupported[gpu] for gpu in set(ARCHITECTURES) - small)
        arrays = {name: jnp.zeros((16, heads, 256), jnp.bfloat16) for name, heads in
                  (("query", 4), ("key", 2), ("value", 2), ("out", 4), ("grad_out", 4))}  # fmt: skip
        message = "head_dim=256 is not supported for gradients on compute capability 8.9; supported: 32, 64"
        with target("8.9"), pytest.raises(NotImplementedError, match=message):
            varlen_backward(**plain_arguments(**arrays))


class TestAheadOfTime:
    def check(self, names, gpu, max_spilled_bytes):
        aot.require_plugin()
        module = "tests.pallas_kernels.varlen_backward.backward_aot_cases"
        for name, kernels in aot.compile_all(module, names, gpu).items():
            names = [kernel.name.removesuffix("_mosaic_gpu_kernel") for kernel in kernels]
            assert "varlen_backward_queries" in names, name
            assert max(kernel.spilled_bytes for kernel in kernels) <= max_spilled_bytes(name), name

    @pytest.mark.parametrize(
        ("gpu", "name"),
        [
            ("8.9", "d128-plain-float16"),
            pytest.param("12.0", "d32-plain-bfloat16", marks=pytest.mark.slow),
        ],
    )
    def test_a_sample_compiles_and_spills_little(self, gpu, name):
        """At most 2 % of the instructions in the loop over full tiles are spills."""
        self.check([name], gpu, lambda name: 250)

    @pytest.mark.slow
    @pytest.mark.parametrize("gpu", WITHOUT_WGMMA)
    def test_all_shipped_kernels_compile_and_spill_little(self, gpu):
        with target(gpu):
            names = list(aot_cases())
        self.check(names, gpu, lambda name: 1000 if name.startswith("d256") else 800)


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("case", cases_of_older_architectures(), ids=case_id)
    def test_gradients_of_an_older_architecture_equal_float64(self, case):
        problem = problem_of(case)
        with target(case["gpu"]):
            problem.check(grads_of(problem))

    @pytest.mark.parametrize(
        ("name", "head_dim", "gpu"),
        [
            (name, *kernel)
            for name, kernel in zip(MASKS, itertools.cycle([(64, "8.0"), (128, "8.0"), (128, "8.9")]))
        ],
    )
    def test_gradients_under_masks_of_an_older_architecture_equal_float64(self, name, head_dim, gpu):
        problem = test_tile_lists.problem_of(name, head_dim=head_dim)
        with target(gpu):
            run = test_tile_lists.jitted(problem, sizes=default_sizes(head_dim, gpu=gpu))
            first, second = run(), run()
        problem.check(first)
        assert all(jnp.array_equal(a, b) for a, b in zip(first, second, strict=True))
