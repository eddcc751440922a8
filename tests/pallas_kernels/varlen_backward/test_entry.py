"""varlen_backward: contract against float64, rows of no request, schedules and refusals, on a CPU and a
GPU.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.score import Score
from pallas_kernels.support import KERNELS
from pallas_kernels.varlen_backward import (
    BackwardSizes,
    default_sizes,
    make_schedule,
    mean_visible_keys,
    reference,
    varlen_backward,
)
from pallas_kernels.varlen_backward.schedule import COLUMNS, max_tiles, order_work_tiles
from pallas_kernels.varlen_prefill import PrefillSizes
from tests import aot, assertions
from tests.contract import SCORE_FACTORS
from tests.covering_array import covering_array, select_each_value
from tests.pallas_kernels.varlen_backward.backward_aot_cases import aot_cases
from tests.pallas_kernels.varlen_backward.backward_problem import BackwardProblem, Setting, visible_keys

# Queries and keys per request: several tiles, tiles of one live row, row counts not divisible by 8, none.
LENS = {
    "prompts": ((150, 0, 3, 70), (150, 0, 3, 70)),
    "behind": ((70, 3, 131), (270, 130, 132)),
    "before": ((90, 8), (40, 3)),  # the first queries see no key
    "ones": ((1, 1, 129, 1), (1, 1, 129, 65)),
}
FACTORS = {
    "lens": list(LENS),
    "causal": [True, False],
    "window": [(None, None), (20, 0), (70, 2), (None, 2), (9, None)],
    "chunk_size": [None, 8, 70],
    "soft_cap": [None, 5.0],
    "alibi": [None, "linear", "sqrt"],
    "sinks": [False, True],
    "grad_lse": [True, False],
    "heads": [(2, 2), (4, 1), (6, 2)],
    "head_dim": list(KERNELS["varlen_backward"].head_dims),
    "dtype": ["bfloat16", "float16"],
}
FAST = FACTORS | {
    "lens": ["prompts", "behind", "before"],
    "window": [(None, None), (20, 0), (70, 2)],
    "chunk_size": [None, 70],
    "heads": [(2, 2), (2, 1)],
    "head_dim": [64, 96],
}


CASES, FAST_CASES = (covering_array(factors) for factors in (FACTORS, FAST))


def case_id(case):
    return "-".join(f"{v}" for v in case.values()).replace(" ", "")


def problem_of(case):
    query_lens, seq_lens = LENS[case["lens"]]
    score = Score(
        scale=case["head_dim"] ** -0.5,
        causal=case["causal"],
        window=case["window"],
        chunk_size=case["chunk_size"],
        soft_cap=case["soft_cap"],
        sqrt_alibi=case["alibi"] == "sqrt",
    )
    setting = Setting(
        query_lens=query_lens,
        seq_lens=seq_lens,
        score=score,
        has_alibi=case["alibi"] is not None,
        has_sinks=case["sinks"],
        has_grad_lse=case["grad_lse"],
        **{name: case[name] for name in ("heads", "head_dim", "dtype")},
    )
    return BackwardProblem(setting)


def jitted(problem, **options):
    """Return a function that computes a problem's gradients; the first call compiles it."""
    run = jax.jit(functools.partial(varlen_backward, score=problem.setting.score, **options))
    return functools.partial(run, **problem.arguments)


def grads_of(problem, interpret=None, sizes=None, **options):
    return jitted(problem, sizes=sizes, interpret=interpret, **options)()


def few_ctas(head_dim):
    """Use two thread blocks per kernel, so that each has several work tiles."""
    return two_blocks(default_sizes(head_dim))


def two_kernels(head_dim):
    """Use two thread blocks and a separate kernel for queries."""
    return two_blocks(default_sizes(head_dim, deterministic=True))


def two_blocks(sizes):
    dq_sizes = None if sizes.dq_sizes is None else dataclasses.replace(sizes.dq_sizes, ctas=2)
    return dataclasses.replace(sizes, ctas=2, dq_sizes=dq_sizes)


def slow_unless_third(cases):
    """Return test parameters in which all but every third case are marked slow."""
    return [pytest.param(case, marks=pytest.mark.slow if i % 3 else ()) for i, case in enumerate(cases)]


class TestContract:
    @pytest.mark.parametrize("case", slow_unless_third(FAST_CASES), ids=case_id)
    def test_gradients_equal_float64_for_combinations_of_features(self, case):
        problem = problem_of(case)
        problem.check(grads_of(problem, plgpu.InterpretGPUParams(), few_ctas(case["head_dim"])))

    @pytest.mark.parametrize("case", slow_unless_third(FAST_CASES[1:]), ids=case_id)
    def test_query_kernel_equals_float64(self, case):
        problem = problem_of(case)
        interpret, sizes = plgpu.InterpretGPUParams(), two_kernels(case["head_dim"])
        problem.check(grads_of(problem, interpret, sizes, deterministic=True))

    def test_query_kernel_that_sums_outputs_equals_float64(self):
        """A request with several work tiles, one without queries, and work tiles whose second half is
        empty.
        """
        score = Score(scale=0.1, window=(80, 0))
        lens = (150, 0, 3, 70)
        layer = {"score": score, "heads": (2, 1), "head_dim": 128, "has_grad_lse": True}
        problem = BackwardProblem(Setting(query_lens=lens, seq_lens=lens, **layer))
        sizes = two_kernels(128)
        assert sizes.dq_computes_delta
        problem.check(grads_of(problem, plgpu.InterpretGPUParams(), sizes))

    @pytest.mark.slow
    @pytest.mark.parametrize("head_dim", [192, 256])
    def test_separate_key_and_value_kernels_equal_float64(self, head_dim):
        """Several key tiles per query work tile, a window, and partial tiles at both ends.

        With tile lists, such kernels run with the kernel tests.
        """
        score = Score(scale=head_dim**-0.5, window=(80, 0))
        lens, heads = (3, 135), (1, 1)
        setting = Setting(query_lens=lens, seq_lens=lens, score=score, head_dim=head_dim, heads=heads)
        problem = BackwardProblem(setting)
        problem.check(grads_of(problem, plgpu.InterpretGPUParams(), few_ctas(head_dim)))

    @pytest.mark.slow
    @pytest.mark.parametrize("case", CASES, ids=case_id)
    def test_gradients_equal_float64_for_every_head_dim(self, case):
        problem = problem_of(case)
        problem.check(grads_of(problem, plgpu.InterpretGPUParams(), few_ctas(case["head_dim"])))


class TestRaces:
    @pytest.mark.parametrize(
        ("head_dim", "deterministic"),
        [(128, False), (128, True), pytest.param(256, True, marks=pytest.mark.slow)],
    )
    def test_backward_has_no_races(self, head_dim, deterministic):
        """Several work tiles per thread block, which reuse the pipeline stages; no row is cleared by two
        blocks.
        """
        score = Score(scale=0.1)
        setting = Setting(
            query_lens=(256,), seq_lens=(256,), score=score, heads=(2, 2), head_dim=head_dim, gap=0
        )
        problem = BackwardProblem(setting)
        interpret = plgpu.InterpretGPUParams(detect_races=True)
        sizes = two_kernels(head_dim) if deterministic else BackwardSizes(tile_q=64, ctas=1)
        with assertions.assert_no_races(num_kernels=1 if not deterministic else 3 if head_dim == 256 else 2):
            problem.check(grads_of(problem, interpret, sizes))


class TestReference:
    @pytest.mark.parametrize("soft_cap", [None, 2.0])
    def test_reference_equals_jax_grad(self, soft_cap):
        draw = lambda seed, rows, heads: jax.random.normal(jax.random.key(seed), (rows, heads, 8))
        q, k, v, grad_out = draw(0, 7, 4), draw(1, 9, 2), draw(2, 9, 2), draw(3, 7, 4)
        grad_lse, sinks = jax.random.normal(jax.random.key(4), (4, 7)), jnp.linspace(-1, 2, 4)
        visible = jnp.asarray(visible_keys(Score(scale=0.3), np.arange(7) + 2, 9))
        bias = jax.random.normal(jax.random.key(5), (4, 7, 9))

        def attend(q, k, v):
            s = jnp.einsum("qhd,khd->hqk", q, jnp.repeat(k, 2, 1), precision="highest") * 0.3
            s = s if soft_cap is None else jnp.tanh(s / soft_cap) * soft_cap
            s = jnp.where(visible, s + bias, -jnp.inf)
            lse = jnp.logaddexp(jax.nn.logsumexp(s, axis=2), sinks[:, None])
            p = jnp.exp(s - lse[:, :, None])
            return jnp.einsum("hqk,khd->qhd", p, jnp.repeat(v, 2, 1), precision="highest"), lse

        expected = jax.vjp(attend, q, k, v)[1]((grad_out, grad_lse))
        options = {"visible": visible, "bias": bias, "sinks": sinks}
        arrays, options = jax.tree.map(np.asarray, ((q, k, v, grad_out, grad_lse), options))
        actual = reference.grads_of_request(*arrays, scale=0.3, soft_cap=soft_cap, **options)
        for a, b in zip(actual, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def schedule_of(query_lens, seq_lens, score, *, tile_q=64, gap=0):
    ends = lambda lens: np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    kv_starts = ends(np.asarray(seq_lens) + gap)
    schedule = make_schedule(
        jnp.asarray(ends(query_lens)),
        jnp.asarray(seq_lens, jnp.int32),
        jnp.asarray(kv_starts[:-1]),
        kv_tokens=int(kv_starts[-1]),
        kv_heads=1,
        head_dim=64,
        score=score,
        sizes=BackwardSizes(tile_q=tile_q),
    )
    rows = np.asarray(schedule.table)[: int(schedule.num_valid[0])]
    return [dict(zip(COLUMNS, row.tolist(), strict=False)) for row in rows]


class TestSchedule:
    @pytest.mark.parametrize(
        "score",
        [
            Score(scale=1.0),
            Score(scale=1.0, causal=False),
            Score(scale=1.0, window=(30, 0)),
            Score(scale=1.0, causal=False, window=(100, 40)),
            Score(scale=1.0, chunk_size=50),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("tile_q", [64, 128])
    def test_schedule_covers_each_visible_pair_and_full_tiles_are_fully_visible(self, score, tile_q):
        query_lens, seq_lens, gap = [300, 0, 5, 40, 257], [300, 3, 140, 17, 257], 3
        rows = schedule_of(query_lens, seq_lens, score, tile_q=tile_q, gap=gap)
        starts = np.cumsum([0, *query_lens[:-1]])
        kv_starts = np.cumsum([0, *(np.asarray(seq_lens) + gap)[:-1]])
        for r, (num, keys) in enumerate(zip(query_lens, seq_lens, strict=True)):
            visible = visible_keys(score, np.arange(num) + keys - num, keys)
            covered = np.zeros_like(visible)
            for row in rows:
                first_key = row["first_key_row"] - kv_starts[r]
                if not 0 <= first_key + row["begin"] < keys or row["begin"] >= row["end"]:
                    continue
                live = slice(max(first_key, 0), first_key + row["end"])
                for i in range(row["num_query_tiles"]):
                    first = row["first_query_row"] + (row["first_query_tile"] + i) * tile_q - starts[r]
                    queries = slice(max(first, 0), max(first + tile_q, 0))
                    assert not covered[queries, live].any()
                    covered[queries, live] = True
                    if row["num_partial_first"] <= i < row["num_query_tiles"] - row["num_partial_last"]:
                        assert 0 <= first <= num - tile_q
                        assert row["end"] - row["begin"] == 128
                        assert visible[queries, live].all()
            assert covered[visible].all()

    def test_each_key_row_is_written_once(self):
        rows = schedule_of([5, 0, 300, 9], [5, 0, 300, 9], Score(scale=1.0), gap=11)
        written = [
            row["first_key_row"] + n for row in rows for n in range(row["store_begin"], row["store_end"])
        ]
        assert sorted(written) == list(range(5 + 0 + 300 + 9 + 4 * 11))

    def test_work_tiles_are_sorted_by_length_with_empty_ones_last(self):
        lengths, sets = jnp.asarray([3, 9, 5, 9, 0, 7], jnp.int32), jnp.zeros(6, jnp.int32)
        order = order_work_tiles(lengths, sets, jnp.asarray([4], jnp.int32))
        assert order.tolist() == [1, 3, 2, 0, 4, 5]

    def test_work_tiles_of_a_set_are_adjacent_except_the_shortest(self):
        lengths, sets = jnp.asarray([40, 30, 4, 50, 60, 5], jnp.int32), jnp.asarray([0, 0, 0, 1, 1, 1])
        order = order_work_tiles(lengths, sets, jnp.asarray([6], jnp.int32))
        assert order.tolist() == [0, 1, 4, 3, 5, 2]

    def test_of_equally_short_work_tiles_those_of_the_last_sets_come_last(self):
        lengths = jnp.tile(jnp.asarray([20, 1, 1, 1, 1], jnp.int32), 3)
        sets = jnp.repeat(jnp.arange(3, dtype=jnp.int32), 5)
        order = order_work_tiles(lengths, sets, jnp.asarray([15], jnp.int32))
        assert order.tolist() == [0, 1, 2, 3, 5, 10, 4, 6, 7, 8, 9, 11, 12, 13, 14]

    def test_a_set_fits_the_l2_cache(self):
        """Queries and gradients of outputs and queries take 8 bytes per element: 512 kB for 1,000 rows of
        64.
        """
        starts, lens = jnp.asarray([0, 1000, 2000], jnp.int32), jnp.asarray([1000, 1000], jnp.int32)
        static = {"kv_heads": 2, "head_dim": 64, "score": Score(scale=1.0)}
        make = functools.partial(make_schedule, starts, lens, starts[:-1], kv_tokens=2000, **static)
        schedule_of = lambda l2_bytes: make(sizes=BackwardSizes(l2_bytes=l2_bytes))
        sets_of = lambda l2_bytes: schedule_of(l2_bytes).l2_sets.reshape(-1, 2).tolist()
        first, second = [0, 1], [2, 3]
        assert sets_of(512_000)[:16] == [first] * 8 + [second] * 8
        assert sets_of(1_024_000)[:16] == [[0, 0]] * 8 + [[1, 1]] * 8
        assert sets_of(0)[:16] == [[0, 0]] * 16


ARGUMENTS = {
    "query": (16, 4, 64),
    "key": (16, 2, 64),
    "value": (16, 2, 64),
    "out": (16, 4, 64),
    "grad_out": (16, 4, 64),
}


def plain_arguments(**changes):
    arrays = {name: jnp.zeros(shape, jnp.bfloat16) for name, shape in ARGUMENTS.items()}
    arrays |= {"lse": jnp.zeros((4, 16)), "query_start_loc": jnp.asarray([0, 16], jnp.int32)}
    arrays |= {"seq_lens": jnp.asarray([16], jnp.int32), "kv_start_loc": jnp.zeros(1, jnp.int32)}
    return arrays | {"score": Score(scale=1.0)} | changes


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"query": jnp.zeros((16, 256), jnp.bfloat16)}, r"query must have 3 axes, got \(16, 256\)"),
            ({"key": jnp.zeros((16, 128), jnp.bfloat16)}, r"key must have 3 axes, got \(16, 128\)"),
            (
                {"key": jnp.zeros((16, 3, 64), jnp.bfloat16)},
                r"q_heads must be a multiple of kv_heads \(3\), got 4",
            ),
            ({"key": jnp.zeros((16, 0, 64), jnp.bfloat16)}, "kv_heads must be positive, got 0"),
            ({"key": jnp.zeros((16, 2, 80), jnp.bfloat16)}, r"key's head_dim must have .* got \(80,\)"),
            ({"value": jnp.zeros((8, 2, 64), jnp.bfloat16)}, r"value must have .* got \(8, 2, 64\)"),
            ({"out": jnp.zeros((8, 4, 64), jnp.bfloat16)}, r"out must have .* got \(8, 4, 64\)"),
            ({"grad_out": jnp.zeros((8, 4, 64), jnp.bfloat16)}, r"grad_out must have .* got \(8, 4, 64\)"),
            ({"lse": jnp.zeros((16, 4))}, r"lse must have .* got \(16, 4\)"),
            ({"grad_lse": jnp.zeros((16, 4))}, r"grad_lse must have .* got \(16, 4\)"),
            ({"query_start_loc": jnp.zeros(3, jnp.int32)}, r"query_start_loc must have .* got \(3,\)"),
            ({"kv_start_loc": jnp.zeros(2, jnp.int32)}, r"kv_start_loc must have .* got \(2,\)"),
            ({"alibi_slopes": jnp.zeros(3)}, r"alibi_slopes must have .* got \(3,\)"),
            (
                {"alibi_slopes": jnp.zeros(4), "score": Score(scale=1.0, rows_per_token=2)},
                "score.rows_per_token must be 1 with ALiBi or a score function, got 2",
            ),
        ],
    )
    def test_inconsistent_shapes_are_rejected(self, types_unchecked, changes, message):
        with pytest.raises(ValueError, match=message):
            varlen_backward(**plain_arguments(**changes))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"grad_out": jnp.zeros((16, 4, 64), jnp.float16)},
                "grad_out of float16 is not supported with bfloat16 queries",
            ),
        ],
    )
    def test_unsupported_features_are_rejected(self, changes, message):
        with pytest.raises(NotImplementedError, match=message):
            varlen_backward(**plain_arguments(**changes))

    def test_unsupported_dtypes_and_head_dims_are_rejected(self):
        arguments_of = lambda dim, dtype: {
            name: jnp.zeros((*s[:2], dim), dtype) for name, s in ARGUMENTS.items()
        }
        with pytest.raises(NotImplementedError, match="query dtype=float32"):
            varlen_backward(**plain_arguments(**arguments_of(64, jnp.float32)))
        with pytest.raises(NotImplementedError, match="head_dim=120 is not supported for gradients"):
            varlen_backward(**plain_arguments(**arguments_of(120, jnp.bfloat16)))

    def test_schedule_of_other_keys_is_rejected(self):
        arguments = plain_arguments()
        lens = [arguments[name] for name in ("query_start_loc", "seq_lens", "kv_start_loc")]
        static = {"kv_tokens": 16, "kv_heads": 2, "head_dim": 64, "score": Score(scale=1.0)}
        static |= {"sizes": default_sizes(64)}
        for field, value in {"kv_tokens": 24, "kv_heads": 1, "score": Score(scale=1.0, causal=False)}.items():
            schedule = make_schedule(*lens, **(static | {field: value}))
            named = "mask" if field == "score" else field
            with pytest.raises(
                ValueError, match=rf"schedule was built for {named}=.*, but this call has {named}="
            ):
                varlen_backward(**arguments, schedule=schedule)
        starts, kv_starts = jnp.asarray([0, 8, 16]), jnp.asarray([0, 8])
        schedule = make_schedule(starts, jnp.asarray([8, 8]), kv_starts, **static)
        assert schedule.table.shape[0] == max_tiles(16, 2, 128) == 2
        with pytest.raises(ValueError, match=r"schedule.table must have .* got \(2, 32\)"):
            varlen_backward(**arguments, schedule=schedule)

    @pytest.mark.parametrize("sizes", [default_sizes(64), default_sizes(64, deterministic=True)])
    def test_schedule_determines_whether_a_query_kernel_runs(self, sizes):
        arrays = plain_arguments()
        score = arrays.pop("score")
        lens = [arrays[name] for name in ("query_start_loc", "seq_lens", "kv_start_loc")]
        static = {"kv_tokens": 16, "kv_heads": 2, "head_dim": 64, "num_tokens": 16, "score": score}
        schedule = make_schedule(*lens, **static, sizes=sizes)
        run = functools.partial(varlen_backward, score=score, schedule=schedule)
        jax.eval_shape(lambda arrays: run(**arrays), arrays)  # refuses a schedule of other sizes

    def test_two_kernels_run_if_few_keys_are_visible(self):
        has_two = lambda keys: default_sizes(128, mean_keys=keys).dq_sizes is not None
        assert [has_two(keys) for keys in (None, 256, 2048, 4096)] == [False, True, True, False]
        assert default_sizes(64, mean_keys=256).dq_sizes is None

    @pytest.mark.parametrize(
        ("score", "keys"),
        [
            ({}, 500),
            ({"causal": False}, 1000),
            ({"window": (99, 0)}, 100),
            ({"window": (9999, 0)}, 500),
            ({"window": (99, None)}, 100),
            ({"window": (None, 4)}, 500),
            ({"causal": False, "window": (9, 30)}, 40),
            ({"causal": False, "window": (9, None)}, 1000),
            ({"chunk_size": 400}, 200),
            ({"causal": False, "chunk_size": 400}, 400),
        ],
    )
    def test_visible_keys_per_query_are_estimated(self, score, keys):
        assert mean_visible_keys(Score(scale=1.0, **score), 1000) == keys

    def test_unsupported_query_kernel_is_rejected(self):
        with pytest.raises(ValueError, match=r"deterministic=True requires a dq kernel"):
            varlen_backward(**plain_arguments(sizes=BackwardSizes(tile_q=128), deterministic=True))

    def test_schedule_without_query_tiles_is_rejected(self):
        arguments, sizes = plain_arguments(), default_sizes(64, deterministic=True)
        lens = [arguments[name] for name in ("query_start_loc", "seq_lens", "kv_start_loc")]
        static = {"kv_tokens": 16, "kv_heads": 2, "head_dim": 64, "score": Score(scale=1.0)}
        with pytest.raises(ValueError, match=r"num_tokens is required"):
            make_schedule(*lens, **static, sizes=sizes)
        without = make_schedule(*lens, **static, sizes=BackwardSizes(tile_q=128))
        with pytest.raises(
            ValueError, match=r"built for sizes=.*dq_sizes=None.*, but this call has .*tile_kv=128"
        ):
            varlen_backward(**arguments, schedule=without, sizes=sizes)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"tile_q": 96}, "tile_q must be one of 64, 128, got 96"),
            ({"stages": 1}, "stages must be at least 2, got 1"),
            ({"ctas": 0}, "ctas must be positive, got 0"),
            ({"l2_bytes": -1}, "l2_bytes must be at least 0, got -1"),
            (
                {"dq_sizes": PrefillSizes(teams=2), "separate_dk_dv": True},
                "dq_sizes.teams must be 1, got 2",
            ),
            ({"teams": 2}, "teams must be one of 1, got 2"),
            ({"teams": 2, "stages": 3, "dq_sizes": PrefillSizes()}, "stages must be one of 2, 4, got 3"),
            ({"separate_dk_dv": True}, r"separate_dk_dv=True requires dq_sizes"),
        ],
    )
    def test_invalid_sizes_are_rejected(self, changes, message):
        with pytest.raises(ValueError, match=message):
            BackwardSizes(**changes)

    @pytest.mark.parametrize(
        ("head_dim", "changes", "message"),
        [
            (192, {}, "sizes.separate_dk_dv must be True for heads wider than 128, got False .*=192"),
            (256, {"dq_sizes": PrefillSizes(teams=2)}, r"separate_dk_dv must .* Use default_sizes\(256\)"),
            (192, {"teams": 2, "dq_sizes": PrefillSizes()}, "separate_dk_dv must be True"),
            (64, {}, r"sizes.tile_q must be 128 .*, got 64 with head_dim=64. Use default_sizes\(64\)"),
        ],
    )
    def test_sizes_that_do_not_support_the_head_dim_are_rejected(self, head_dim, changes, message):
        arrays = {name: jnp.zeros((*shape[:2], head_dim), jnp.bfloat16) for name, shape in ARGUMENTS.items()}
        with pytest.raises(ValueError, match=message):
            varlen_backward(**plain_arguments(**arrays, sizes=BackwardSizes(**changes)))

    def test_empty_inputs_give_empty_gradients(self):
        empty = {name: jnp.zeros((0, *shape[1:]), jnp.bfloat16) for name, shape in ARGUMENTS.items()}
        grads = varlen_backward(**plain_arguments(**empty, lse=jnp.zeros((4, 0))))
        assert [x.shape for x in grads] == [(0, 4, 64), (0, 2, 64), (0, 2, 64)]


@functools.cache
def compiled():
    aot.require_plugin()
    return aot.compile_all("tests.pallas_kernels.varlen_backward.backward_aot_cases", list(aot_cases()))


def kernel_names(name):
    if name.startswith(("d192", "d256")):
        return [f"varlen_backward_{output}" for output in ("keys", "queries", "values")]
    has_two = "two_kernels" in name or "small_blocks" in name
    return ["varlen_backward", "varlen_backward_queries"][: 1 + has_two]


class TestAheadOfTime:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", list(aot_cases()))
    def test_shipped_kernels_compile_and_spill_at_most_1800_bytes(self, name):
        kernels = [kernel for kernel in compiled()[name] if kernel.name.startswith("varlen_backward")]
        names = [kernel.name.removesuffix("_mosaic_gpu_kernel") for kernel in kernels]
        assert sorted(names) == kernel_names(name)
        assert all(kernel.spilled_bytes <= 1800 for kernel in kernels)

    def test_mma_instructions_are_not_serialized_and_plain_attention_spills_at_most_600_bytes(self):
        """ptxas warns if it serializes MMA instructions for lack of registers or because a result is read too
        early.

        It reports the number of spilled bytes, not where they are. In the machine code of plain attention
        they were addresses of a work tile; thirteen spill instructions are in the loop over full tiles.
        """
        aot.require_plugin()
        plain = "d128-plain-float16"
        names = [plain, "d128-cap_alibi-float16", "d64-two_kernels"]
        reports = aot.reports("tests.pallas_kernels.varlen_backward.backward_aot_cases", names)
        assert [name for name in names if "serialized" in reports[name]] == []
        (kernel,) = aot.kernels_in(reports[plain])
        assert kernel.spilled_bytes <= 600


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("case", select_each_value(CASES, pairs_of=SCORE_FACTORS), ids=case_id)
    def test_gradients_equal_float64(self, case):
        problem = problem_of(case)
        problem.check(grads_of(problem, sizes=default_sizes(case["head_dim"])))

    @pytest.mark.parametrize(
        ("head_dim", "heads", "lens"),
        [
            (64, (4, 4), (1,)),
            (128, (8, 2), (239,)),
            (128, (4, 4), (799,)),
            (64, (8, 2), (1023,)),
            (64, (4, 4), (1, 239, 113, 799, 64, 128)),
            (128, (8, 2), (2048, 7, 1500)),
        ],
        ids=str,
    )
    def test_gradients_equal_float64_for_awkward_lengths(self, head_dim, heads, lens):
        """With one and with two kernels on one problem, whose construction takes longest."""
        score = Score(scale=head_dim**-0.5)
        setting = Setting(query_lens=lens, seq_lens=lens, score=score, heads=heads, head_dim=head_dim)
        problem = BackwardProblem(setting)
        for deterministic in (False, True):
            sizes = default_sizes(head_dim, deterministic=deterministic)
            problem.check(grads_of(problem, sizes=sizes, deterministic=deterministic))

    @pytest.mark.parametrize("case", select_each_value(CASES), ids=case_id)
    def test_query_kernel_equals_float64(self, case):
        problem = problem_of(case)
        problem.check(grads_of(problem, deterministic=True))

    @pytest.mark.parametrize(
        ("head_dim", "window", "lens"),
        [
            (192, (None, None), (1,)),
            (256, (300, 0), (239,)),
            (192, (300, 0), (1, 239, 113, 799, 64, 128)),
            (256, (None, None), (2048, 7, 1500)),
        ],
        ids=str,
    )
    def test_gradients_equal_float64_for_large_head_dims(self, head_dim, window, lens):
        score = Score(scale=head_dim**-0.5, window=window)
        setting = Setting(query_lens=lens, seq_lens=lens, score=score, heads=(4, 2), head_dim=head_dim)
        problem = BackwardProblem(setting)
        problem.check(grads_of(problem))

    def test_deterministic_gradients_are_bit_identical_over_20_runs(self):
        lens = (1500, 3, 700, 64)
        problem = BackwardProblem(Setting(query_lens=lens, seq_lens=lens, score=Score(scale=0.1)))
        run = jitted(problem, deterministic=True)
        first = run()
        problem.check(first)
        for _ in range(20):
            assert all(jnp.array_equal(a, b) for a, b in zip(run(), first, strict=True))

    def test_20_runs_agree_within_rounding(self):
        lens = (1500, 3, 700, 64)
        problem = BackwardProblem(Setting(query_lens=lens, seq_lens=lens, score=Score(scale=0.1)))
        run = jitted(problem, sizes=default_sizes(64))
        first = run()
        for _ in range(20):
            grads = run()
            problem.check(grads)
            assert all(jnp.array_equal(a, b) for a, b in zip(grads[1:], first[1:], strict=True))
