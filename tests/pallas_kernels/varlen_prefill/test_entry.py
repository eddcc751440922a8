"""varlen_prefill: contract against the float64 oracle, races, schedules and refusals, on a CPU and a GPU."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jattn
from jattn.implementations.mosaic_gpu import score_of
from pallas_kernels.shared.memory import HEAD_DIMS
from pallas_kernels.shared.score import Score
from pallas_kernels.support import KERNELS, why_not_prefill
from pallas_kernels.varlen_prefill import (
    PrefillSizes,
    default_sizes,
    make_schedule,
    reference,
    varlen_prefill,
)
from pallas_kernels.varlen_prefill import schedule as schedule_module
from pallas_kernels.varlen_prefill.schedule import COLUMNS, max_tiles
from tests import aot, assertions, contract
from tests.contract import SCORE_FACTORS, Problem, case_id, mark_every_second_slow
from tests.covering_array import covering_array, select_each_value
from tests.pallas_kernels.varlen_prefill.prefill_aot_cases import OF_SPLITS, STORED, TWO_WARPGROUPS, aot_cases

# Query and sequence lengths: several tiles, tiles with one live row, row counts not divisible by 8, none.
LONG = {"prompts": ([150, 0, 3, 70], [150, 0, 3, 70], 1), "behind": ([70, 3, 131], [270, 130, 132], 1)}

FACTORS = {
    "region": ["prompts", "behind", "prefill", "chunked"],
    "causal": [True, False],
    "window": [None, (20, 0), (70, 2), (None, 2), (9, None)],
    "chunk_size": [None, 8, 70],
    "soft_cap": [None, 5.0],
    "alibi": [None, "linear", "sqrt"],
    "sinks": [False, True],
    "heads": [(2, 2), (4, 1), (6, 2)],
    "head_dim": list(HEAD_DIMS),
    "dtype": ["bfloat16", "float16"],
    "kv": ["NHD", "HND", "no_cache"],
    "block_size": [8, 16, 32, 64, 128, 256],
}
FAST = FACTORS | {
    "region": ["prompts", "behind"],
    "window": [None, (20, 0), (70, 2)],
    "chunk_size": [None, 70],
    "alibi": [None, "linear"],
    "heads": [(2, 2), (3, 1)],
    "head_dim": [64, 80],
    "block_size": [8, 16, 128],
}
ALWAYS = {"stored": "plain", "sparsity": None, "padded": False}
# Requests as (queries, keys): FlashAttention's awkward lengths, and mixes of them.
AWKWARD = [
    ((1, 1),),
    ((239, 239),),
    ((799, 3 + 799),),
    ((113, 203),),
    ((1023, 1024),),
    ((4224, 4224),),
    ((1, 1), (239, 239), (113, 203), (1, 4224), (7, 8), (799, 802)),
    ((64, 1000), (1, 17), (1023, 1024), (3, 3), (128, 128), (129, 257), (2048, 2048), (5, 4000)),
]
# Each length once, and each kernel: keys are packed, or in small or large blocks.
AWKWARD_CASES = select_each_value(
    [
        {"head_dim": head_dim, "block_size": block_size, "lens": lens}
        for head_dim, block_size, lens in itertools.product((64, 128, 256), (None, 16, 128), AWKWARD)
    ],
    pairs_of=("head_dim", "block_size"),
)
PADDING = 5  # NaN tokens after the last request


@pytest.fixture(autouse=True)
def _long_regions(monkeypatch):
    monkeypatch.setattr(contract, "REGIONS", contract.REGIONS | LONG)


def cases(factors):
    return [case | ALWAYS for case in covering_array(factors)]


def plain_case(**changes):
    plain = {name: values[0] for name, values in FACTORS.items()} | ALWAYS
    return plain | {"head_dim": 64, "block_size": 16} | changes


def sizes_of(case):
    """Use few thread blocks, so that each has several tiles, and key tiles of both sizes."""
    is_wide = case["head_dim"] > 128
    return PrefillSizes(
        tile_kv=64 if is_wide or case["causal"] else 128,
        stages=2,
        warpgroups=3 if case["head_dim"] == 64 else 2,
        query_buffers=1 if is_wide else 2,
        ctas=3,
    )


def attend(problem: Problem, interpret=None, sizes=None):
    """Attend to the whole step by the kernel; these problems have no decode rows."""
    spec, metadata, kv = problem.spec, problem.metadata, problem.kv
    assert metadata.bucket.max_decodes == 0
    is_packed = isinstance(kv, jattn.PackedKV)
    as_jax = lambda x: None if x is None else jnp.asarray(x)
    if is_packed:
        kv_arrays = {"kv_start_loc": kv.kv_start_loc}
    else:
        scales = {"k_scale": as_jax(kv.stored_k_scale), "v_scale": as_jax(kv.stored_v_scale)}
        kv_arrays = {"block_table": metadata.block_table} | scales
    run = functools.partial(
        varlen_prefill,
        score=score_of(spec),
        layout="NHD" if is_packed else kv.layout,
        sizes=sizes,
        return_lse=True,
        interpret=interpret,
    )
    padding = ((0, PADDING), (0, 0), (0, 0))
    out, lse = jax.jit(run)(
        query=jnp.asarray(np.pad(problem.query, padding, constant_values=np.nan)),
        key=jnp.asarray(kv.k),
        value=jnp.asarray(kv.v),
        query_start_loc=metadata.query_start_loc,
        seq_lens=metadata.seq_lens,
        sinks=as_jax(problem.sinks),
        alibi_slopes=as_jax(problem.slopes),
        **kv_arrays,
    )
    assert not np.asarray(out[-PADDING:], np.float32).any()
    assert np.isneginf(lse[:, -PADDING:]).all()
    return out[:-PADDING], lse[:, :-PADDING]


class TestContract:
    @pytest.mark.parametrize("case", mark_every_second_slow(cases(FAST)[::2]), ids=case_id)
    def test_prefill_equals_float64_for_combinations_of_features(self, case):
        problem = Problem(case)
        problem.check(*attend(problem, plgpu.InterpretGPUParams(), sizes_of(case)))

    @pytest.mark.slow
    @pytest.mark.parametrize("case", cases(FACTORS), ids=case_id)
    def test_prefill_equals_float64_for_every_head_dim_and_block_size(self, case):
        problem = Problem(case)
        problem.check(*attend(problem, plgpu.InterpretGPUParams(), sizes_of(case)))

    def test_queries_before_the_first_key_get_zeros(self):
        spec = {"score": Score(scale=0.1, chunk_size=4), "sizes": PrefillSizes(tile_kv=64, ctas=1)}
        q, k, v = (
            jax.random.normal(jax.random.key(i), (n, 2, 64), jnp.bfloat16) for i, n in enumerate((70, 5, 5))
        )
        out, lse = packed([70], [5], q, k, v, **spec, return_lse=True)
        assert (np.asarray(out[:65]) == 0).all()
        assert np.isneginf(lse[:, :65]).all()
        assert np.isfinite(lse[:, 65:]).all()


@functools.cache
def compiled():
    aot.require_plugin()
    return aot.compile_all("tests.pallas_kernels.varlen_prefill.prefill_aot_cases", list(aot_cases()))


class TestAheadOfTime:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", list(aot_cases()))
    def test_shipped_kernels_compile_and_spill_little(self, name):
        """Stores and loads are counted; addresses and counts of a work tile may be spilled.

        The loop over full tiles reads a spilled value only with head_dim 64 over blocks. Windows, chunks and
        splits spill most, as does what leaves few registers: head_dim 256 and dequantizing warpgroups. All
        three together spill 300 bytes.
        """
        kernel, *merge = compiled()[name]
        assert kernel.name.removesuffix("_mosaic_gpu_kernel") == "varlen_prefill"
        is_split = name.endswith(OF_SPLITS)
        limit = 200 if is_split or name.startswith("d256-chunk") else 136
        has_fewest = name.startswith("d256") or any(f"-{stored}-" in name for stored in STORED)
        assert kernel.spilled_bytes <= (304 if is_split and has_fewest else limit)
        assert len(merge) == name.endswith(OF_SPLITS)
        assert all(kernel.spilled_bytes == 0 for kernel in merge)

    def test_plain_attention_does_not_spill(self):
        aot.require_plugin()
        names = ["d128-plain-packed-bfloat16", TWO_WARPGROUPS]
        reports = aot.compile_all("tests.pallas_kernels.varlen_prefill.prefill_aot_cases", names)
        for name, kernels in reports.items():
            assert [kernel.spilled_bytes for kernel in kernels] == [0] * (1 + name.endswith(OF_SPLITS)), name


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("case", select_each_value(cases(FACTORS), pairs_of=SCORE_FACTORS), ids=case_id)
    def test_prefill_equals_float64(self, case):
        problem = Problem(case)
        problem.check(*attend(problem))

    @pytest.mark.parametrize("case", AWKWARD_CASES, ids=case_id)
    def test_prefill_equals_float32_for_awkward_lengths(self, case):
        """And 20 runs give the same bits."""
        block_size, head_dim = case["block_size"], case["head_dim"]
        query_lens, seq_lens = zip(*case["lens"], strict=True)
        tokens, keys = sum(query_lens), sum(seq_lens)
        draw = lambda seed, rows, heads: jax.random.normal(
            jax.random.key(seed), (rows, heads, head_dim), jnp.bfloat16
        )
        q, k, v = draw(0, tokens, 4), draw(1, keys, 2), draw(2, keys, 2)
        starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        kv_starts = np.concatenate([[0], np.cumsum(seq_lens)]).astype(np.int32)
        arrays = {"key": k, "value": v, "kv_start_loc": jnp.asarray(kv_starts[:-1])}
        if block_size is not None:
            arrays = paged(np.asarray(k), np.asarray(v), seq_lens, block_size)
        run = jax.jit(functools.partial(varlen_prefill, score=Score(scale=0.1)))
        args = {
            "query": q,
            "query_start_loc": jnp.asarray(starts),
            "seq_lens": jnp.asarray(seq_lens),
            **arrays,
        }
        out, _ = run(**args)
        q, k, v, actual = (np.asarray(x, np.float32) for x in (q, k, v, out))
        for r, (first, last) in enumerate(itertools.pairwise(starts)):
            key_slice = slice(kv_starts[r], kv_starts[r + 1])
            expected = in_float32(q[first:last], k[key_slice], v[key_slice], scale=0.1)
            np.testing.assert_allclose(actual[first:last], expected, atol=2e-2)
        for _ in range(20):
            assert jnp.array_equal(run(**args)[0], out)


def paged(k, v, seq_lens, block_size):
    """Return packed keys and values of each request in shuffled blocks, with NaN in every other slot."""
    counts = [-(-n // block_size) for n in seq_lens]
    order = np.random.default_rng(0).permutation(sum(counts))
    table = np.full((len(counts), max(counts)), -(2**30), np.int32)
    caches = [np.full((sum(counts), block_size, *x.shape[1:]), np.nan, x.dtype) for x in (k, v)]
    token = 0
    for row, blocks, n in zip(table, np.split(order, np.cumsum(counts)[:-1]), seq_lens, strict=True):
        row[: len(blocks)] = blocks
        positions = np.arange(n)
        for cache, x in zip(caches, (k, v), strict=True):
            cache[blocks[positions // block_size], positions % block_size] = x[token : token + n]
        token += n
    return {"key": jnp.asarray(caches[0]), "value": jnp.asarray(caches[1]), "block_table": jnp.asarray(table)}


def in_float32(q, k, v, *, scale):
    """Return causal attention of one request on the host; q [tokens, heads, dim], k and v [keys, kv_heads,
    dim].
    """
    tokens, heads, dim = q.shape
    q = q.reshape(tokens, k.shape[1], -1, dim)
    s = np.einsum("qhgd,khd->hgqk", q, k, optimize=True) * scale
    position = np.arange(tokens)[:, None] + (len(k) - tokens)
    s = np.where(np.arange(len(k)) <= position, s, -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    out = np.einsum("hgqk,khd->qhgd", p / p.sum(axis=-1, keepdims=True), v, optimize=True)
    return out.reshape(tokens, heads, dim)


def packed(query_lens, seq_lens, query, key, value, *, interpret="cpu", detect_races=False, **options):
    """Run varlen_prefill over packed keys of consecutive requests."""
    ends = lambda lens: jnp.asarray(np.concatenate([[0], np.cumsum(lens)]), jnp.int32)
    interpret = plgpu.InterpretGPUParams(detect_races=detect_races) if interpret else None
    run = functools.partial(varlen_prefill, interpret=interpret, **options)
    starts = ends(query_lens), jnp.asarray(seq_lens, jnp.int32)
    return jax.jit(run)(query, key, value, *starts, kv_start_loc=ends(seq_lens)[:-1])


class TestRaces:
    @pytest.mark.parametrize("warpgroups", [2, 3])
    def test_prefill_has_no_races(self, warpgroups):
        """Full tiles only: the detector takes two views of the row buffer for writes of two warpgroups."""
        lens = [64 * warpgroups, 192 * warpgroups]
        draw = lambda seed, heads: jax.random.normal(
            jax.random.key(seed), (sum(lens), heads, 64), jnp.bfloat16
        )
        sizes = PrefillSizes(tile_kv=64, stages=2, warpgroups=warpgroups, ctas=2)
        args = draw(0, 2), draw(1, 1), draw(2, 1)
        with assertions.assert_no_races(num_kernels=1):
            run = packed(lens, lens, *args, score=Score(scale=0.1), sizes=sizes, detect_races=True)
            jax.block_until_ready(run)


class TestSchedule:
    def make(self, starts, keys, kv_starts=None, *, num_tokens, has_lists=False, **score):
        as_jax = lambda x: None if x is None else jnp.asarray(x, jnp.int32)
        return make_schedule(
            as_jax(starts),
            as_jax(keys),
            as_jax(kv_starts),
            num_tokens=num_tokens,
            score=Score(scale=1.0, **score),
            sizes=PrefillSizes(tile_kv=64),
            has_lists=has_lists,
        )

    @pytest.mark.parametrize(
        ("has_lists", "expected"),
        [
            (True, [(0, 0, 0, 10, 0), (2, 8, 2, 128, 258), (2, 136, 0, 14, 386), (3, 144, 6, 16, -16)]),
            (
                False,
                [(2, 72, 0, 78, 322), (2, -56, 66, 128, 194), (0, -64, 64, 74, -64), (3, 80, 70, 80, -80)],
            ),
        ],
    )
    def test_work_tiles_are_sorted_by_length_and_padding_has_no_keys(self, has_lists, expected):
        """Without lists, warpgroups without rows come first; with lists, tiles are in order."""
        actual = self.make([0, 10, 10, 150], [10, 0, 400], num_tokens=160, has_lists=has_lists)
        table = [dict(zip(COLUMNS, map(int, row), strict=False)) for row in np.asarray(actual.table)]
        live = table[: int(actual.num_valid[0])]
        rows = [(t["req"], t["first_row"], t["begin"], t["end"], t["position"]) for t in live]
        assert rows == expected
        np.testing.assert_array_equal(actual.first_tiles, [0, 1, 1, 3])
        assert not np.asarray(actual.table)[len(live) :].any()

    def test_bound_on_work_tiles_holds_for_the_worst_lengths(self):
        for lens in ([1] * 40, [9] * 30, [121, 122, 120] * 9, [128] * 3, [7, 130] * 8):
            starts = np.concatenate([[0], np.cumsum(lens)])
            actual = self.make(starts, lens, num_tokens=int(starts[-1]) + 3)
            needed = sum(-(-(b - a // 8 * 8) // 128) for a, b in itertools.pairwise(starts))
            assert needed + 1 == actual.num_valid[0] <= max_tiles(int(starts[-1]) + 3, len(lens), 128)

    def test_window_limits_the_length_of_work_tiles(self):
        actual = self.make([0, 1024], [1024], num_tokens=1024, window=(63, None))
        np.testing.assert_array_equal(actual.table[:8, COLUMNS.index("first_row")], np.r_[128:1024:128, 0])

    def test_precomputed_schedule_gives_identical_bits(self):
        draw = lambda seed: jax.random.normal(jax.random.key(seed), (96, 1, 64), jnp.bfloat16)
        args, lens = (draw(0), draw(1), draw(2)), [33, 60]
        options = {"score": Score(scale=0.1), "sizes": PrefillSizes(tile_kv=64, ctas=2)}
        schedule = make_schedule(
            jnp.asarray([0, 33, 93]), jnp.asarray(lens), jnp.asarray([0, 33]), num_tokens=96, **options
        )
        out, _ = packed(lens, lens, *args, **options)
        repeated, _ = packed(lens, lens, *args, **options, schedule=schedule)
        np.testing.assert_array_equal(out, repeated)


class TestHeadsPerL2Group:
    def test_heads_of_a_group_fit_the_l2_cache(self):
        heads_for = functools.partial(schedule_module.heads_per_l2_group, 32, 8, sizes=PrefillSizes())
        assert heads_for(kv_bytes=4 * 10**6, rows=128) == 32
        assert heads_for(kv_bytes=8 * 10**6, rows=128) == 16
        assert heads_for(kv_bytes=10**9, rows=512) == 4

    def test_heads_of_a_group_keep_all_ctas_busy(self):
        heads_for = functools.partial(
            schedule_module.heads_per_l2_group, 32, 8, sizes=PrefillSizes(), kv_bytes=10**9
        )
        assert heads_for(rows=132) == 4
        assert heads_for(rows=131) == 8
        assert heads_for(rows=1) == 32

    def test_order_of_head_groups_does_not_change_the_bits(self, monkeypatch):
        """Of four groups, every other one takes the rows in the opposite order."""
        draw = lambda seed, heads: jax.random.normal(jax.random.key(seed), (200, heads, 64), jnp.bfloat16)
        args, lens = (draw(0, 4), draw(1, 4), draw(2, 4)), [33, 160]
        options = {"score": Score(scale=0.1), "sizes": PrefillSizes(tile_kv=64, ctas=1)}
        out, _ = packed(lens, lens, *args, **options)
        monkeypatch.setattr(schedule_module, "L2_BYTES", 1)
        repeated, _ = packed(lens, lens, *args, **options)
        np.testing.assert_array_equal(out, repeated)


class TestReference:
    def test_reference_equals_float64(self):
        draw = lambda seed: jax.random.normal(jax.random.key(seed), (40, 2, 64), jnp.bfloat16)
        q, k, v = draw(0)[:24], draw(1), draw(2)
        score = Score(scale=0.1, window=(9, None))
        out, _ = packed([24], [40], q, k, v, score=score, sizes=PrefillSizes(tile_kv=64, ctas=1))
        expected = reference.attend_request(q, k, v, scale=0.1, window=(9, None))
        np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=2e-2)


class TestRefusals:
    served = {"dtype": jnp.bfloat16, "kv_dtype": jnp.bfloat16, "head_dim": 128, "block_size": 16}  # noqa: RUF012

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"dtype": jnp.float32}, "query dtype=float32 is not supported"),
            ({"kv_dtype": jnp.int8}, "keys of int8 are not supported with bfloat16 queries"),
            ({"head_dim": 72}, "head_dim=72 .*80"),
            ({"block_size": 4}, "block_size=4 .*16"),
            ({"layout": "packed"}, "layout=packed .* NHD, HND"),
        ],
    )
    def test_unsupported_features_are_rejected_by_name(self, change, message):
        assert why_not_prefill(**self.served) is None
        assert why_not_prefill(**self.served | {"block_size": None}) is None
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(why_not_prefill(**self.served | change))

    def test_prefill_raises_with_the_reason(self):
        x = jnp.zeros((8, 1, 72), jnp.bfloat16)
        with pytest.raises(NotImplementedError, match=r"varlen_prefill: .*head_dim=72"):
            packed([8], [8], x, x, x, score=Score(scale=1.0))

    def test_heads_as_rows_have_a_sink_each_and_no_alibi(self):
        x, score = jnp.zeros((8, 1, 64), jnp.bfloat16), Score(scale=1.0, rows_per_token=2)
        message = r"score\.rows_per_token must be 1 with ALiBi or a score function, got 2"
        with pytest.raises(ValueError, match=message):
            packed([8], [8], x, x, x, score=score, alibi_slopes=jnp.ones(1))
        with pytest.raises(ValueError, match=r"sinks must have shape \(2,\)"):
            packed([8], [8], x, x, x, score=score, sinks=jnp.ones(1))

    def test_keys_must_be_packed_or_paged(self):
        x, lens = jnp.zeros((8, 1, 64), jnp.bfloat16), jnp.asarray([8])
        with pytest.raises(
            ValueError,
            match=r"Pass either kv_start_loc \(packed keys\) or block_table \(a paged cache\), got 0",
        ):
            varlen_prefill(x, x, x, jnp.asarray([0, 8]), lens, score=Score(scale=1.0))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"tile_kv": 32}, "tile_kv must .*64, 128, got 32"),
            ({"warpgroups": 1}, "warpgroups must .*2, 3, got 1"),
            ({"teams": 3}, r"teams must be one of 1, 2, got 3"),
            ({"stages": 1}, "stages must be at least 2, got 1"),
            ({"query_buffers": 3}, "query_buffers must .*1, 2, got 3"),
        ],
    )
    def test_invalid_tile_sizes_are_rejected(self, change, message):
        with pytest.raises(ValueError, match=message):
            PrefillSizes(**change)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"window": (-1, 0)}, r"window's left side must be None or lie in \[0, 1073741824\), got -1"),
            ({"window": (None, 2**31 - 2)}, "window's right side must .*, got 2147483646"),
            ({"chunk_size": 0}, "chunk_size must be None or lie in .1, 134217728., got 0"),
            ({"rows_per_token": 12}, "rows_per_token must be a power of two, got 12"),
            ({"chunk_size": 2**28 - 1}, "chunk_size must .*, got 268435455"),
        ],
    )
    def test_windows_and_chunks_beyond_int32_are_rejected(self, change, message):
        with pytest.raises(ValueError, match=message):
            Score(scale=1.0, **change)

    def test_largest_windows_and_chunks_hide_no_key(self):
        position = jnp.asarray([-8, 0, 2**30 - 1])
        for change in ({"window": (2**30 - 1, 2**30 - 1)}, {"chunk_size": 2**27}):
            low, high = Score(scale=1.0, causal=False, **change).key_range(position, jnp.int32(9))
            assert low[1] == 0
            assert high[1] == 9
            assert (low >= -(2**30) - 8).all()

    @pytest.mark.parametrize("has_lists", [False, True])
    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    def test_default_sizes_fit_shared_memory(self, head_dim, has_lists):
        from pallas_kernels.shared.memory import head_chunks
        from pallas_kernels.varlen_prefill.sizes import SHARED_MEMORY

        sizes, padded_dim = default_sizes(head_dim, has_lists=has_lists), head_chunks(head_dim).padded_dim
        assert sizes.shared_memory(padded_dim) <= SHARED_MEMORY
        if head_dim in KERNELS["varlen_prefill"].eight_bit_head_dims:
            widening = default_sizes(head_dim, is_quantized=True)
            assert widening.shared_memory(padded_dim, is_quantized=True) <= SHARED_MEMORY


class TestBothEdgesInOneTile:
    """Tiles that contain both ends of the visible range, whose invisible values several warpgroups clear."""

    def check(self, runs, interpret=None):
        problem = Problem(plain_case(region="chunked", window=(9, None), dtype="bfloat16"))
        kv, metadata = problem.kv, problem.metadata
        score = Score(scale=problem.spec.softmax_scale, window=(9, None))
        run = functools.partial(varlen_prefill, score=score, sizes=sizes_of(problem.case), return_lse=True)
        run = jax.jit(functools.partial(run, interpret=interpret))
        lens = metadata.query_start_loc, metadata.seq_lens
        for _ in range(runs):
            query = jnp.asarray(problem.query)
            problem.check(*run(query, kv.k, kv.v, *lens, block_table=metadata.block_table))

    @pytest.mark.slow
    def test_no_nan_reaches_the_output(self):
        self.check(40, plgpu.InterpretGPUParams())

    @pytest.mark.gpu
    def test_no_nan_reaches_the_output_on_a_gpu(self):
        self.check(40)


class TestLazyRescale:
    """A row keeps its row_max until a score exceeds it by a threshold; scores rise slowly, fast, beyond f32,
    and fall.

    With ALiBi the row_max rises from tile to tile, in the first head by nearly the whole threshold.
    """

    RISES = (-300.0, -290.0, 0.0, 5.0, 90.0, -90.0, 90.5, 1000.0, 900.0, 0.0)  # of each 64 keys, in nats

    def check(self, dtype, window, slopes, interpret):
        keys, width, tokens = 64 * len(self.RISES), 64, 200
        draw = lambda seed, *shape: 0.3 * np.random.default_rng(seed).standard_normal(shape, np.float32)
        q, k, v = draw(0, tokens, 2, width), draw(1, keys, 1, width), draw(2, keys, 1, width)
        q[:, :, 0], k[:, 0, 0] = 1.0, np.repeat(self.RISES, 64) / 8
        score = Score(scale=8.0, window=window)
        q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
        run = functools.partial(packed, score=score, sizes=PrefillSizes(tile_kv=64, ctas=1), return_lse=True)
        alibi = None if slopes is None else jnp.asarray(slopes, jnp.float32)
        out, lse = run([tokens], [keys], q, k, v, alibi_slopes=alibi, interpret=interpret)
        q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
        s = np.einsum("qhd,kd->hqk", q, k[:, 0]) * score.scale
        position = np.arange(tokens)[:, None] + (keys - tokens)
        positions = np.arange(keys)
        low = 0 if window[0] is None else position - window[0]
        if slopes is not None:
            s = s + np.asarray(slopes, np.float64)[:, None, None] * (positions - position)
        s = np.where((positions <= position) & (positions >= low), s, -np.inf)
        row_max = s.max(axis=-1, keepdims=True)
        total = np.exp(s - row_max).sum(axis=-1, keepdims=True)
        expected = np.einsum("hqk,kd->qhd", np.exp(s - row_max) / total, v[:, 0])
        np.testing.assert_allclose(
            np.asarray(out, np.float64), expected, atol=2e-3 if dtype == "float16" else 1e-2
        )
        np.testing.assert_allclose(lse, (row_max + np.log(total))[..., 0], rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize(
        ("dtype", "window", "slopes"),
        [
            ("bfloat16", (None, None), None),
            ("float16", (130, None), None),
            ("bfloat16", (200, None), (0.8, 0.01)),
        ],
        ids=str,
    )
    def test_rows_equal_float64(self, dtype, window, slopes):
        self.check(dtype, window, slopes, "cpu")

    @pytest.mark.gpu
    @pytest.mark.parametrize("window", [(None, None), (130, None)], ids=str)
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize("slopes", [None, (0.8, 0.01)], ids=str)
    def test_rows_equal_float64_on_a_gpu(self, dtype, window, slopes):
        self.check(dtype, window, slopes, None)
