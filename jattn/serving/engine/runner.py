"""The device side of the engine: weights, KV caches, executables and the steps in flight.

A step's tokens stay on the device and are the input of the next step, which starts before the host reads
them: the host prepares a step while the device runs the previous one.
"""

import collections
import concurrent.futures
import contextlib
import functools
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.batch.bucket import Bucket
from jattn.batch.check import check_batch
from jattn.batch.metadata import build_batch_metadata
from jattn.parallel import replicated_sharding
from jattn.serving.engine.batch_invariance import InvariantBuckets, make_invariant
from jattn.serving.engine.block_copies import BlockCopier, free_caches
from jattn.serving.engine.cascade_attention import make_cascade_attention
from jattn.serving.engine.config import StepLimits
from jattn.serving.engine.doctor import explain
from jattn.serving.engine.kv_cache_groups import sliding_window_layers_of
from jattn.serving.engine.logprobs import prompt_logprobs
from jattn.serving.engine.processes import ProcessError, ProcessGroup
from jattn.serving.engine.scheduled_step import Step
from jattn.serving.engine.sequence import SequenceState
from jattn.serving.engine.served_model import ServedModel
from jattn.serving.engine.speculative import Speculation
from jattn.serving.engine.step import StepTokens, make_step, sliding_window_tables, with_implementation
from jattn.serving.engine.step_io import (
    InFlightStep,
    NewTokens,
    PendingOutputs,
    PromptLogprobsCall,
    StepCall,
    build_step_adjustments,
    build_step_tokens,
    max_num_logprobs,
    prompt_logprobs_ranges,
    read_new_tokens,
    wait_for_steps,
)
from jattn.serving.engine.step_sampler import SampledTokens, SamplingMetadataCache, StepSampler
from jattn.serving.engine.warmup import ColdExecutable, EmptyStepInputs, WarmupRuns
from jattn.serving.engine.weights import Weights, host_tree

MAX_STEPS_IN_FLIGHT = 2


class Runner:
    """Runs steps: `start` starts one, and `read` reads the oldest unread one. At most two are in flight."""

    def __init__(
        self,
        model: ServedModel,
        limits: StepLimits,
        *,
        num_blocks: int,
        buckets: Sequence[Bucket] | None,
        implementation: str | Sequence[str] | None,
        checks_batches: bool,
        cache: dict[str, Any],
        speculation: Speculation | None = None,
        cascade_attention: bool | None = None,
        processes: ProcessGroup | None = None,
    ) -> None:
        """Create the KV caches. Nothing is compiled yet. See `Engine` for the arguments."""
        self._processes = processes
        self._vocab_size, self.block_size = model.config.vocab_size, limits.block_size
        self.weights = Weights(model)
        served = with_implementation(model, implementation)
        self._graphdef = nnx.graphdef(make_invariant(served) if limits.batch_invariant else served)
        self._proposer = None if speculation is None else speculation.proposer
        num_drafts = 0 if speculation is None else speculation.num_tokens
        step = make_step(self._graphdef)
        self.graphs = limits.graphs(model, step, buckets, num_blocks, num_drafts)
        self._invariant = (
            InvariantBuckets.from_buckets(self.graphs.buckets) if limits.batch_invariant else None
        )
        self._cascades = make_cascade_attention(
            model,
            step,
            self.graphs.buckets,
            max_num_seqs=limits.max_num_seqs,
            block_size=limits.block_size,
            enabled=False if limits.batch_invariant else cascade_attention,
        )
        self._leaves = self.graphs.leaves_of(self.weights.state)
        blocks = limits.num_blocks_per_layer(model, num_blocks)
        self._new_caches = functools.partial(model.create_caches, blocks, block_size=self.block_size, **cache)
        self._caches: Any = self._new_caches()
        sliding_window_layers = () if isinstance(blocks, int) else sliding_window_layers_of(model)
        self._copies = BlockCopier(limits.max_num_seqs, sliding_window_layers)
        specs = model.cache_specs(blocks, block_size=self.block_size, **cache)
        self._cache_spec = specs[sliding_window_layers.index(False) if sliding_window_layers else 0]
        self._sliding_window_spec = (
            specs[sliding_window_layers.index(True)] if sliding_window_layers else None
        )
        self._checks_batches = checks_batches
        self.num_steps = self.num_cascade_steps = 0
        self._in_flight: collections.deque[InFlightStep] = collections.deque()
        weakref.finalize(self, wait_for_steps, self._in_flight)  # Runs at process exit at the latest.
        all_graphs = [self.graphs, *([] if self._cascades is None else [self._cascades.graphs])]
        all_buckets = [bucket for graphs in all_graphs for bucket in graphs.buckets]
        # With several processes, each step's message contains the parameters: placing them on the mesh would
        # be a collective operation.
        self._sampling = SamplingMetadataCache(None if processes is not None else replicated_sharding(model))
        self._sampler = StepSampler(all_buckets, limits.max_num_seqs, model, self._sampling)
        self._max_rows = self._sampler.max_rows
        self._last_tokens = jnp.zeros(self._max_rows, jnp.int32)
        has_sliding_window_blocks = self._sliding_window_spec is not None
        empty_inputs = EmptyStepInputs(
            self.block_size,
            self._sampler.rows_of,
            self._max_rows,
            has_sliding_window_blocks=has_sliding_window_blocks,
        )
        prefixes: list[list[Any]] = [[], [np.zeros((), np.int32)]]
        self._runs = [  # of normal steps, and of steps with cascade attention
            WarmupRuns(graphs, self.block_size, functools.partial(empty_inputs.inputs, prefix))
            for graphs, prefix in zip(all_graphs, prefixes, strict=False)
        ]

    @property
    def num_in_flight(self) -> int:
        """Number of steps that are started and not read."""
        return len(self._in_flight)

    @property
    def num_compiles(self) -> int:
        """Number of compiled executables, including cascade attention's and a draft model's."""
        draft_state = 0 if self._proposer is None else self._proposer.num_compiles
        return draft_state + sum(runs.graphs.num_compiles for runs in self._runs)

    @property
    def is_verifying(self) -> bool:
        """True if the last started step verifies draft tokens and is not read yet."""
        return bool(self._in_flight) and self._in_flight[-1].step.num_draft_tokens > 0

    def reset(self) -> None:
        """Create new KV caches, and discard the steps in flight.

        A failed call has consumed the old caches.
        """
        self._broadcast("reset")
        self._in_flight.clear()
        free_caches(self._caches)  # There is no memory for both.
        self._caches = self._new_caches()
        self._last_tokens = jnp.zeros(self._max_rows, jnp.int32)
        if self._proposer is not None:
            self._proposer.reset()

    def have_weights_changed(self) -> bool:
        """Return whether the weights have changed since the last call, in whatever way."""
        old_leaves, self._leaves = self._leaves, self.graphs.leaves_of(self.weights.state)
        return self._leaves is not old_leaves

    def explain(self) -> str:
        """Return tables of the attention implementations; see `Engine.explain`."""
        model = nnx.merge(self._graphdef, self.weights.refresh())
        return explain(model, self._caches, self.graphs.buckets, self.block_size)

    def update_weights(self, state: Any) -> None:
        """Replace the model's weights; see `Engine.update_weights`."""
        to_host = None if self._processes is None else host_tree(state)
        self.weights.update(state)
        self._broadcast("update_weights", to_host)
        if self._processes is not None and not self._processes.is_leader:
            self.have_weights_changed()

    def cause_of(self, error: Exception) -> Exception:
        """Return the remote error that caused this failure, or `error` itself."""
        if self._processes is None or isinstance(error, ProcessError):
            return error
        text = self._processes.remote_failure()
        return error if text is None else ProcessError(text)

    def follow(self) -> None:
        """Run the commands of process 0's engine; see `Engine.follow`."""
        assert self._processes is not None
        running: collections.deque[Any] = collections.deque()
        try:
            for method, arguments in self._processes.receive_commands():
                result = getattr(self, method)(*arguments)
                if method == "start":
                    running.append(result)
                if len(running) > MAX_STEPS_IN_FLIGHT:
                    jax.block_until_ready(running.popleft())
        except BaseException as error:
            self._processes.fail(error)
            raise
        finally:
            self._processes.close()

    def _broadcast(self, method: str, *arguments: Any) -> None:
        """Make the other processes call the same method, if this process leads several."""
        if self._processes is not None and self._processes.is_leader:
            self._processes.send(method, *arguments)

    def precompile(self, progress: bool, wait: bool) -> None:
        """Compile all buckets; see `Engine.precompile`."""
        self._broadcast("precompile", False, wait)
        for runs in self._runs:
            runs.graphs.precompile(
                self.weights.refresh(),
                self._caches,
                block_size=self.block_size,
                inputs=runs.inputs,
                progress=progress,
                wait=wait,
                serves_all=runs.graphs is self.graphs,
            )
        if self._proposer is not None:
            self._proposer.precompile(progress=progress, wait=wait)

        def sampler_size(bucket: Bucket) -> tuple[int, int]:
            return self._sampler.rows_of(bucket), bucket.decode_query_len

        first_sizes = {sampler_size(bucket) for runs in self._runs for bucket in runs.graphs.executables}
        pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
        compiling = [pool.submit(self._sampler.compile, *size) for size in first_sizes]
        compiling += map(pool.submit, self._copies.compilers(self._caches))
        all_sizes = {sampler_size(bucket) for runs in self._runs for bucket in runs.graphs.buckets}
        for size in all_sizes - first_sizes:
            pool.submit(self._sampler.compile, *size)
        for future in compiling:
            future.result()
        pool.shutdown(wait=wait)

    def cold_buckets(self, max_bucket_tokens: int | None = None) -> list[ColdExecutable]:
        """Return the compiled executables that have hardly run, smallest first.

        Buckets of more than `max_bucket_tokens` tokens are omitted; None omits none.
        """
        runs = [*self._runs, *(() if self._proposer is None else self._proposer.runs)]
        cold_executables = [
            ColdExecutable(graph_index, bucket)
            for graph_index, warmup_runs in enumerate(runs)
            for bucket in warmup_runs.cold_executables(max_bucket_tokens)
        ]
        return sorted(cold_executables, key=lambda executable: executable.bucket.max_tokens)

    def warm_up(self, cold_executables: Sequence[ColdExecutable]) -> None:
        """Run these executables on an empty batch, and wait for them."""
        self._broadcast("warm_up", cold_executables)
        with self._reports_failure(BaseException):
            leaves = self.graphs.leaves_of(self.weights.state)  # The last step may have donated them.
            for graph_index, bucket in cold_executables:
                if graph_index < len(self._runs):
                    self._caches = self._runs[graph_index].run(bucket, leaves, self._caches)
                elif self._proposer is not None:
                    self._proposer.warm_up(graph_index - len(self._runs), bucket)

    def prepare(self, step: Step, sequences: Sequence[SequenceState]) -> tuple[StepCall, PendingOutputs]:
        """Return the arguments of `start` for a step; `sequences` has one entry per row."""
        lens = np.asarray(step.query_lens)
        # With drafts the query length is explicit: a prompt of 1 + k tokens looks like a row with drafts.
        query_len = None if self._proposer is None else 1 + step.num_draft_tokens
        prefix_len = 0 if self._cascades is None else self._cascades.prefix_len(step)
        graphs = self.graphs if self._cascades is None or not prefix_len else self._cascades.graphs
        if self._invariant is None:
            num_blocks = step.block_tables.shape[1]
            bucket = graphs.choose(lens, num_blocks=num_blocks, decode_query_len=query_len)
        else:
            bucket = self._invariant.bucket_of(step)
        metadata = build_batch_metadata(
            lens,
            np.asarray(step.seq_lens),
            step.block_tables,
            block_size=self.block_size,
            bucket=bucket,
            to_device=False,
        )
        if self._checks_batches:
            check_batch(metadata, self._cache_spec)
        window_tables = sliding_window_tables(
            step, metadata, self._sliding_window_spec, checks=self._checks_batches
        )
        num_rows, previous_rows = self._sampler.rows_of(bucket), self._previous_rows()
        last_tokens = self._last_tokens
        sampling, num_generated = self._sampling.get(step, sequences, num_rows)
        adjustments = build_step_adjustments(
            step,
            sequences,
            previous_rows,
            last_tokens,
            num_sampler_rows=num_rows,
            vocab_size=self._vocab_size,
        )
        drafts = None
        if step.num_draft_tokens and self._proposer is not None:
            token_indices: Any = np.arange(bucket.max_tokens, dtype=np.int32)
            placeholders = np.zeros_like(token_indices)  # The proposer's tokens replace them.
            tokens = StepTokens(placeholders, np.full_like(token_indices, -1), last_tokens, token_indices)
            num_drafts = [sequence.draft_state.num_drafted for sequence in sequences]
            prepared = self._proposer.prepare(step, sequences, bucket, sampling, num_generated)
            drafts = prepared, np.pad(np.asarray(num_drafts, np.int32), (0, num_rows - len(num_drafts)))
        else:
            tokens = build_step_tokens(step, sequences, bucket, previous_rows, last_tokens, num_rows)
        num_logprobs = [sequence.sampling_params.logprobs for sequence in sequences]
        ranges = prompt_logprobs_ranges(step, sequences, bucket)
        call = StepCall(
            block_copies=step.block_copies,
            sliding_window_copies=step.sliding_window_copies,
            metadata=metadata,
            prefix_len=prefix_len,
            tokens=tokens._replace(sliding_window=window_tables, num_generated=num_generated),
            drafts=drafts,
            sampling_inputs=(sampling, adjustments),
            num_logprobs=max_num_logprobs(num_logprobs),
            prompt=PromptLogprobsCall.from_ranges(ranges, bucket),
        )
        return call, PendingOutputs(step, num_logprobs, ranges)

    def start(self, call: StepCall, pending: PendingOutputs | None = None) -> Any:
        """Start a step without waiting for it.

        Args:
            call: The step, from `prepare`.
            pending: The outputs to read later. None in a process that follows, which returns the new tokens.
        """
        if self._processes is not None and pending is not None:
            call = call.to_host()
            self._broadcast("start", call)
        with self._reports_failure(BaseException):
            call = call.with_last_tokens(self._last_tokens)
            self._caches = self._copies(self._caches, call.block_copies, call.sliding_window_copies)
            graphs = self.graphs if self._cascades is None or not call.prefix_len else self._cascades.graphs
            prefix = [np.asarray(call.prefix_len, np.int32)] if call.prefix_len else []
            tokens, drafts = self._start_drafts(call)
            outputs, self._caches = graphs(self._leaves, self._caches, call.metadata, tokens, *prefix)
            sampling_inputs = outputs.num_generated, *call.sampling_inputs
            sampled = self._sampler(outputs.logits, drafts, *sampling_inputs, call.num_logprobs)
            if isinstance(sampled, SampledTokens):
                self._last_tokens = sampled.tokens  # A step with drafts is read before the next one starts.
            prompt_results = None
            if call.prompt is not None:
                next_ids, num = call.prompt
                state = self.weights.state
                prompt_results = prompt_logprobs(self._graphdef, state, outputs.hidden, next_ids, num=num)
            if pending is None:
                return sampled
            for array in jax.tree.leaves((sampled, prompt_results)):
                array.copy_to_host_async()
            self._in_flight.append(
                InFlightStep(pending.step, sampled, pending.num_logprobs, pending.prompt, prompt_results)
            )
            self.num_steps += 1
            self._runs[call.prefix_len > 0].num_runs[call.metadata.bucket] += 1
            self.num_cascade_steps += call.prefix_len > 0
            return None

    def read(self) -> Iterator[NewTokens]:
        """Yield the new tokens of the oldest step in flight. Waits for it; an interrupt loses nothing."""
        in_flight_step = self._in_flight[0]
        with self._reports_failure(Exception):
            yield from read_new_tokens(in_flight_step, self._in_flight.popleft)

    # --------------------------------------------------------------------------------------- inside
    @contextlib.contextmanager
    def _reports_failure(self, kind: type[BaseException]) -> Iterator[None]:
        """Report an error to the other processes, which run the same step and would wait forever."""
        try:
            yield
        except kind as error:
            if self._processes is not None and self._processes.remote_failure() is None:
                self._processes.fail(error)
            raise

    def _start_drafts(self, call: StepCall) -> tuple[StepTokens, tuple[Any, Any] | None]:
        """Start drafting if the step has drafts.

        Return the step's tokens, and the drafts with their numbers.
        """
        if self._proposer is None:
            return call.tokens, None
        if call.block_copies:
            self._proposer.copy_blocks(call.block_copies)
        if call.drafts is None:
            return call.tokens, None
        prepared, num_drafts = call.drafts
        token_ids = self._proposer.start(prepared)
        return call.tokens._replace(token_ids=token_ids), (token_ids, num_drafts)

    def _previous_rows(self) -> dict[int, int]:
        """Return the sampler row of each request in the steps in flight."""
        return {
            request_id: row
            for in_flight_step in self._in_flight
            for row, request_id in enumerate(in_flight_step.step.request_ids)
        }
