"""paged_decode against the float64 oracle, races, schedules and refusals, on a CPU and on a GPU."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jattn
from jattn.implementations import xla
from jattn.implementations.mosaic_gpu import kernel_selection
from jattn.implementations.region_inputs import RegionInputs
from pallas_kernels.architectures import ARCHITECTURES, target
from pallas_kernels.paged_decode import BlockList, DecodeSizes, make_schedule, paged_decode, reference
from pallas_kernels.paged_decode.mma import TileMma, WarpgroupMma, WarpMma
from pallas_kernels.paged_decode.span import find_span_start
from pallas_kernels.shared.memory import EIGHT_BIT_HEAD_DIMS, HEAD_DIMS, head_chunks
from pallas_kernels.shared.score import Score
from pallas_kernels.support import why_not_decode, why_not_on
from tests import aot, assertions
from tests.contract import SCORE_FACTORS, Problem, case_id, mark_every_second_slow
from tests.covering_array import covering_array, select_each_value
from tests.pallas_kernels.paged_decode.decode_aot_cases import aot_cases
from tests.regions import attend_region

FACTORS = {
    "region": ["decode", "speculative", "mixed"],
    "causal": [True, False],
    "window": [None, (4, 0), (70, 2), (None, 2), (9, None)],
    "chunk_size": [None, 8, 70],
    "soft_cap": [None, 5.0],
    "alibi": [None, "linear", "sqrt"],
    "sinks": [False, True],
    "heads": [(2, 2), (4, 1), (6, 2), (12, 1)],
    "head_dim": list(HEAD_DIMS),
    "dtype": ["bfloat16", "float16"],
    "kv": ["NHD", "HND"],
    "block_size": [8, 16, 32, 64, 128, 256],
    "padded": [False, True],
    "split_kv": [None, 64],
    "per_warp_mma": [True, False],
    "loads": ["tma", "cp.async"],
    "stored": [
        "plain", "plain_scalar", "fp8_scalar", "fp8_head", "fp8_token_head", "fp8e5_scalar", "int8_scalar",
        "int8_token_head", "int8_static_v", "int8_k_only",
    ],
}  # fmt: skip
FAST = FACTORS | {
    "region": ["decode", "speculative"],
    "window": [None, (4, 0), (70, 2)],
    "alibi": [None, "linear"],
    "heads": [(2, 2), (6, 2)],
    "chunk_size": [None, 70],
    "head_dim": [64, 80],
    "block_size": [16, 128],
    "padded": [True],
    "stored": ["plain", "fp8_head", "fp8_token_head", "int8_static_v"],
}
ALWAYS = {"sparsity": None}


def cases(factors):
    return [case | ALWAYS for case in covering_array(factors, has_kernel)]


def cases_of_older_architectures():
    """Return cases with every cache format on each: of the two, only 8.9 has instructions for float8."""
    on_each = [case | {"gpu": gpu} for case in cases(FACTORS) for gpu in ("8.0", "8.9")]
    return select_each_value(on_each, pairs_of=("gpu", "stored"))


def has_kernel(case):
    """Return whether the kernel supports a case, whose missing factors may still be chosen."""
    if case.get("loads") == "cp.async" and not case.get("per_warp_mma", True):
        return False
    is_wide = case.get("stored", "plain").startswith("plain")
    return is_wide or case.get("head_dim", 64) in EIGHT_BIT_HEAD_DIMS


def sizes_of(case):
    """Return sizes with few thread blocks, so that spans split requests and interpret mode stays fast."""
    per_warp_mma, uses_tma = case.get("per_warp_mma", False), case.get("loads") != "cp.async"
    max_rows = 8 if per_warp_mma and case["head_dim"] > 128 else 16
    return DecodeSizes(
        # With one stage each tile but a segment's first takes a stage that was used before.
        stages=2 if uses_tma else 1,
        ctas=6,
        max_rows=max_rows,
        split_kv=case.get("split_kv"),
        per_warp_mma=per_warp_mma,
        gpu="9.0" if uses_tma else "8.0",
        uses_tma=uses_tma,
    )


def attend(problem: Problem, interpret=None, sizes=None):
    """Attend the decode region by the kernel and the prefill region by XLA."""

    def run(query, kv, metadata, per_head):
        decode, prefill, spec = metadata.decode_region, metadata.prefill_region, problem.spec
        first = decode.bucket.max_tokens
        results = [
            attend_region(query[:first], kv, decode, spec, interpret=interpret, **per_head),
            xla.attend(RegionInputs(query=query[first:], kv=kv, metadata=prefill, spec=spec, **per_head)),
        ]
        outs, lses = zip(*results, strict=True)
        return jnp.concatenate(outs), jnp.concatenate(lses, axis=1)

    per_head = {"sinks": problem.sinks, "alibi_slopes": problem.slopes}
    per_head = {name: None if x is None else jnp.asarray(x) for name, x in per_head.items()}
    with pytest.MonkeyPatch.context() as patched:
        if sizes is not None:
            patched.setattr(kernel_selection.decode_kernel, "default_sizes", lambda *args, **kwargs: sizes)
        return jax.jit(run)(jnp.asarray(problem.query), problem.kv, problem.metadata, per_head)


class TestContract:
    @pytest.mark.parametrize("case", mark_every_second_slow(cases(FAST)[::2]), ids=case_id)
    def test_decode_matches_float64_for_combinations_of_features(self, case):
        problem = Problem(case)
        problem.check(*attend(problem, plgpu.InterpretGPUParams(), sizes_of(case)))

    @pytest.mark.slow
    @pytest.mark.parametrize("case", cases(FACTORS), ids=case_id)
    def test_decode_matches_float64_for_every_head_dim_and_block_size(self, case):
        problem = Problem(case)
        problem.check(*attend(problem, plgpu.InterpretGPUParams(), sizes_of(case)))

    def test_decode_region_of_a_mixed_step_matches_float64(self):
        case = plain_case(padded=True, sinks=True, window=(70, 2))
        problem = Problem(case)
        problem.check(*attend(problem, plgpu.InterpretGPUParams(), sizes_of(case)))


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("case", select_each_value(cases(FACTORS), pairs_of=SCORE_FACTORS), ids=case_id)
    def test_decode_matches_float64(self, case):
        problem = Problem(case)
        problem.check(*attend(problem))
        problem.check(*attend(problem, sizes=sizes_of(case)))

    @pytest.mark.parametrize("case", cases_of_older_architectures(), ids=case_id)
    def test_decode_of_an_older_architecture_matches_float64(self, case):
        problem = Problem(case)
        with target(case["gpu"]):
            problem.check(*attend(problem))

    def test_attend_chooses_the_decode_kernel_by_default(self):
        problem = Problem(plain_case())
        run = functools.partial(jattn.attend, spec=problem.spec, return_lse=True)
        arguments = jnp.asarray(problem.query), problem.kv, problem.metadata
        chosen = jax.jit(run)(*arguments)
        problem.check(*chosen)
        plan = jattn.plan(problem.metadata, problem.spec, problem.kv)
        for named in (run(*arguments, implementation="mosaic_gpu"), run(*arguments, plan=plan)):
            for a, b in zip(chosen, named, strict=True):
                np.testing.assert_array_equal(a, b)

    def test_decode_is_bit_identical_over_1000_runs(self):
        args, kwargs = random_step([4097, 1, 0, 900, 63, 64, 65, 2000], 32, 8, 128, 16)
        run = jax.jit(functools.partial(paged_decode, **kwargs))
        first, _ = run(*args)
        for _ in range(1000):
            repeated, _ = run(*args)
            assert jnp.array_equal(first, repeated)

    def test_decode_reads_the_last_block_of_a_pool_beyond_32_bit_offsets(self):
        """The pool has more than 2^31 elements (4.6 GB), so keys and values share it."""
        lens, blocks, table = [200, 64], 140_000, np.zeros((2, 4), np.int32)
        table[0], table[1, 0] = [139_999, 1, 139_998, 5], 139_997
        shape = (blocks, 64, 2, 128)
        assert np.prod(shape, dtype=np.int64) > 2**31
        draw = lambda seed, shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        put = jax.jit(lambda x, new: x.at[jnp.asarray(table)].set(new), donate_argnums=0)
        k = put(jnp.zeros(shape, jnp.bfloat16), draw(0, (2, 4, *shape[1:])))
        query, lens, table = draw(2, (2, 8, 128)), jnp.asarray(lens, jnp.int32), jnp.asarray(table)
        out, _ = paged_decode(query, k, k, table, lens, score=Score(scale=0.1))
        expected, _ = reference.paged_decode(query, k, k, table, lens, scale=0.1)
        np.testing.assert_allclose(out.astype(jnp.float32), expected.astype(jnp.float32), atol=2e-2)

    def test_decode_of_long_requests_matches_the_reference(self):
        args, kwargs = random_step([131072, 77777], 8, 1, 128, 16)
        out, lse = paged_decode(*args, **kwargs)
        expected, expected_lse = reference.paged_decode(*args, scale=kwargs["score"].scale)
        np.testing.assert_allclose(out.astype(jnp.float32), expected.astype(jnp.float32), atol=1e-3)
        np.testing.assert_allclose(lse, expected_lse, atol=1e-3)


def plain_case(**changes):
    plain = {name: values[0] for name, values in FACTORS.items()} | ALWAYS
    return plain | {"region": "mixed", "heads": (4, 2), "head_dim": 64, "block_size": 16} | changes


def random_step(lens, q_heads, kv_heads, head_dim, block_size, query_len=1, **score):
    """Return the arguments of paged_decode for a random step."""
    needed = [-(-n // block_size) for n in lens]
    order = np.random.default_rng(0).permutation(sum(needed)) + 1
    table = np.zeros((len(lens), max(needed)), np.int32)
    for row, blocks in zip(table, np.split(order, np.cumsum(needed)[:-1]), strict=True):
        row[: len(blocks)] = blocks
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    cache = sum(needed) + 1, block_size, kv_heads, head_dim
    args = draw(0, len(lens) * query_len, q_heads, head_dim), draw(1, *cache), draw(2, *cache)
    score = Score(scale=head_dim**-0.5, **score)
    arrays = jnp.asarray(table), jnp.asarray(lens, jnp.int32)
    return (*args, *arrays), {"score": score, "decode_query_len": query_len}


def interpreted(*args, schedule=None, sinks=None, detect_races=False, **kwargs):
    """Run paged_decode in interpret mode."""
    interpret = plgpu.InterpretGPUParams(detect_races=detect_races)
    run = functools.partial(paged_decode, **kwargs, interpret=interpret)
    return jax.jit(run)(*args, schedule=schedule, sinks=sinks)


def random_lists(lens, kv_heads, size, seed=0):
    """Return a random half of each request's blocks per KV head; ids past the counts are invalid."""
    rng = np.random.default_rng(seed)
    max_listed = -(-max(lens) // size) + 1
    ids = np.full((len(lens), kv_heads, max_listed), 2**24, np.int32)
    counts = np.zeros((len(lens), kv_heads), np.int32)
    for r, h in np.ndindex(counts.shape):
        blocks = -(-lens[r] // size)
        chosen = np.flatnonzero(rng.random(blocks + 1) < 0.5)  # one past the end is harmless
        ids[r, h, : len(chosen)], counts[r, h] = chosen, len(chosen)
    return BlockList(jnp.asarray(ids), jnp.asarray(counts))


BY_KEY = {"per_warp_mma": True, "uses_tma": False}
LISTED = [
    (1, 16, 1, {}, BY_KEY, "NHD"),
    (16, 16, 1, {}, {}, "NHD"),
    (16, 64, 2, {"window": (90, 0)}, {}, "NHD"),
    (32, 8, 1, {"soft_cap": 3.0}, {"split_kv": 128}, "NHD"),
    (64, 128, 1, {}, {"max_rows": 8}, "HND"),
    (128, 64, 3, {}, {"split_kv": 64}, "NHD"),
    (256, 16, 1, {"chunk_size": 100}, {}, "NHD"),
    (1, 64, 2, {"window": (90, 0)}, BY_KEY, "HND"),
    (1, 8, 1, {"soft_cap": 3.0}, BY_KEY | {"split_kv": 64}, "NHD"),
]


def poison_unlisted(cache, table, lens, lists, size):
    """Return the cache [blocks, block_size, kv_heads, head_dim] with NaN in all keys that no list names."""
    is_listed, block_size = np.zeros(cache.shape[:3], bool), cache.shape[1]
    for r, h in np.ndindex(lists.counts.shape):
        ids = np.asarray(lists.ids[r, h, : lists.counts[r, h]])
        keys = (ids[:, None] * size + np.arange(size)).reshape(-1)
        keys = keys[keys < lens[r]]
        is_listed[table[r, keys // block_size], keys % block_size, h] = True
    return jnp.where(is_listed[..., None], cache, jnp.nan)


def check_listed(listed, interpret=None):
    list_block_size, block_size, query_len, score, changed, layout = listed
    lens = [330, 0, 70, 5, 200]
    (query, k, v, *rest), kwargs = random_step(lens, 6, 2, 64, block_size, query_len, **score)
    lists = random_lists(lens, 2, list_block_size)
    sinks = jnp.linspace(-1.0, 2.0, 6)
    options = {"layout": layout, "sinks": sinks, "decode_query_len": query_len}
    options |= {"block_list": lists, "list_block_size": list_block_size}
    caches = [poison_unlisted(x, np.asarray(rest[0]), lens, lists, list_block_size) for x in (k, v)]
    if layout == "HND":
        k, v, *caches = (jnp.swapaxes(x, 1, 2) for x in (k, v, *caches))
    sizes = DecodeSizes(stages=2, ctas=6, **changed)
    run = functools.partial(paged_decode, score=kwargs["score"], sizes=sizes, interpret=interpret)
    static = ("layout", "decode_query_len", "list_block_size")
    out, lse = jax.jit(run, static_argnames=static)(query, *caches, *rest, **options)
    expected, expected_lse = reference.paged_decode(
        query.astype(jnp.float32), k, v, *rest, scale=kwargs["score"].scale, **score, **options
    )
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=2e-2)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-2)


class TestBlockLists:
    @pytest.mark.parametrize("listed", LISTED[:4], ids=str)
    def test_decode_attends_to_listed_blocks_only(self, listed):
        check_listed(listed, plgpu.InterpretGPUParams())

    @pytest.mark.slow
    @pytest.mark.parametrize("listed", LISTED[4:], ids=str)
    def test_decode_attends_to_listed_blocks_only_with_other_sizes(self, listed):
        check_listed(listed, plgpu.InterpretGPUParams())

    @pytest.mark.gpu
    @pytest.mark.parametrize("listed", LISTED, ids=str)
    def test_decode_attends_to_listed_blocks_only_on_a_gpu(self, listed):
        check_listed(listed)


class TestRaces:
    @pytest.mark.parametrize(
        ("query_len", "score", "per_warp_mma"), [(1, {}, True), (2, {"window": (70, 0)}, False)]
    )
    def test_decode_has_no_races(self, query_len, score, per_warp_mma):
        args, kwargs = random_step([130, 0, 70, 5], 4, 2, 64, 16, query_len, **score)
        sizes = DecodeSizes(stages=2, ctas=6, per_warp_mma=per_warp_mma)
        with assertions.assert_no_races(num_kernels=2):
            jax.block_until_ready(interpreted(*args, **kwargs, sizes=sizes, detect_races=True))


def test_padding_rows_are_zero_with_any_sink():
    args, kwargs = random_step([0, 3], 3, 1, 32, 16, 1)
    sinks, sizes = jnp.asarray([0.5, -jnp.inf, jnp.inf]), DecodeSizes(stages=1, ctas=1)
    out, lse = interpreted(*args, **kwargs, sizes=sizes, sinks=sinks)
    assert not np.asarray(out[0], np.float32).any()
    assert np.isneginf(lse[:, 0]).all()
    assert np.isfinite(lse[:2, 1]).all()


class TestTileMma:
    @pytest.mark.parametrize("implementation", [WarpgroupMma, WarpMma])
    def test_implementations_have_the_signatures_of_the_protocol(self, implementation):
        protocol_methods = {
            name: f for name, f in vars(TileMma).items() if inspect.isfunction(f) and name[0] != "_"
        }
        assert len(protocol_methods) == 9
        for name, method in protocol_methods.items():
            own_method = vars(implementation)[name]
            assert [*inspect.signature(own_method).parameters] == [*inspect.signature(method).parameters], (
                name
            )


class TestSchedule:
    def schedule(self, lens, sizes, max_kv=None, **score):
        return make_schedule(
            jnp.asarray(lens, jnp.int32),
            score=Score(scale=1.0, **score),
            sizes=sizes,
            kv_heads=2,
            group=4,
            decode_query_len=1,
            max_kv=max_kv,
        )

    def test_spans_are_equal_and_cover_requests_in_order(self):
        actual = self.schedule([130, 0, 64, 320], DecodeSizes(tile_kv=64, ctas=6))
        np.testing.assert_array_equal(
            actual.unit_ends, [3, 4, 5, 10]
        )  # 3 spans of 4 units; an empty request is 1
        starts = [
            find_span_start(actual.unit_ends, jnp.int32(number), num_spans=actual.num_spans)
            for number in range(4)
        ]
        assert [(int(x.unit), int(x.row), int(x.row_start), int(x.row_end)) for x in starts[:3]] == [
            (0, 0, 0, 3),
            (4, 2, 4, 5),
            (8, 3, 5, 10),
        ]
        assert [int(x.next_row) for x in starts[:3]] == [2, 3, 4]
        assert int(starts[3].row) == 4  # past the last

    @pytest.mark.parametrize("reqs", [1, 16, 17, 300, 4097])
    def test_span_starts_in_the_request_of_its_first_unit(self, reqs):
        ends = np.cumsum(np.random.default_rng(reqs).integers(1, 20, reqs)).astype(np.int32)
        for number in range(8):
            actual = find_span_start(jnp.asarray(ends), jnp.int32(number), num_spans=7)
            row = np.searchsorted(ends, number * -(-ends[-1] // 7), side="right")
            assert int(actual.row) == row

    def test_schedule_of_a_window_skips_tiles_before_it(self):
        actual = self.schedule([1000, 64], DecodeSizes(tile_kv=64, ctas=4), window=(63, 0))
        np.testing.assert_array_equal(actual.unit_ends, [2, 3])

    @pytest.mark.parametrize("reqs", [1, 33, 257])
    def test_unit_ends_are_the_cumulative_units_for_any_number_of_requests(self, reqs):
        lens = np.random.default_rng(reqs).integers(0, 1000, reqs)
        actual = self.schedule(lens, DecodeSizes(tile_kv=64, ctas=6))
        np.testing.assert_array_equal(actual.unit_ends, np.cumsum(np.maximum(-(-lens // 64), 1)))

    @pytest.mark.parametrize("implementation_name", ["xla", pytest.param("kernel", marks=pytest.mark.gpu)])
    @pytest.mark.parametrize("reqs", [3, 33, 300])
    def test_unit_ends_of_lists_are_the_cumulative_units(self, reqs, implementation_name):
        assert jax.default_backend() == ("gpu" if implementation_name == "kernel" else "cpu")
        counts = np.random.default_rng(reqs).integers(0, 100, (reqs, 8)).astype(np.int32)
        lists = BlockList(jnp.zeros((reqs, 8, 100), jnp.int32), jnp.asarray(counts))
        static = {"sizes": DecodeSizes(tile_kv=64), "kv_heads": 8, "group": 4, "decode_query_len": 1}
        lens = jnp.full(reqs, 1600, jnp.int32)
        actual = make_schedule(lens, score=Score(scale=1.0), **static, block_list=lists, list_block_size=16)
        np.testing.assert_array_equal(actual.unit_ends, np.cumsum(np.maximum(-(-counts.ravel() // 4), 1)))

    def test_schedule_has_at_most_one_span_per_unit(self):
        assert self.schedule([70], DecodeSizes(tile_kv=64, ctas=264), max_kv=128).num_spans == 2
        assert self.schedule([70], DecodeSizes(tile_kv=64, ctas=6), max_kv=1024).num_spans == 3

    def test_fixed_splits_make_results_independent_of_the_batch(self):
        sizes = DecodeSizes(tile_kv=64, stages=2, ctas=6, split_kv=128)
        (query, k, v, table, lens), kwargs = random_step([300, 17, 500], 4, 2, 64, 16)
        together = interpreted(query, k, v, table, lens, **kwargs, sizes=sizes)[0]
        alone = interpreted(query[:1], k, v, table[:1], lens[:1], **kwargs, sizes=sizes)[0]
        np.testing.assert_array_equal(together[:1], alone)

    @pytest.mark.parametrize("num_splits", [4, 5, 17])
    def test_combine_adds_any_number_of_splits(self, num_splits):
        args, kwargs = random_step([64 * num_splits], 4, 2, 64, 16)
        expected, expected_lse = reference.paged_decode(*args, scale=kwargs["score"].scale)
        sizes = DecodeSizes(tile_kv=64, stages=2, ctas=6, split_kv=64)
        out, lse = interpreted(*args, **kwargs, sizes=sizes)
        np.testing.assert_allclose(out.astype(jnp.float32), expected.astype(jnp.float32), atol=2e-2)
        np.testing.assert_allclose(lse, expected_lse, atol=1e-2)

    def test_precomputed_schedule_gives_identical_bits(self):
        args, kwargs = random_step([130, 40], 4, 2, 64, 16)
        kwargs["sizes"] = DecodeSizes(tile_kv=64, stages=2, ctas=4)
        schedule = self.schedule([130, 40], kwargs["sizes"])
        np.testing.assert_array_equal(
            interpreted(*args, **kwargs)[0], interpreted(*args, **kwargs, schedule=schedule)[0]
        )


class TestReference:
    def test_reference_matches_the_kernel(self):
        args, kwargs = random_step([33, 0, 7], 4, 2, 64, 16, 2, window=(9, 0), soft_cap=3.0)
        sinks = jnp.linspace(-1.0, 2.0, 4)
        score = kwargs["score"]
        expected, expected_lse = reference.paged_decode(
            *args, scale=score.scale, window=(9, 0), soft_cap=3.0, decode_query_len=2, sinks=sinks
        )
        out, lse = interpreted(*args, **kwargs, sizes=DecodeSizes(ctas=4, stages=2), sinks=sinks)
        np.testing.assert_allclose(out.astype(jnp.float32), expected.astype(jnp.float32), atol=2e-2)
        np.testing.assert_allclose(lse, expected_lse, atol=1e-2)


class TestHeadChunks:
    @pytest.mark.parametrize(
        ("head_dim", "cut"), [(32, (1, 32, 64)), (80, (2, 40, 64)), (120, (3, 40, 64)), (192, (1, 192, 192))]
    )
    def test_chunks_are_equal_and_padded_to_a_multiple_of_64(self, head_dim, cut):
        actual = head_chunks(head_dim)
        assert actual[:3] == cut
        assert actual.padded_dim == actual.num_chunks * actual.width


class TestRefusals:
    supported = {  # noqa: RUF012
        "dtype": jnp.bfloat16, "k_dtype": jnp.bfloat16, "v_dtype": jnp.bfloat16, "head_dim": 128,
        "block_size": 16, "group": 4, "decode_query_len": 1,
    }  # fmt: skip

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"dtype": jnp.float32}, "query dtype=float32 is not supported; supported: bfloat16, float16"),
            ({"v_dtype": jnp.float16}, "values stored in float16 are not supported with bfloat16 queries"),
            ({"k_dtype": jnp.uint8}, "keys stored in uint8 are not supported with bfloat16 queries"),
            (
                {"has_token_scales": (False, True)},
                "scale per token and head is not supported for values stored in bfloat16",
            ),
            (
                {"k_dtype": jnp.int8, "head_dim": 120},
                "head_dim=120 is not supported for 8-bit keys or values; supported: 32, 64, 80",
            ),
            ({"head_dim": 72}, "head_dim=72 .*80"),
            ({"block_size": 4}, "block_size=4 .*16"),
            ({"group": 65}, "65 query heads per KV head .* the maximum is 64"),
            ({"decode_query_len": 9}, "decode_query_len=9 .* the maximum is 8"),
            ({"layout": "packed"}, "layout=packed .* NHD, HND"),
        ],
    )
    def test_why_not_decode_names_what_is_not_supported(self, change, message):
        assert why_not_decode(**self.supported) is None
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(why_not_decode(**self.supported | change))

    def test_why_not_on_names_the_platform_without_a_gpu(self):
        with pytest.raises(AssertionError, match="'cpu'"):
            raise AssertionError(why_not_on(jnp.zeros(1)))

    def test_decode_raises_with_the_reason(self):
        args, kwargs = random_step([5], 2, 2, 72, 16)
        with pytest.raises(NotImplementedError, match=r"paged_decode: .*head_dim=72"):
            paged_decode(*args, **kwargs)

    def test_too_many_query_heads_for_head_bits_are_refused(self):
        args, kwargs = random_step([5, 6], 22, 2, 64, 16)
        lists = BlockList(jnp.zeros((2, 2, 1), jnp.int32), jnp.zeros((2, 2), jnp.int32))
        options = {"block_list": lists, "list_block_size": 16, "lists_have_head_bits": True}
        with pytest.raises(ValueError, match="at most 10 query heads per KV head, got 11"):
            paged_decode(*args, **kwargs, **options)

    def test_heads_as_rows_are_refused(self):
        args, kwargs = random_step([5, 6], 2, 2, 64, 16, rows_per_token=2)
        with pytest.raises(ValueError, match=r"score\.rows_per_token must be 1, got 2"):
            paged_decode(*args, **kwargs)

    def test_wrong_shapes_are_refused(self):
        args, kwargs = random_step([5, 6], 2, 2, 64, 16)
        with pytest.raises(ValueError, match=r"query must have shape \(6, 2, 64\).*got \(2, 2, 64\)"):
            paged_decode(*args, **kwargs | {"decode_query_len": 3})
        with pytest.raises(ValueError, match="layout must be one of 'NHD', 'HND', got 'packed'"):
            paged_decode(*args, **kwargs, layout="packed")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"k_scale": (3,)}, r"k_scale's shape must be one of .*got \(3,\)"),
            ({"k_scale": (2, 64)}, r"k_scale's shape must be one of .*got \(2, 64\)"),
            ({"v_scale": (2, 63)}, r"v_scale's shape must be one of .*got \(2, 63\)"),
            ({"list_block_size": 16}, "list_block_size must be None without block_list, got 16"),
            ({"block_list": ((2, 1, 3), (2, 2)), "list_block_size": 16}, r"block_list.ids must"),
            (
                {"block_list": ((2, 2, 3), (2, 1)), "list_block_size": 16},
                r"block_list.counts must",
            ),
            (
                {"block_list": ((2, 2, 3), (2, 2)), "list_block_size": 24},
                "list_block_size must be .*24",
            ),
            (
                {"lists_have_head_bits": True},
                "lists_have_head_bits must be False without block_list, got True",
            ),
        ],
    )
    def test_wrong_scales_and_lists_are_refused(self, change, message):
        args, kwargs = random_step([5, 6], 2, 2, 64, 16)
        schedules = {
            name: BlockList(*(jnp.zeros(shape, jnp.int32) for shape in value))
            if name == "block_list"
            else jnp.zeros(value)
            if name.endswith("_scale")
            else value
            for name, value in change.items()
        }
        with pytest.raises(ValueError, match=message):
            paged_decode(*args, **kwargs, **schedules)

    @pytest.mark.parametrize(
        ("change", "message"),
        [({"tile_kv": 32}, "tile_kv must .*64, 128, got 32"),
         ({"tile_kv": 128, "per_warp_mma": True}, "tile_kv must be 64 with per_warp_mma, got 128"),
         ({"uses_tma": False}, "per_warp_mma must be True without wgmma or TMA, got False"),
         ({"gpu": "12.0"}, "per_warp_mma must be True without wgmma or TMA, got False"),
         ({"gpu": "8.0", "per_warp_mma": True}, "uses_tma must be False on compute capability 8.0, got True"),
         ({"gpu": "7.5"}, "gpu must be one of '8.0', .*, got '7.5'"),
         ({"split_kv": 100}, "multiple of tile_kv.*100"),
         ({"max_rows": 12}, "max_rows must .*12"), ({"stages": 0}, "stages must be positive")],
    )  # fmt: skip
    def test_invalid_sizes_are_refused(self, change, message):
        with pytest.raises(ValueError, match=message):
            DecodeSizes(**change)


class TestAheadOfTime:
    """Kernels compiled on a machine without a GPU, for an H200 unless a compute capability is given."""

    def check(self, names, gpu="9.0"):
        aot.require_plugin()
        reports = aot.compile_all("tests.pallas_kernels.paged_decode.decode_aot_cases", names, gpu)
        assert list(reports) == names
        for name, kernels in reports.items():
            assert {k.name.partition("_mosaic")[0] for k in kernels} == {
                "paged_decode",
                "paged_decode_combine",
            }, name
            assert [k for k in kernels if k.spilled_bytes] == [], name
            # Two warpgroups of one thread block fit the register file.
            assert all(k.registers <= 255 for k in kernels), name

    def test_a_sample_of_shipped_kernels_compiles_without_spills(self):
        self.check(list(aot_cases())[::110])

    @pytest.mark.slow
    def test_all_shipped_kernels_compile_without_spills(self):
        self.check(list(aot_cases()))

    @pytest.mark.parametrize(
        ("gpu", "first", "step"),
        [("8.0", 50, 200), ("8.6", 225, 200), ("8.9", 290, 200), ("10.0", 100, 200), ("12.0", 140, 200)],
    )
    def test_a_sample_compiles_without_spills_for_other_architectures(self, gpu, first, step):
        self.check(list(aot_cases())[first::step], gpu)

    @pytest.mark.slow
    @pytest.mark.parametrize(("part", "gpu"), list(enumerate(sorted(set(ARCHITECTURES) - {"9.0"}))))
    def test_a_larger_sample_compiles_without_spills_for_other_architectures(self, part, gpu):
        """Each architecture has other cases: all cases of one would take half an hour."""
        self.check(list(aot_cases())[3 * part :: 21], gpu)
