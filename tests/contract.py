"""The contract of every implementation of `attend`, as a test class: subclass it and set `implementation`.

The cache of each case is poisoned: only slots that some query may read contain numbers. Block tables end in
garbage and padding queries are NaN (see tests/attention_problems.py).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from tests import oracle
from tests.attention_problems import AttentionProblem, Setting
from tests.covering_array import covering_array

NONE = None
FACTORS = {
    "region": ["decode", "speculative", "prefill", "chunked", "mixed"],
    "causal": [True, False],
    "window": [NONE, (4, 0), (3, 2), (NONE, 2), (9, NONE)],
    "chunk_size": [NONE, 8],
    "soft_cap": [NONE, 5.0],
    "alibi": [NONE, "linear", "sqrt"],
    "sinks": [False, True],
    "heads": [(2, 2), (4, 2), (4, 1), (6, 2)],
    "head_dim": [8, 16, 80, 128, 256],
    "dtype": ["float32", "bfloat16", "float16"],
    "stored": [
        "plain", "plain_scalar", "fp8_scalar", "fp8_head", "int8_scalar", "int8_token_head", "fp8_token_head",
        "fp8e5_scalar", "int8_static_v", "int8_k_only",
    ],
    "query_quantization": [NONE, "int8", "fp8_e4m3"],
    "kv": ["NHD", "HND", "packed", "no_cache"],
    "block_size": [4, 16],
    "sparsity": [NONE, "strided", "group", "rank1", "stripes_only"],
    "padded": [False, True],
}  # fmt: skip
# Factors that change scores or hide keys. Cases that run on a GPU contain each pair of their values.
SCORE_FACTORS = ("causal", "window", "chunk_size", "soft_cap", "alibi", "sinks")
SPARSITY = {
    None: None,
    "strided": jattn.LocalStrided(block_size=4, local_blocks=2, vert_stride=3),
    "group": jattn.LocalStrided(block_size=3, local_blocks=1, vert_stride=4, homo_head_group=True),
    "rank1": jattn.LocalStrided(block_size=8, local_blocks=1, vert_stride=8, tp_rank=1, tp_size=2),
    "stripes_only": jattn.LocalStrided(block_size=4, local_blocks=0, vert_stride=2, homo_head=True),
}
# (query_lens, seq_lens, decode_query_len), with last blocks of one key, single tokens and empty requests.
REGIONS = {
    "decode": ([1, 1, 1, 1], [1, 17, 33, 97], 1),
    "speculative": ([3, 3, 3], [3, 17, 50], 3),
    "prefill": ([17, 0, 1, 40], [17, 0, 1, 40], 1),
    "chunked": ([5, 16, 2], [33, 17, 49], 1),
    "mixed": ([1, 1, 7, 1, 23], [49, 2, 7, 20, 64], 1),
}


def allowed(case: dict) -> bool:
    is_quantized = case.get("stored", "plain") != "plain"
    kind = case.get("stored", "plain").partition("_")[0]
    alignment = 8 if kind == "plain" else 16
    query_quantization = case.get("query_quantization")
    rules = [
        query_quantization is None or "stored" not in case or kind == query_quantization.partition("_")[0],
        not (query_quantization is not None and case.get("kv") == "no_cache"),
        not (case.get("kv") == "no_cache" and is_quantized),
        not (case.get("kv") == "packed" and case.get("head_dim", 16) % alignment),
        not (case.get("kv") == "packed" and case.get("dtype") == "float32" and case.get("head_dim", 16) % 4),
    ]
    return all(rules)


CASES = covering_array(FACTORS, allowed, tries=15)


def case_id(case: dict) -> str:
    return "-".join(f"{v}" for v in case.values()).replace(" ", "")


def mark_every_second_slow(cases: list) -> list:
    """Return test parameters in which every second case is marked slow."""
    slow = lambda case: pytest.param(case, marks=pytest.mark.slow)
    return [slow(case) if i % 2 else case for i, case in enumerate(cases)]


def make_spec(case: dict) -> jattn.AttentionSpec:
    q_heads, kv_heads = case["heads"]
    return jattn.AttentionSpec(
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=case["head_dim"],
        causal=case["causal"],
        window=case["window"],
        chunk_size=case["chunk_size"],
        soft_cap=case["soft_cap"],
        sqrt_alibi=case["alibi"] == "sqrt",
        sparsity=SPARSITY[case["sparsity"]],
        query_quantization=case.get("query_quantization"),
    )


class Problem(AttentionProblem):
    """The arrays of one case of the covering array."""

    def __init__(self, case: dict, seed: int = 0, mask=None):
        self.case = case
        query_lens, seq_lens, decode_len = REGIONS[case["region"]]
        bucket = None
        if case["padded"]:
            exact = jattn.batch.bucket.exact_bucket(query_lens, decode_query_len=decode_len)
            bucket = jattn.Bucket(
                max_decodes=exact.max_decodes + 2,
                max_prefills=exact.max_prefills + 1,
                max_prefill_tokens=exact.max_prefill_tokens + 9,
                decode_query_len=decode_len,
                max_blocks=-(-97 // case["block_size"]) + 3,
            )
        setting = Setting(
            spec=make_spec(case),
            query_lens=query_lens,
            seq_lens=seq_lens,
            decode_query_len=decode_len,
            bucket=bucket,
            has_sinks=case["sinks"],
            has_alibi=case["alibi"] is not None,
            visible=mask,
            seed=seed,
            **{name: case[name] for name in ("block_size", "dtype", "stored", "kv")},
        )
        super().__init__(setting)


class AttentionContract:
    """Tests that every implementation must pass; a subclass sets `implementation`."""

    implementation: str

    def attend(self, problem: Problem, **changes):
        arrays = {
            "query": jnp.asarray(problem.query),
            "cache": problem.kv,
            "metadata": problem.metadata,
            **changes,
        }
        modifiers = {"sinks": problem.sinks, "alibi_slopes": problem.slopes}
        modifiers = {k: None if x is None else jnp.asarray(x) for k, x in modifiers.items()}
        run = functools.partial(
            jattn.attend, spec=problem.spec, implementation=self.implementation, return_lse=True
        )
        return jax.jit(run)(**arrays, **modifiers)

    # One case in twelve runs with the fast tests, all with `make test-kernels`.
    @pytest.mark.parametrize(
        "case",
        [pytest.param(c, marks=pytest.mark.kernels if i % 12 else ()) for i, c in enumerate(CASES)],
        ids=case_id,
    )
    def test_attend_equals_float64_for_combinations_of_features(self, case):
        problem = Problem(case)
        problem.check(*self.attend(problem))

    def plain_case(self, **changes):
        plain = {name: values[0] for name, values in FACTORS.items()}
        return plain | {"region": "mixed", "heads": (4, 2), "head_dim": 16} | changes

    def test_attend_is_bit_identical_when_run_twice(self):
        problem = Problem(self.plain_case(dtype="bfloat16"))
        first, second = self.attend(problem), self.attend(problem)
        assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(first, second, strict=True))

    def test_an_explicit_plan_does_not_change_the_bits(self):
        problem = Problem(self.plain_case(padded=True))
        plan = jattn.plan(problem.metadata, problem.spec, problem.kv, implementation=self.implementation)
        for a, b in zip(self.attend(problem), self.attend(problem, plan=plan), strict=True):
            np.testing.assert_array_equal(a, b)

    def test_padding_does_not_change_live_rows(self):
        exact, padded = (Problem(self.plain_case(padded=p)) for p in (False, True))
        (out, _), (padded_out, _) = self.attend(exact), self.attend(padded)
        rounding = 1e-6 * np.abs(out).max()  # XLA may sum a longer array in another order
        for r, n in enumerate(exact.query_lens):
            a, b = exact.starts[r], padded.starts[r]
            np.testing.assert_allclose(out[a : a + n], padded_out[b : b + n], rtol=0, atol=rounding)

    def test_one_trace_serves_every_batch_of_a_bucket(self):
        traces = []

        @jax.jit
        def run(query, cache, metadata):
            traces.append(1)
            return jattn.attend(query, cache, metadata, problem.spec, implementation=self.implementation)

        problem = Problem(self.plain_case(padded=True))
        bucket, size = problem.metadata.bucket, problem.case["block_size"]
        second_batch = jattn.build_batch_metadata(
            [1, 3], [9, 3], [[1, 2, 3], [4]], block_size=size, bucket=bucket
        )
        for metadata in (problem.metadata, second_batch):
            run(jnp.asarray(problem.query), problem.kv, metadata)
        assert len(traces) == 1

    @pytest.mark.kernels
    def test_vmap_equals_a_loop(self):
        problem = Problem(self.plain_case())
        kv, query = problem.kv, jnp.asarray(problem.query)
        queries = jnp.stack([query, query * 2])
        run = lambda q: jattn.attend(
            q, kv, problem.metadata, problem.spec, implementation=self.implementation
        )
        batched = jax.jit(jax.vmap(run))(queries)
        np.testing.assert_allclose(batched, jnp.stack([run(q) for q in queries]), rtol=0, atol=1e-5)

    @pytest.mark.parametrize("kv", ["NHD", "no_cache"])
    def test_cross_attention_reads_another_sequence(self, kv):
        spec = jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=8, causal=False)
        rng = np.random.default_rng(1)
        query_lens, kv_lens = [1, 6, 3], [7, 2, 0]
        k, v = (rng.normal(size=(9, 2, 8)).astype(np.float32) for _ in range(2))
        q = rng.normal(size=(10, 4, 8)).astype(np.float32)
        metadata = jattn.build_cross_attention_metadata(query_lens, kv_lens, [[2, 1], [3], []], block_size=4)
        cache = jattn.PackedKV(k=jnp.asarray(k), v=jnp.asarray(v), kv_start_loc=jnp.asarray([0, 7, 9]))
        if kv == "NHD":
            shape = jattn.CacheSpec(num_blocks=4, block_size=4, num_kv_heads=2, head_dim=8, dtype=jnp.float32)
            slots = jnp.asarray([8, 9, 10, 11, 4, 5, 6, 12, 13])
            cache = jattn.write_kv(jattn.PagedCache.create(shape), cache.k, cache.v, slots)
        assert (metadata.slot_mapping == -1).all()
        run = functools.partial(jattn.attend, implementation=self.implementation, return_lse=True)
        out, lse = run(jnp.asarray(q), cache, metadata, spec)
        split = lambda x, lens: np.split(x.astype(np.float64), np.cumsum(lens)[:-1])
        step = oracle.Step(split(q, query_lens), split(k, kv_lens), split(v, kv_lens), [False] * 3)
        out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64).T
        oracle.check(spec, step, np.float32, [0, 1, 7], out, lse)
        assert (out[7:] == 0).all()

    @pytest.mark.kernels
    @pytest.mark.parametrize("sinks", [False, True])
    def test_cascade_equals_attention_without_a_shared_prefix(self, sinks):
        case = self.plain_case(dtype="float32", sinks=sinks, soft_cap=5.0, padded=True)
        size, prefix_len = 4, 8
        query_lens, seq_lens = [1, 1, 5, 2], [9, 23, 13, 12]
        table = [[7, 3, *range(10 * r + 10, 10 * r + 16)] for r in range(4)]
        bucket = jattn.Bucket(max_decodes=3, max_prefills=3, max_prefill_tokens=9, max_blocks=8)
        metadata = jattn.build_batch_metadata(query_lens, seq_lens, table, block_size=size, bucket=bucket)
        keys = jax.random.split(jax.random.key(0), 3)
        k, v = (jax.random.normal(key, (60, 4, 2, 16)) for key in keys[:2])
        cache = jattn.PagedCache(k=k, v=v)
        query = jax.random.normal(keys[2], (bucket.max_tokens, 4, 16))
        head_sinks = jnp.linspace(-1.0, 2.0, 4) if sinks else None
        options = {"sinks": head_sinks, "implementation": self.implementation, "return_lse": True}
        plain = jattn.attend(query, cache, metadata, make_spec(case), **options)
        for length in (prefix_len, jnp.int32(prefix_len)):
            cascade = jattn.build_cascade_metadata(metadata, length)
            combined = jattn.cascade_attend(query, cache, cascade, make_spec(case), **options)
            for a, b in zip(combined, plain, strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
