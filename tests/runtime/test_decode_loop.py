"""decode_loop against the same steps run from the host, one at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.batch.bucket import Bucket
from jattn.runtime.decode_graphs import DecodeGraphs
from jattn.runtime.decode_loop import DecodeLoopOutput, decode_loop
from jattn.serving.engine.sampler import build_sampling_metadata, sample
from jattn.serving.engine.sampling_params import SamplingParams
from tests.tiny_step import (
    BLOCK_SIZE,
    CACHE_BYTES,
    PARAMS,
    VOCAB,
    batch,
    copies_of_the_cache,
    new_caches,
    step,
)

BUCKET = Bucket(max_decodes=4, max_blocks=6)
CAPACITY = BUCKET.max_blocks * BLOCK_SIZE
NUM_STEPS = 8
TABLES = np.arange(1, 1 + 3 * BUCKET.max_blocks).reshape(3, BUCKET.max_blocks)[:, ::-1]
FIRST_TOKENS, FIRST_LENS = [3, 7, 11], [5, 1, 9]  # three requests, and a padding row
GREEDY = [SamplingParams()] * 3
SAMPLED = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.8, top_k=4, top_p=0.9, seed=2),
    SamplingParams(),
]

GRAPHS = DecodeGraphs(step, buckets=[BUCKET])
sample_jit = jax.jit(sample)


def likeliest(logits, index):
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def make_sampler(params, num_generated):
    """Return `sample` for tokens after num_generated, as a pytree: its arrays are traced."""
    return jax.tree_util.Partial(sample_after, params, num_generated)


def sample_after(params, num_generated, logits, index):
    return sample(logits, params, num_generated + index)


def noisy_caches():
    """Return caches with random context."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), new_caches())


def first_batch():
    return batch([[t] for t in FIRST_TOKENS], FIRST_LENS, TABLES, BUCKET)


def loop(caches=None, model=step, **options):
    options = {"num_steps": NUM_STEPS, "sample": likeliest, **options}
    return decode_loop(model, PARAMS, noisy_caches() if caches is None else caches, *first_batch(), **options)


def new_tokens(out):
    """Return the tokens of each live request."""
    return [row[:n].tolist() for row, n in zip(np.asarray(out.tokens), out.num_tokens, strict=True)][:3]


def host_path(params_of_requests, stop_ids=(), max_lens=(99, 99, 99)):
    """Run step by step: build metadata on the host; requests that stop leave the batch and later rows move
    up.
    """
    caches = noisy_caches()
    tokens, lens, generated = [[t] for t in FIRST_TOKENS], list(FIRST_LENS), [[], [], []]
    running = [0, 1, 2]
    for _ in range(NUM_STEPS):
        if not running:
            break
        current = [[tokens[r][-1]] for r in running]
        metadata, packed = batch(current, [lens[r] for r in running], TABLES[running], BUCKET)
        logits, caches = GRAPHS(PARAMS, caches, metadata, packed)
        rows = build_sampling_metadata([params_of_requests[r] for r in running], BUCKET.max_reqs)
        counts = np.zeros(BUCKET.max_reqs, np.int32)
        counts[: len(running)] = [len(generated[r]) for r in running]
        picked = np.asarray(sample_jit(logits, rows, counts))
        for token, r in zip(picked.tolist(), list(running), strict=False):
            generated[r].append(token)
            tokens[r].append(token)
            lens[r] += 1
            if token in stop_ids or lens[r] >= max_lens[r]:
                running.remove(r)
    return generated, caches


class TestAgainstTheHostPath:
    @pytest.mark.kernels
    @pytest.mark.parametrize("requests", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    @pytest.mark.parametrize(
        ("stop_ids", "max_lens"), [((), (99, 99, 99)), ((2, 5, 10), (99, 99, 99)), ((), (8, 99, 11))]
    )
    def test_tokens_and_caches_are_bit_identical(self, requests, stop_ids, max_lens):
        sampler = make_sampler(build_sampling_metadata(requests, 4), jnp.zeros(4, jnp.int32))
        out = loop(sample=sampler, stop_ids=stop_ids, max_lens=[*max_lens, 0])
        want_tokens, want_caches = host_path(requests, stop_ids, max_lens)
        assert new_tokens(out) == want_tokens
        jax.tree.map(np.testing.assert_array_equal, out.caches, want_caches)

    def test_the_cases_stop_at_different_steps(self):
        generated, _ = host_path(SAMPLED, stop_ids=(2, 5, 10))
        assert len({len(tokens) for tokens in generated}) > 1
        assert min(len(tokens) for tokens in generated) < NUM_STEPS

    def test_two_short_loops_equal_a_long_one(self):
        seeds, counts = build_sampling_metadata(SAMPLED, 4), jnp.zeros(4, jnp.int32)
        expected = loop(sample=make_sampler(seeds, counts))
        first = loop(sample=make_sampler(seeds, counts), num_steps=3)
        second = decode_loop(
            step,
            PARAMS,
            first.caches,
            first.metadata,
            first.last_tokens,
            num_steps=NUM_STEPS - 3,
            sample=make_sampler(seeds, first.num_tokens),
        )
        np.testing.assert_array_equal(jnp.concatenate([first.tokens, second.tokens], axis=1), expected.tokens)
        np.testing.assert_array_equal(second.metadata.seq_lens, expected.metadata.seq_lens)
        jax.tree.map(np.testing.assert_array_equal, second.caches, expected.caches)


class TestStops:
    """A counting sampler generates token `index`, so that the expected stops are known."""

    @staticmethod
    def counting(logits, index):
        return jnp.full(logits.shape[0], index, jnp.int32)

    def counted(self, **options):
        return loop(sample=self.counting, **options)

    def test_row_ends_with_its_stop_token(self):
        out = self.counted(stop_ids=[4, 6])
        np.testing.assert_array_equal(out.num_tokens, [5, 5, 5, 0])
        np.testing.assert_array_equal(out.tokens[0], [0, 1, 2, 3, 4, -1, -1, -1])

    def test_stop_tokens_may_differ_per_row(self):
        stop_ids = np.array([[1, -1], [3, 2], [-1, -1], [-1, -1]])
        out = self.counted(stop_ids=stop_ids)
        np.testing.assert_array_equal(out.num_tokens, [2, 3, 8, 0])
        np.testing.assert_array_equal(out.tokens[1], [0, 1, 2, -1, -1, -1, -1, -1])

    def test_row_stops_at_its_maximum_length(self):
        out = self.counted(max_lens=[6, 1, 12, 99])
        np.testing.assert_array_equal(out.num_tokens, [1, 0, 3, 0])

    def test_row_stops_when_its_block_table_is_full(self):
        out = self.counted(num_steps=CAPACITY)
        room = [CAPACITY - n + 1 for n in FIRST_LENS]  # the last token made needs no slot yet
        np.testing.assert_array_equal(out.num_tokens, [*room, 0])

    def test_loop_ends_when_no_row_runs(self):
        assert self.counted(stop_ids=[2]).num_steps == 3
        assert self.counted(max_lens=[0, 0, 0, 0]).num_steps == 0
        assert self.counted().num_steps == NUM_STEPS

    def test_stopped_rows_are_padding_in_the_returned_metadata(self):
        out = self.counted(max_lens=[99, 3, 99, 99])
        np.testing.assert_array_equal(out.metadata.seq_lens, [13, 0, 17, 0])
        np.testing.assert_array_equal(out.last_tokens, [7, 0, 7, 0])
        assert out.metadata.slot_mapping[1] == out.metadata.slot_mapping[3] == -1

    def test_stopped_rows_write_no_slots(self):
        out = self.counted(max_lens=[99, 1, 12, 99])
        written = np.asarray(out.caches[0].k != noisy_caches()[0].k).any(axis=(2, 3)).reshape(-1)
        slot = lambda r, position: TABLES[r, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        expected = {slot(0, p) for p in range(4, 12)} | {slot(2, p) for p in range(8, 11)}
        assert set(np.flatnonzero(written).tolist()) == expected

    def test_row_without_new_tokens_is_padding_from_the_start(self):
        seen = []

        def spying(params, caches, metadata, tokens):
            jax.debug.callback(lambda *values: seen.append(values), *metadata_values(metadata), tokens)
            return step(params, caches, metadata, tokens)

        metadata_values = lambda m: (m.seq_lens, m.slot_mapping, m.query_start_loc, m.num_decodes)
        out = loop(model=spying, num_steps=1, max_lens=[99, 99, 9, 99])
        jax.block_until_ready(out.tokens)
        jax.effects_barrier()
        built, _ = batch([[3], [7]], FIRST_LENS[:2], TABLES[:2], BUCKET)
        for actual, expected in zip(seen[0], (*metadata_values(built), [3, 7, 0, 0]), strict=True):
            np.testing.assert_array_equal(actual, expected)


class TestCompiled:
    def test_caches_are_aliased_and_not_copied(self):
        @jax.jit(donate_argnums=0)
        def run(caches, metadata, tokens):
            return decode_loop(
                step, PARAMS, caches, metadata, tokens, num_steps=NUM_STEPS, sample=likeliest, stop_ids=[2]
            )

        compiled = run.lower(noisy_caches(), *first_batch()).compile()
        assert compiled.memory_analysis().alias_size_in_bytes >= CACHE_BYTES
        assert copies_of_the_cache(compiled.as_text()) == []
        # The loop's condition is evaluated on the device, without transfers to the host between iterations.
        assert f'"known_trip_count":{{"n":"{NUM_STEPS}"}}' in compiled.as_text()

    def test_caches_are_donated_without_an_outer_jit(self):
        caches = noisy_caches()
        loop(caches)
        assert all(cache.k.is_deleted() and cache.v.is_deleted() for cache in caches)

    def test_other_values_of_a_bucket_do_not_retrace(self):
        traces = []

        def counted(params, caches, metadata, tokens):
            traces.append(1)
            return step(params, caches, metadata, tokens)

        for seed, stop, longest in ((1, 2, 99), (2, 5, 12), (3, 9, 14)):
            rows = build_sampling_metadata([SamplingParams(temperature=1.0, seed=seed)] * 4)
            out = loop(
                model=counted,
                sample=make_sampler(rows, jnp.full(4, seed, jnp.int32)),
                stop_ids=[stop],
                max_lens=[longest] * 4,
            )
            assert isinstance(out, DecodeLoopOutput)
        assert len(traces) == 1

    def test_loop_can_be_a_step_of_decode_graphs(self):
        def many_steps(params, caches, metadata, tokens, sampler):
            out = decode_loop(step, params, caches, metadata, tokens, num_steps=NUM_STEPS, sample=sampler)
            return out.tokens, out.caches

        graphs = DecodeGraphs(many_steps, buckets=[BUCKET])
        sampler = make_sampler(build_sampling_metadata(SAMPLED, 4), jnp.zeros(4, jnp.int32))
        shapes = jax.eval_shape(lambda: sampler)
        graphs.precompile(
            PARAMS,
            new_caches(),
            block_size=BLOCK_SIZE,
            inputs=lambda bucket: (jax.ShapeDtypeStruct((bucket.max_tokens,), jnp.int32), shapes),
            progress=False,
        )
        tokens, _ = graphs(PARAMS, noisy_caches(), *first_batch(), sampler)
        np.testing.assert_array_equal(tokens, loop(sample=sampler).tokens)
        assert graphs.num_compiles == 1

    def test_16_bit_logits_and_int_tokens_of_any_dtype_are_accepted(self):
        def narrow(params, caches, metadata, tokens):
            logits, caches = step(params, caches, metadata, tokens)
            return logits.astype(jnp.bfloat16), caches

        picks = lambda logits, index: jnp.argmax(logits, axis=-1).astype(jnp.uint8)
        out = loop(model=narrow, sample=picks)
        assert out.tokens.dtype == jnp.int32
        assert (out.tokens[:3] < VOCAB).all()


class TestErrors:
    def run(self, metadata, tokens, **options):
        options = {"num_steps": 2, "sample": likeliest, **options}
        return decode_loop(step, PARAMS, new_caches(), metadata, tokens, **options)

    def test_rows_of_several_tokens_are_rejected(self):
        bucket = Bucket(max_decodes=2, decode_query_len=2, max_blocks=6)
        metadata, tokens = batch([[3, 4]], [5], TABLES[:1], bucket)
        with pytest.raises(
            ValueError, match=r"metadata.bucket.decode_query_len must be 1 in decode_loop, got 2"
        ):
            self.run(metadata, tokens)

    def test_prefill_rows_are_rejected_until_advanced(self):
        bucket = Bucket(max_decodes=2, max_prefills=2, max_prefill_tokens=6, max_blocks=6)
        metadata, tokens = batch([[3, 4]], [5], TABLES[:1], bucket)
        with pytest.raises(ValueError, match=r"max_prefills must be 0 in decode_loop \(advance\(\) .*got 2"):
            self.run(metadata, tokens)
        out = self.run(jattn.advance(metadata), np.array([0, 0, 5, 0], np.int32))
        np.testing.assert_array_equal(out.num_tokens, [0, 0, 2, 0])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"num_steps": 0}, "num_steps must be positive, got 0"),
            ({"stop_ids": np.zeros((3, 2), int)}, r"stop_ids must have shape \(4, 2\) .*got \(3, 2\)"),
            ({"stop_ids": np.zeros((4, 2, 1), int)}, r"stop_ids must have shape .*got \(4, 2, 1\)"),
            ({"stop_ids": None}, r"stop_ids must be ints \(\(\) for none\), got None"),
            ({"max_lens": [9, 9, 9]}, r"max_lens must have shape \(4,\) .*got \(3,\)"),
        ],
    )
    @pytest.mark.usefixtures("types_unchecked")
    def test_invalid_options_are_rejected_by_name(self, options, message):
        with pytest.raises(ValueError, match=message):
            self.run(*first_batch(), **options)

    def test_tokens_must_have_one_entry_per_row(self):
        metadata, tokens = first_batch()
        with pytest.raises(
            ValueError,
            match=r"tokens must have shape \(4,\) \(one entry per row of the metadata\), got \(3,\)",
        ):
            self.run(metadata, tokens[:3])

    @pytest.mark.parametrize(
        ("sampler", "message"),
        [
            (lambda logits, index: logits[:, 0] + 0.7, "what sample returns must hold ints, got float32"),
            (
                lambda logits, index: jnp.argmax(logits),
                r"what sample returns must have shape \(4,\) \(one entry per row of the metadata\), got \(\)",
            ),
            (
                lambda logits, index: jnp.argmax(logits, axis=-1, keepdims=True),
                r"what sample returns must have shape \(4,\) .*, got \(4, 1\)",
            ),
            (lambda logits, index: None, "what sample returns must be an array, got None"),
        ],
    )
    @pytest.mark.usefixtures("types_unchecked")
    def test_sample_must_return_one_token_per_row(self, sampler, message):
        with pytest.raises(ValueError, match=message):
            self.run(*first_batch(), sample=sampler)
