"""DecodeGraphs: one executable per bucket, and no other compilations."""

import concurrent.futures
import importlib.util
import subprocess
import sys
import textwrap
import threading
import time

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn.batch.bucket import Bucket, default_buckets, pack_tokens, row_indices
from jattn.batch.metadata import abstract_metadata
from jattn.runtime import decode_graphs as graphs_module
from jattn.runtime.decode_graphs import DecodeGraphs
from jattn.runtime.lowering import LoweringProcesses
from tests.assertions import record_compilations
from tests.tiny_step import (
    BLOCK_SIZE,
    CACHE_BYTES,
    NUM_BLOCKS,
    PARAMS,
    VOCAB,
    batch,
    copies_of_the_cache,
    new_caches,
    shape_of,
    step,
)

MAX_BLOCKS = 4
DECODES = Bucket(max_decodes=4, max_blocks=MAX_BLOCKS)
MIXED = Bucket(max_decodes=2, max_prefills=3, max_prefill_tokens=8, max_blocks=MAX_BLOCKS)


def first_element(params, caches, metadata, *inputs):
    """Return the logits of a minimal step."""
    return params + metadata.seq_lens[0], caches


@pytest.fixture(scope="module")
def compiled_graphs():
    graphs = DecodeGraphs(step, buckets=[DECODES, MIXED])
    graphs.precompile(PARAMS, new_caches(), block_size=BLOCK_SIZE, inputs=shape_of, progress=False)
    return graphs


def random_lens(rng):
    num_decodes, num_prefills = rng.integers(0, 3, 2)
    return np.concatenate([np.ones(num_decodes, int), rng.integers(2, 5, num_prefills)])


def random_batch(rng, lens):
    """Return (new tokens, seq_lens, block table) of requests with random context and blocks."""
    seq_lens = lens + rng.integers(0, MAX_BLOCKS * BLOCK_SIZE - 4, len(lens))
    tables = rng.permutation(NUM_BLOCKS)[: len(lens) * MAX_BLOCKS].reshape(-1, MAX_BLOCKS)
    return [rng.integers(0, VOCAB, n) for n in lens], seq_lens, tables


ENDS_EARLY = """
    import threading
    import time
    from jattn.batch.bucket import Bucket
    from jattn.runtime.executables import ExecutableCache

    has_begun = threading.Event()

    def lower(bucket):
        has_begun.set()
        time.sleep(1)
        print("lowered", flush=True)
        raise SystemExit

    executables = ExecutableCache(lambda bucket: {})
    buckets = [Bucket(max_decodes=1, max_blocks=1)]
    begin = lambda: executables.compile_in_background(buckets, lower, progress=False)
    threading.Thread(target=begin, daemon=DAEMON).start()
    has_begun.wait()
    print("over", flush=True)
"""


class TestCompiles:
    @pytest.mark.kernels
    def test_1000_steps_with_different_batches_compile_nothing(self):
        graphs, caches, rng = (
            DecodeGraphs(step, buckets=[DECODES, MIXED]),
            new_caches(),
            np.random.default_rng(0),
        )
        with record_compilations() as compiles:
            graphs.precompile(PARAMS, caches, block_size=BLOCK_SIZE, inputs=shape_of, progress=False)
        assert graphs.num_compiles == len(compiles) == 2
        used = set()
        with record_compilations() as compiles:
            for _ in range(1000):
                tokens, seq_lens, tables = random_batch(rng, random_lens(rng))
                bucket = graphs.choose([len(ids) for ids in tokens])
                metadata, packed = batch(tokens, seq_lens, tables, bucket)
                _, caches = graphs(PARAMS, caches, metadata, packed)
                used.add(bucket)
        assert used == {DECODES, MIXED}
        assert graphs.num_compiles == 2
        assert compiles == []

    @pytest.mark.kernels
    def test_bucket_that_was_not_precompiled_compiles_once(self):
        graphs, caches = DecodeGraphs(step, buckets=[DECODES, MIXED]), new_caches()
        for expected, bucket in ((1, DECODES), (1, DECODES), (2, MIXED), (2, MIXED)):
            metadata, tokens = batch([[3]], [1], [[5]], bucket)
            _, caches = graphs(PARAMS, caches, metadata, tokens)
            assert graphs.num_compiles == expected

    def test_precompile_skips_compiled_buckets(self):
        graphs, caches = DecodeGraphs(first_element, buckets=[DECODES, MIXED]), new_caches()
        graphs(jnp.int32(1), caches, batch([[3]], [1], [[5]], DECODES)[0])
        before = graphs.executables[DECODES]
        for _ in range(2):
            graphs.precompile(jnp.int32(1), new_caches(), block_size=BLOCK_SIZE, progress=False)
            assert graphs.num_compiles == 2
        assert graphs.executables[DECODES] is before

    def test_threads_compile_a_missing_bucket_once(self):
        def slow_to_trace(params, caches, metadata):
            time.sleep(0.3)  # long enough for the others to find the bucket missing
            return first_element(params, caches, metadata)

        graphs = DecodeGraphs(slow_to_trace, buckets=[DECODES])
        metadata, _ = batch([[3]], [7], [[5, 6]], DECODES)
        caches = [new_caches() for _ in range(4)]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            runs = [pool.submit(graphs, jnp.int32(1), cache, metadata) for cache in caches]
        assert [int(run.result()[0]) for run in runs] == [8] * 4
        assert graphs.num_compiles == 1

    def test_precompile_accepts_abstract_arrays(self):
        graphs = DecodeGraphs(step, buckets=[DECODES])
        params, caches = jax.eval_shape(lambda: (PARAMS, new_caches()))
        graphs.precompile(params, caches, block_size=BLOCK_SIZE, inputs=shape_of, progress=False)
        metadata, tokens = batch([[3]], [1], [[5]], DECODES)
        logits, _ = graphs(PARAMS, new_caches(), metadata, tokens)
        assert logits.shape == (4, VOCAB)
        assert graphs.num_compiles == 1

    def test_tracing_uses_the_callers_jax_context(self):
        seen = []

        def looking(params, caches, metadata):
            seen.append(jax.config.jax_default_matmul_precision)
            return params, caches

        with jax.default_matmul_precision("highest"):
            graphs = DecodeGraphs(looking, buckets=[DECODES, MIXED])
            graphs.precompile(jnp.int32(1), new_caches(), block_size=BLOCK_SIZE, progress=False)
        assert seen == ["highest", "highest"]

    def test_executables_are_loaded_from_the_persistent_cache(self, jax_cache):
        hits = []
        listen = lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None
        jax.monitoring.register_event_listener(listen)
        try:
            for expected in (0, 2):
                another = lambda params, caches, metadata: first_element(params, caches, metadata)
                graphs = DecodeGraphs(another, buckets=[DECODES, MIXED])
                graphs.precompile(jnp.int32(1), new_caches(), block_size=BLOCK_SIZE, progress=False)
                assert len(hits) == expected
        finally:
            jax.monitoring.unregister_event_listener(listen)

    def test_another_cache_shape_is_an_error(self, compiled_graphs):
        metadata, tokens = batch([[3]], [1], [[5]], DECODES)
        other_caches = [jattn.PagedCache(k=c.k[:-1], v=c.v[:-1]) for c in new_caches()]
        message = r"caches\[0\]\.k is float32\[23, 4, 1, 8\], but .* for float32\[24, 4, 1, 8\]. Pass cach"
        with pytest.raises(ValueError, match=message):
            compiled_graphs(PARAMS, other_caches, metadata, tokens)

    def test_another_kind_of_cache_is_an_error(self, compiled_graphs):
        metadata, tokens = batch([[3]], [1], [[5]], DECODES)
        other_caches = [jattn.PagedCache(k=c.k, v=c.v, k_scale=1.0, v_scale=1.0) for c in new_caches()]
        with pytest.raises(ValueError, match=r"The caches are PyTreeDef.* compiled for PyTreeDef.* Pass"):
            compiled_graphs(PARAMS, other_caches, metadata, tokens)

    def test_another_block_size_is_an_error(self, compiled_graphs):
        metadata = jattn.build_batch_metadata([1], [1], [[5]], block_size=2 * BLOCK_SIZE, bucket=DECODES)
        tokens = pack_tokens([[3]], DECODES)
        message = "batch has block_size=8, but the step was compiled for block_size=4. Build the batch with"
        with pytest.raises(ValueError, match=message):
            compiled_graphs(PARAMS, new_caches(), metadata, tokens)

    @pytest.mark.parametrize(
        ("result", "message"),
        [
            (lambda outputs, caches: outputs, r"a tuple \(outputs, caches\), got a \w+\."),
            (
                lambda outputs, caches: (outputs, caches, 0),
                r"a tuple \(outputs, caches\), got a tuple of 3\.",
            ),
            (
                lambda outputs, caches: (caches, outputs),
                r".* like those .*, 4 arrays, got 1\.",
            ),
            (
                lambda outputs, caches: (outputs, caches[:1]),
                r".* like those .*, 4 arrays, got 2\.",
            ),
            (
                lambda outputs, caches: (outputs, jax.tree.map(lambda x: x.astype(jnp.float16), caches)),
                r".* like those .*, float32\[.*\], got float16\[",
            ),
        ],
    )
    def test_a_step_that_returns_something_else_than_outputs_and_caches_is_an_error(self, result, message):
        graphs = DecodeGraphs(lambda *args: result(args[0] + 1.0, args[1]), buckets=[DECODES])
        with pytest.raises(ValueError, match=f"step must return {message}"):
            graphs(jnp.ones(()), new_caches(), *batch([[3]], [1], [[5]], DECODES))

    def test_compiler_options_of_a_bucket_reach_xla(self):
        compiler_options_of = lambda bucket: {} if bucket.max_decodes == 1 else {"xla_of_no_such_name": True}
        graphs = DecodeGraphs(
            first_element,
            [Bucket(max_decodes=n, max_blocks=1) for n in (1, 2)],
            compiler_options=compiler_options_of,
        )
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_of_no_such_name"):
            graphs.precompile(jnp.int32(0), jnp.zeros(1), block_size=16, progress=False)
        assert [bucket.max_decodes for bucket in graphs.executables] == [1]


class TestEngineBuckets:
    """All default buckets of an engine, without compiling them."""

    GRAPHS = DecodeGraphs(first_element, default_buckets(256, max_blocks=512, prefill_tokens=(32, 128, 8192)))

    @pytest.mark.parametrize("rows", [1, 3, 28, 32, 121, 128, 250])
    def test_decode_steps_use_buckets_without_a_prefill_region(self, rows):
        bucket = self.GRAPHS.choose(np.ones(rows, np.int64))
        assert bucket.max_prefill_tokens == 0
        assert rows <= bucket.max_decodes < rows + 8

    @pytest.mark.parametrize(
        ("decodes", "num_blocks", "rows"),
        [(0, 64, 0), (2, 64, 0), (32, 64, 0), (33, 64, 256), (248, 64, 256), (8, 256, 0), (9, 256, 256)],
    )
    def test_many_decodes_in_a_step_with_prompts_use_decode_rows(self, decodes, num_blocks, rows):
        """As prefill rows, 248 rows of 64 blocks would take a fifth of the time of a step of 8,192 tokens."""
        lens = np.array([1] * decodes + [1024] * 7)
        assert self.GRAPHS.choose(lens, num_blocks=num_blocks).max_decodes == rows

    def test_few_decodes_in_a_step_with_a_short_prompt_use_prefill_rows(self):
        expected = Bucket(max_prefills=32, max_prefill_tokens=32, max_blocks=512)
        assert self.GRAPHS.choose([1, 1, 20]) == expected


class TestBackgroundCompilation:
    SIZES = tuple(Bucket(max_decodes=rows, max_blocks=MAX_BLOCKS) for rows in (1, 2, 4))
    MIXED = tuple(
        Bucket(max_decodes=rows, max_prefills=2, max_prefill_tokens=8, max_blocks=MAX_BLOCKS)
        for rows in (0, 4)
    )

    def gated(self, gate, buckets=(*SIZES, *MIXED)):
        """Return graphs that trace buckets with fewer than 4 rows only after the gate opens."""

        def run(params, caches, metadata):
            if metadata.bucket.max_decodes < 4:
                assert gate.wait(60)
            return first_element(params, caches, metadata)

        return DecodeGraphs(run, buckets=buckets)

    def precompile(self, graphs):
        caches = new_caches()
        graphs.precompile(jnp.int32(1), caches, block_size=BLOCK_SIZE, progress=False, wait=False)
        return caches

    def test_starts_without_buckets_that_others_can_replace(self):
        gate = threading.Event()
        graphs = self.gated(gate, self.SIZES[:2])
        options = {"block_size": BLOCK_SIZE, "progress": False, "wait": False}
        graphs.precompile(jnp.int32(1), new_caches(), serves_all=False, **options)
        assert (graphs.num_compiles, graphs.is_compiling) == (0, True)
        gate.set()
        graphs.wait()
        assert (graphs.num_compiles, graphs.is_compiling) == (2, False)

    def test_starts_with_the_largest_buckets_and_compiles_all(self):
        gate = threading.Event()
        graphs = self.gated(gate)
        caches = self.precompile(graphs)
        assert set(graphs.executables) == {self.SIZES[-1], self.MIXED[-1]}
        small_bucket = graphs.choose([1])
        assert small_bucket == self.SIZES[-1]  # the smallest that is ready, of decodes alone
        assert graphs.choose([3]) == self.MIXED[-1]
        out, caches = graphs(
            jnp.int32(1), caches, batch([[3]], [7], [[5, 6]], small_bucket)[0]
        )  # and caches move on
        assert int(out) == 8
        gate.set()
        graphs.wait()
        assert set(graphs.executables) == set(graphs.buckets)
        assert graphs.num_compiles == 5
        assert graphs.choose([1]) == self.SIZES[0]

    def test_with_processes_starts_with_buckets_of_few_prompt_tokens_too(self):
        sizes = [(rows, tokens) for rows in (1, 4) for tokens in (2, 4, 8, 64)]
        buckets = [
            Bucket(max_decodes=rows, max_prefills=2, max_prefill_tokens=tokens, max_blocks=MAX_BLOCKS)
            for rows, tokens in sizes
        ]
        gate = threading.Event()

        def run(params, caches, metadata):
            first = metadata.bucket.max_decodes == 4 and metadata.bucket.max_prefill_tokens in (4, 8, 64)
            assert first or gate.wait(60)
            return first_element(params, caches, metadata)

        graphs, options = DecodeGraphs(run, buckets), {"block_size": BLOCK_SIZE, "progress": False}
        # A function of a test cannot be pickled: this process lowers it.
        graphs.precompile(jnp.int32(1), new_caches(), wait=False, processes=LoweringProcesses(1), **options)
        assert {(b.max_decodes, b.max_prefill_tokens) for b in graphs.executables} == {
            (4, 4),
            (4, 8),
            (4, 64),
        }
        gate.set()
        graphs.wait()
        assert set(graphs.executables) == set(buckets)

    def test_bucket_needed_by_a_caller_is_compiled_once(self):
        gate = threading.Event()
        graphs = self.gated(gate)
        caches = self.precompile(graphs)
        gate.set()
        out, _ = graphs(jnp.int32(1), caches, batch([[3]], [7], [[5, 6]], self.SIZES[0])[0])
        graphs.wait()
        assert int(out) == 8
        assert graphs.num_compiles == 5

    def test_background_error_is_raised_by_wait_and_can_be_retried(self):
        bad = [True]

        def run(params, caches, metadata):
            if metadata.bucket.max_decodes < 4 and bad:
                raise RuntimeError("not yet")
            return first_element(params, caches, metadata)

        graphs = DecodeGraphs(run, buckets=self.SIZES)
        self.precompile(graphs)
        with pytest.raises(RuntimeError, match="not yet"):
            graphs.wait()
        assert set(graphs.executables) == {self.SIZES[-1]}
        bad.clear()
        self.precompile(graphs)
        graphs.wait()
        assert graphs.num_compiles == 3

    @pytest.mark.parametrize("is_daemon", [False, True])
    @pytest.mark.kernels
    def test_process_exits_after_a_compilation_in_progress(self, is_daemon):
        """A thread that loses JAX at exit would crash the process; the engine's threads start as daemons."""
        program = textwrap.dedent(ENDS_EARLY).replace("DAEMON", str(is_daemon))
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout.split()) == (0, ["over", "lowered"]), done.stderr

    def test_compiled_bucket_up_to_four_times_as_large_is_used_meanwhile(self):
        sizes = [Bucket(max_decodes=rows, max_blocks=MAX_BLOCKS) for rows in (1, 2, 4, 8)]
        graphs = DecodeGraphs(first_element, buckets=sizes)
        assert graphs.choose([1]) == sizes[0]
        graphs(jnp.int32(1), new_caches(), batch([[3]], [7], [[5, 6]], sizes[-1])[0])
        assert graphs.choose([1]) == sizes[0]
        assert graphs.choose([1, 1]) == sizes[-1]


class TestRuns:
    @pytest.mark.kernels
    @pytest.mark.parametrize("query_lens", [[1, 1, 1], [1, 3, 2], [4]])
    def test_rows_equal_an_unpadded_step_and_padding_writes_nothing(self, compiled_graphs, query_lens):
        rng, lens = np.random.default_rng(1), np.array(query_lens)
        tokens, seq_lens, tables = random_batch(rng, lens)
        filled = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), new_caches())
        unpadded = jattn.build_batch_metadata(lens, seq_lens, tables, block_size=BLOCK_SIZE)
        expected, want_caches = jax.jit(step)(PARAMS, filled, unpadded, np.int32(np.concatenate(tokens)))
        bucket = compiled_graphs.choose(lens)
        logits, caches = compiled_graphs(PARAMS, filled, *batch(tokens, seq_lens, tables, bucket))
        assert bucket.max_tokens > lens.sum()
        close = lambda actual, expected: np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
        close(logits[row_indices(lens, bucket)], expected)
        jax.tree.map(close, caches, want_caches)

    def test_caches_are_donated_written_in_place_and_not_copied(self, compiled_graphs):
        for executable in compiled_graphs.executables.values():
            assert executable.memory_analysis().alias_size_in_bytes >= CACHE_BYTES
            assert copies_of_the_cache(executable.as_text()) == []
        metadata, tokens = batch([[3]], [1], [[5]], DECODES)
        caches = new_caches()
        compiled_graphs(PARAMS, caches, metadata, tokens)
        assert all(cache.k.is_deleted() and cache.v.is_deleted() for cache in caches)
        with pytest.raises(ValueError, match="donated to an earlier step"):
            compiled_graphs(PARAMS, caches, metadata, tokens)

    def test_tokens_without_padding_are_an_error_that_names_pack_tokens(self, compiled_graphs):
        metadata, tokens = batch([[3]], [1], [[5]], DECODES)
        with pytest.raises(
            TypeError, match=r"Lay out tokens with jattn.pack_tokens\(tokens, metadata.bucket"
        ):
            compiled_graphs(PARAMS, new_caches(), metadata, tokens[:1])

    def test_the_copy_finder_finds_a_copy(self):
        keeps_the_old = lambda params, caches, metadata, tokens: (
            caches,
            step(params, caches, metadata, tokens)[1],
        )
        args = (PARAMS, new_caches(), *batch([[3]], [1], [[5]], DECODES))
        assert copies_of_the_cache(jax.jit(keeps_the_old).lower(*args).compile().as_text())

    def test_unlisted_bucket_is_an_error_that_names_it(self, compiled_graphs):
        metadata, tokens = batch([[3]], [1], [[5]], Bucket(max_decodes=3, max_blocks=MAX_BLOCKS))
        message = (
            r"metadata.bucket must be one of the buckets .*4\+0/0x4, 2\+3/8x4, got Bucket\(max_decodes=3"
        )
        with pytest.raises(ValueError, match=message):
            compiled_graphs(PARAMS, new_caches(), metadata, tokens)


class Doubled:
    """A pytree node registered with JAX, whose changes show only when it is flattened."""

    def __init__(self, value):
        self.inside = [value]


jax.tree_util.register_pytree_node(Doubled, lambda node: (node.inside, None), lambda _, leaves: leaves[0])


def set_path(tree, *path):
    """Assign a new value to the end of a path of attributes and keys."""
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]] = jnp.float32(5)


TREES = {
    "a dictionary": (lambda: {"a": {"b": jnp.float32(3)}}, lambda tree: set_path(tree, "a", "b")),
    "a dictionary inside": (
        lambda: {"a": {"b": jnp.float32(3)}},
        lambda tree: tree.update(a={"b": jnp.float32(5)}),
    ),
    "a list": (lambda: {"a": [jnp.float32(3)]}, lambda tree: set_path(tree, "a", 0)),
    "in a tuple": (lambda: ({"a": jnp.float32(3)},), lambda tree: set_path(tree, 0, "a")),
    "a Variable": (
        lambda: {"a": nnx.Param(jnp.float32(3))},
        lambda tree: tree["a"].set_value(jnp.float32(5)),
    ),
    "a State": (
        lambda: nnx.State({"a": {"b": jnp.float32(3)}}),
        lambda tree: set_path(tree, "a", "b"),
    ),
    "a State's new Variable": (
        lambda: nnx.State({"a": nnx.Param(jnp.float32(3))}),
        lambda tree: tree.update(a=nnx.Param(jnp.float32(5))),
    ),
    "a State's Variable": (
        lambda: nnx.State({"a": {"b": nnx.Param(jnp.float32(3))}}),
        lambda tree: tree["a"]["b"].set_value(jnp.float32(5)),
    ),
    "a State within": (lambda: [nnx.State({"a": jnp.float32(3)})], lambda tree: set_path(tree, 0, "a")),
    "a tree in a Variable": (
        lambda: [nnx.Param({"a": jnp.float32(3)})],
        lambda tree: set_path(tree[0].get_raw_value(), "a"),
    ),
    "a node of one's own": (lambda: [Doubled(jnp.float32(3))], lambda tree: set_path(tree[0].inside, 0)),
    "numpy's numbers": (lambda: [np.full(1, 3, np.float32)], lambda tree: set_path(tree[0], 0)),
}


def sum_of_leaves(params, caches, metadata):
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params)), caches


class TestParameters:
    BUCKET = Bucket(max_decodes=1, max_blocks=1)
    METADATA = jattn.build_batch_metadata([1], [1], [[1]], bucket=BUCKET)

    def run(self, graphs, params):
        return float(graphs(params, jnp.zeros(1), self.METADATA)[0])

    @pytest.mark.parametrize("kind", TREES)
    def test_parameters_changed_in_place_are_used(self, kind):
        make, change = TREES[kind]
        graphs, params = DecodeGraphs(sum_of_leaves, [self.BUCKET]), make()
        assert [self.run(graphs, params) for _ in range(2)] == [3, 3]
        change(params)
        assert [self.run(graphs, params) for _ in range(2)] == [5, 5]
        assert graphs.num_compiles == 1

    def test_unchanged_parameters_are_flattened_once(self, monkeypatch):
        collected = []

        class Counting(graphs_module.ParameterLeaves):
            def __init__(self, tree):
                collected.append(tree)
                super().__init__(tree)

        monkeypatch.setattr(graphs_module, "ParameterLeaves", Counting)
        graphs, params = DecodeGraphs(step, [DECODES]), PARAMS
        caches = new_caches()
        for _ in range(3):
            metadata, tokens = batch([[3]], [1], [[5]], DECODES)
            _, caches = graphs(params, caches, metadata, tokens)
        assert len(collected) == 1

    @pytest.mark.parametrize(
        "change", [lambda tree: tree.update(c=1.0), lambda tree: tree.update(c=tree.pop("a"))]
    )
    def test_parameters_of_another_structure_are_an_error(self, change):
        graphs, params = (
            DecodeGraphs(sum_of_leaves, [self.BUCKET]),
            {"a": jnp.float32(3), "b": jnp.float32(3)},
        )
        self.run(graphs, params)
        change(params)
        for changed in (params, jnp.float32(3)):
            with pytest.raises(ValueError, match="structure of params has changed"):
                self.run(graphs, changed)


class TestProgress:
    def precompile(self, **options):
        graphs = DecodeGraphs(first_element, buckets=[DECODES, MIXED])
        graphs.precompile(jnp.int32(1), new_caches(), block_size=BLOCK_SIZE, **options)
        return graphs

    def test_progress_bar_counts_the_buckets(self, capsys):
        graphs = self.precompile()
        assert "2/2" in capsys.readouterr().err
        graphs.precompile(jnp.int32(1), new_caches(), block_size=BLOCK_SIZE)
        assert capsys.readouterr().err == ""

    def test_no_progress_bar_if_disabled_or_without_tqdm(self, capsys, monkeypatch):
        self.precompile(progress=False)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        assert self.precompile().num_compiles == 2
        assert capsys.readouterr().err == ""


class TestChoose:
    BUCKETS = (
        Bucket(max_decodes=1, max_blocks=4),
        Bucket(max_decodes=4, max_blocks=4),
        Bucket(max_decodes=4, max_blocks=8),
        Bucket(max_decodes=2, max_prefills=2, max_prefill_tokens=6, max_blocks=4),
        Bucket(max_decodes=4, max_prefills=1, max_prefill_tokens=4, max_blocks=4),
        Bucket(max_prefills=4, max_prefill_tokens=16, max_blocks=8),
    )
    graphs = DecodeGraphs(first_element, buckets=BUCKETS)

    @pytest.mark.parametrize(
        ("query_lens", "num_blocks", "index"),
        [
            ([], 0, 0),
            ([1], 0, 0),
            ([1, 1], 0, 1),
            ([1, 1], 5, 2),
            ([1], 5, 2),
            ([3], 0, 3),  # 8 tokens here and in the next one, but a row fewer
            ([3, 3], 0, 3),
            ([1, 5], 0, 3),
            ([1] * 5, 0, 4),  # the fifth decode is a prefill there
            ([7], 0, 5),
            ([1, 1, 9], 0, 5),
        ],
    )
    def test_choose_minimizes_tokens_then_rows_then_columns(self, query_lens, num_blocks, index):
        assert self.graphs.choose(query_lens, num_blocks=num_blocks) == self.BUCKETS[index]

    @hypothesis.given(st.lists(st.integers(1, 9), max_size=7))
    def test_a_bucket_fits_exactly_the_batches_that_can_be_built_in_it(self, query_lens):
        def fits(bucket):
            try:
                jattn.build_batch_metadata(query_lens, query_lens, None, bucket=bucket)
            except ValueError:
                return False
            return True

        key = lambda b: (b.max_tokens, b.max_reqs, b.max_blocks)
        fitting = sorted(filter(fits, self.BUCKETS), key=key)
        if fitting:
            assert self.graphs.choose(query_lens, num_blocks=0) == fitting[0]
        else:
            with pytest.raises(ValueError, match=r"The batch .* does not fit any of the buckets"):
                self.graphs.choose(query_lens, num_blocks=0)

    @pytest.mark.parametrize("query_lens", [[], [1, 1, 1], [1, 1, 3], [4, 1, 1], [16]])
    def test_choose_accepts_counts_instead_of_lengths(self, query_lens):
        first = next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens))
        counts = {
            "num_decodes": first,
            "num_prefills": len(query_lens) - first,
            "num_prefill_tokens": sum(query_lens[first:]),
        }
        assert self.graphs.choose(**counts, num_blocks=0) == self.graphs.choose(query_lens, num_blocks=0)

    def test_choose_requires_the_number_of_blocks_if_the_buckets_differ(self):
        """A bucket with too few columns would only fail when the metadata is built."""
        with pytest.raises(ValueError, match=r"num_blocks must be given .* max_blocks \[4, 8\], got None"):
            self.graphs.choose([1])

    def test_decode_rows_require_the_buckets_decode_query_len(self):
        single, triple = (Bucket(max_decodes=4, decode_query_len=q, max_blocks=4) for q in (1, 3))
        graphs = DecodeGraphs(first_element, buckets=[single, triple])
        assert graphs.choose([3, 3]) == triple
        assert graphs.choose([1, 1]) == single

    def test_decode_beyond_the_decode_rows_counts_as_a_prefill(self):
        sizes = {"max_decodes": 1, "max_prefills": 1, "decode_query_len": 3, "max_blocks": 4}
        tight, roomy = (Bucket(max_prefill_tokens=tokens, **sizes) for tokens in (2, 3))
        assert DecodeGraphs(first_element, buckets=[tight, roomy]).choose([3, 3]) == roomy

    def test_batch_larger_than_all_buckets_is_an_error_that_lists_the_sizes(self):
        graphs = DecodeGraphs(first_element, buckets=[DECODES, MIXED])
        message = r"The batch 1\+1/9x2 does not fit any of the buckets .* 4\+0/0x4, 2\+3/8x4"
        with pytest.raises(ValueError, match=message):
            graphs.choose([1, 9], num_blocks=2)

    @pytest.mark.usefixtures("types_unchecked")
    def test_counts_must_be_ints_of_at_least_0(self):
        with pytest.raises(ValueError, match="query_lens must be a list of ints, got float64"):
            self.graphs.choose([1.9, 5.5], num_blocks=0)
        for name in ("num_decodes", "num_prefills", "num_prefill_tokens", "num_blocks"):
            with pytest.raises(ValueError, match=f"{name} must be at least 0, got -2"):
                self.graphs.choose(**{"num_blocks": 0, name: -2})
        with pytest.raises(ValueError, match=r"query_lens must be at least 0, got \[-1\]"):
            self.graphs.choose([1, -1], num_blocks=0)

    def test_buckets_must_not_be_empty_and_must_have_max_blocks(self):
        with pytest.raises(ValueError, match=r"bucket.max_blocks must be set .*got Bucket\(max_decodes=2"):
            DecodeGraphs(first_element, buckets=[Bucket(max_decodes=2)])
        with pytest.raises(ValueError, match=r"buckets must hold at least one Bucket, got \[\]"):
            DecodeGraphs(first_element, buckets=[])


class TestDefaultBuckets:
    def decodes(self, *args, **options):
        return [bucket.max_decodes for bucket in default_buckets(*args, max_blocks=4, **options)]

    def test_default_sizes_are_vllms_up_to_the_maximum(self):
        assert self.decodes(4) == [1, 2, 4]
        assert self.decodes(20) == [1, 2, 4, 8, 16, 20]
        assert self.decodes(256) == [1, 2, 4, *range(8, 256, 8), 256]
        assert self.decodes(1024) == [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), 1024]

    def test_speculative_buckets_have_whole_rows(self):
        assert self.decodes(8, decode_query_len=3) == [1, 2, 3, 6, 8]
        assert default_buckets(8, max_blocks=4, decode_query_len=3)[-1].max_tokens == 24

    def test_each_prefill_size_has_a_bucket_without_decodes_and_one_with_all(self):
        buckets = default_buckets(4, max_blocks=8, prefill_tokens=[2, 64])
        sizes = {(b.max_decodes, b.max_prefills, b.max_prefill_tokens, b.max_blocks) for b in buckets[-5:]}
        assert sizes == {(4, 0, 0, 8), (0, 2, 2, 8), (4, 2, 2, 8), (0, 4, 64, 8), (4, 4, 64, 8)}

    @hypothesis.given(st.data())
    def test_every_batch_within_the_limits_fits_a_default_bucket(self, data):
        max_num_seqs, budget = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 64))
        graphs = DecodeGraphs(
            first_element, buckets=default_buckets(max_num_seqs, max_blocks=4, prefill_tokens=[16, budget])
        )
        num_decodes = data.draw(st.integers(0, max_num_seqs))
        num_prefills = data.draw(st.integers(0, min(max_num_seqs - num_decodes, budget)))
        tokens = data.draw(st.integers(num_prefills, budget)) if num_prefills else 0
        bucket = graphs.choose(num_decodes=num_decodes, num_prefills=num_prefills, num_prefill_tokens=tokens)
        assert bucket.max_tokens >= num_decodes + tokens

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_num_seqs": 0, "max_blocks": 4}, "max_num_seqs must be positive, got 0"),
            ({"max_num_seqs": 4, "max_blocks": 0}, "max_blocks must be positive, got 0"),
            (
                {"max_num_seqs": 4, "max_blocks": 4, "prefill_tokens": [8, 0]},
                "prefill_tokens must be positive, got 0",
            ),
            (
                {"max_num_seqs": 4, "max_blocks": 4, "decode_query_len": 0},
                "decode_query_len must be positive, got 0",
            ),
        ],
    )
    def test_sizes_must_be_positive(self, options, message):
        with pytest.raises(ValueError, match=message):
            default_buckets(**options)


class TestAbstractMetadata:
    @pytest.mark.parametrize(
        "bucket", [DECODES, MIXED, Bucket(max_decodes=2, decode_query_len=3, max_blocks=5)]
    )
    def test_abstract_metadata_equals_built_metadata_in_structure(self, bucket):
        q = bucket.decode_query_len
        built = jattn.build_batch_metadata([q], [q], [[1]], block_size=BLOCK_SIZE, bucket=bucket)
        abstract = abstract_metadata(bucket, BLOCK_SIZE)
        assert jax.tree.structure(abstract) == jax.tree.structure(built)
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(abstract)] == [
            (x.shape, x.dtype) for x in jax.tree.leaves(built)
        ]
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(abstract))

    def test_abstract_metadata_requires_max_blocks_and_block_size(self):
        with pytest.raises(ValueError, match=r"bucket.max_blocks must be set .*got Bucket\(max_decodes=2"):
            abstract_metadata(Bucket(max_decodes=2), BLOCK_SIZE)
        with pytest.raises(ValueError, match="block_size must be positive, got 0"):
            abstract_metadata(DECODES, 0)
