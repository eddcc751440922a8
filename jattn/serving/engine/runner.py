"""The device side of the engine: weights, KV caches and executables.

A step's tokens stay on the device and are the input of the next step, which starts before the host reads
them: the host prepares a step while the device runs the previous one.
"""

import collections
import concurrent.futures
import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.batch.bucket import Bucket, place_requests
from jattn.batch.check import check_batch
from jattn.batch.metadata import BatchMetadata, arrange_batch
from jattn.cache import CacheSpec
from jattn.cache.spec import resolve_kv_cache_dtype
from jattn.runtime.executable_files import ExecutableFiles
from jattn.runtime.executables import available_cores
from jattn.runtime.lowering import LoweringProcesses
from jattn.serving.engine.block_copies import BlockCopier, free_caches
from jattn.serving.engine.cascade_attention import make_cascade_attention
from jattn.serving.engine.config import ResolvedConfig, cache_specs
from jattn.serving.engine.doctor import explain
from jattn.serving.engine.logits_processors import (
    LogitsAdjustments,
    RequestAdjustments,
    build_logits_adjustments,
    without,
)
from jattn.serving.engine.logprobs import prompt_logprobs
from jattn.serving.engine.processes import ProcessError, ProcessGroup
from jattn.serving.engine.sampler import Sampler, SamplingMetadata, StepOutputs
from jattn.serving.engine.scheduled_step import Step
from jattn.serving.engine.sequence import SequenceState
from jattn.serving.engine.served_model import ServedModel
from jattn.serving.engine.speculative import Speculation
from jattn.serving.engine.step import (
    ColdExecutable,
    ModelInputs,
    ModelStep,
    SlidingWindowTables,
    WarmupRuns,
    empty_step_inputs,
    make_invariant,
    step_graphs,
    with_implementation,
)
from jattn.serving.engine.weights import Weights, host_tree

MAX_STEPS_IN_FLIGHT = 2
MAX_LOWERING_PROCESSES = 16


class StepInputs(NamedTuple):
    """Inputs of a step as numpy arrays, which can be sent to other processes.

    Attributes:
        block_copies: Block copies to make before the step; see `Step`.
        sliding_window_copies: Block copies in the sliding-window layers; see `Step`.
        metadata: Metadata of the batch. Its bucket selects the executable.
        model_inputs: The model's other inputs, without last_tokens, which are on the device.
        sampling: Sampling parameters of each row.
        adjustments: Adjustments of the logits; None without any.
        num_logprobs: Number of log-probabilities per new token; None if not requested.
        prompt_next_ids: Prompt token after each token, for prompt log-probabilities; None if not requested.
        num_prompt_logprobs: Number of log-probabilities per prompt token.
        drafts: Input of the proposer, whose tokens replace those of model_inputs; None in a step without
            drafts.
        num_drafts: Number of drafts of each row; None in a step without drafts.
    """

    block_copies: Sequence[tuple[int, int]]
    sliding_window_copies: Sequence[tuple[int, int]]
    metadata: BatchMetadata
    model_inputs: ModelInputs
    sampling: SamplingMetadata
    adjustments: LogitsAdjustments | None
    num_logprobs: int | None
    prompt_next_ids: np.ndarray | None
    num_prompt_logprobs: int | None
    drafts: Any = None
    num_drafts: np.ndarray | None = None


class Runner:
    """Runs steps on the device: `prepare` arranges a step's inputs, and `run` starts it without waiting."""

    def __init__(
        self,
        model: ServedModel,
        config: ResolvedConfig,
        speculation: Speculation | None = None,
        processes: ProcessGroup | None = None,
    ) -> None:
        """Create the KV caches. Nothing is compiled yet.

        Args:
            model: The served model.
            config: Configuration of the engine.
            speculation: Speculative decoding; None: no tokens are drafted.
            processes: Processes that run the engine together; None for a single process.

        Raises:
            NotImplementedError: If the model does not support an option.
        """
        self._config, self._processes = config, processes
        self._vocab_size, self.block_size = model.config.vocab_size, config.block_size
        self.weights = Weights(model)
        served = with_implementation(model, config.implementation)
        self._graphdef = nnx.graphdef(make_invariant(served) if config.batch_invariant else served)
        self._proposer = None if speculation is None else speculation.proposer
        step = ModelStep(self._graphdef)
        self.graphs = step_graphs(step, config.buckets)
        self._cascades = (
            None if config.cascade_attention is False else make_cascade_attention(model, step, config)
        )
        self._leaves = self.graphs.leaves_of(self.weights.state)

        blocks = config.blocks_per_layer
        dtype, quantization = resolve_kv_cache_dtype(config.kv_cache_dtype)
        self._new_caches = functools.partial(
            model.create_caches,
            blocks,
            block_size=config.block_size,
            dtype=dtype,
            quantization=quantization,
            skip_layers=config.skip_layers,
        )
        self._caches: Any = self._new_caches()
        self._copies = BlockCopier(config.max_num_seqs, config.window_layers)
        self._cache_specs: tuple[CacheSpec, ...] = ()
        if config.check_batches:
            self._cache_specs = cache_specs(config, model, blocks, config.block_size)

        self.num_steps = self.num_cascade_steps = 0
        all_graphs = [self.graphs, *([] if self._cascades is None else [self._cascades.graphs])]
        self._sampler = Sampler(
            [bucket for graphs in all_graphs for bucket in graphs.buckets],
            config.max_num_seqs,
            model,
            is_on_mesh=processes is None,
        )
        self._max_rows = self._sampler.max_rows
        self._last_tokens = jnp.zeros(self._max_rows, jnp.int32)
        self._runs = [  # of normal steps, and of steps with cascade attention
            WarmupRuns(
                graphs,
                self.block_size,
                functools.partial(
                    empty_step_inputs,
                    block_size=self.block_size,
                    num_rows=self._sampler.num_rows,
                    max_rows=self._max_rows,
                    has_window_tables=bool(config.window_layers),
                    has_prefix=graphs is not self.graphs,
                ),
            )
            for graphs in all_graphs
        ]

    # --------------------------------------------------------------------------------------- a step
    def prepare(self, step: Step, sequences: Sequence[SequenceState]) -> StepInputs:
        """Return the inputs of a step for `run`; `sequences` has one entry per row."""
        lens = np.asarray(step.query_lens)
        prefix_len = 0 if self._cascades is None else self._cascades.prefix_len(step)
        bucket = self._choose_bucket(step, lens, prefix_len)
        metadata, window_tables = self._build_metadata(step, lens, bucket)
        num_rows = self._sampler.num_rows[bucket]
        num_generated = np.zeros(num_rows, np.int32)
        num_generated[: len(sequences)] = [sequence.num_sampled for sequence in sequences]
        params = [sequence.sampling_params for sequence in sequences]
        sampling = self._sampler.metadata(step.request_ids, params, num_rows)
        adjustments = None
        if any([sequence.needs_logits_adjustment for sequence in sequences]):
            adjustments = build_logits_adjustments(
                [_request_adjustments(sequence) for sequence in sequences],
                None if self._processes is not None else self._last_tokens,
                num_rows=num_rows,
                vocab_size=self._vocab_size,
            )
        drafts = num_drafts = None
        if step.num_draft_tokens and self._proposer is not None:
            token_ids = np.zeros(bucket.max_tokens, np.int32)  # The proposer's tokens replace them.
            source_rows = np.full(bucket.max_tokens, -1, np.int32)
            logits_indices = np.arange(bucket.max_tokens, dtype=np.int32)
            num_drafts = np.zeros(num_rows, np.int32)
            num_drafts[: len(sequences)] = [sequence.draft_state.num_drafted for sequence in sequences]
            drafts = self._proposer.prepare(step, sequences, bucket, sampling, num_generated)
        else:
            token_ids, source_rows, logits_indices = arrange_tokens(step, sequences, lens, bucket, num_rows)
        prompt_rows = [row for row, row_params in enumerate(params) if row_params.prompt_logprobs is not None]
        prompt_next_ids = num_prompt_logprobs = None
        if prompt_rows:
            num_prompt_logprobs = max_num_logprobs([params[row].prompt_logprobs for row in prompt_rows])
            prompt_next_ids = np.zeros(bucket.max_tokens, np.int32)
            for row in prompt_rows:
                _, next_ids = next_prompt_tokens(step, row, sequences[row])
                first = logits_indices[row] + 1 - step.query_lens[row]
                prompt_next_ids[first : first + len(next_ids)] = next_ids
        inputs = StepInputs(
            block_copies=step.block_copies,
            sliding_window_copies=step.sliding_window_copies,
            metadata=metadata,
            model_inputs=ModelInputs(
                token_ids=token_ids,
                source_rows=source_rows,
                last_tokens=None,
                logits_indices=logits_indices,
                num_generated=num_generated,
                window_tables=window_tables,
                common_prefix_len=np.asarray(prefix_len, np.int32) if prefix_len else None,
            ),
            sampling=sampling,
            adjustments=adjustments,
            num_logprobs=max_num_logprobs([row_params.logprobs for row_params in params]),
            prompt_next_ids=prompt_next_ids,
            num_prompt_logprobs=num_prompt_logprobs,
            drafts=drafts,
            num_drafts=num_drafts,
        )
        return inputs if self._processes is None else jax.device_get(inputs)

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Run the model on a step and sample its tokens, without waiting for them."""
        self._broadcast("run", inputs)
        with self._reports_failure(BaseException):
            copies = inputs.block_copies, inputs.sliding_window_copies
            if any(copies):
                self._caches = self._copies(self._caches, *copies)
                if self._proposer is not None and inputs.block_copies:
                    self._proposer.copy_blocks(inputs.block_copies)
            draft_ids, model_inputs = None, inputs.model_inputs._replace(last_tokens=self._last_tokens)
            if inputs.drafts is not None and self._proposer is not None:
                draft_ids = self._proposer.start(inputs.drafts)
                model_inputs = model_inputs._replace(token_ids=draft_ids)

            is_cascade = model_inputs.common_prefix_len is not None
            runs = self._runs[is_cascade]
            (logits, hidden, num_generated), self._caches = runs.graphs(
                self._leaves, self._caches, inputs.metadata, model_inputs
            )

            adjustments = inputs.adjustments
            if adjustments is not None:
                adjustments = adjustments._replace(last=self._last_tokens)
            outputs = self._sampler(
                logits,
                inputs.sampling,
                num_generated,
                adjustments,
                num_logprobs=inputs.num_logprobs,
                draft_ids=draft_ids,
                num_drafts=inputs.num_drafts,
            )
            if inputs.drafts is None:  # A step with drafts is read before the next one starts.
                self._last_tokens = outputs.token_ids
            if inputs.prompt_next_ids is not None:
                assert inputs.num_prompt_logprobs is not None
                logprobs = prompt_logprobs(
                    self._graphdef,
                    self.weights.state,
                    hidden,
                    inputs.prompt_next_ids,
                    num=inputs.num_prompt_logprobs,
                )
                outputs = outputs._replace(prompt_logprobs=logprobs)
            self.num_steps += 1
            self.num_cascade_steps += is_cascade
            runs.num_runs[inputs.metadata.bucket] += 1
            return outputs

    def read(self, outputs: StepOutputs) -> StepOutputs:
        """Return a step's outputs as numpy arrays. Waits for the step; an interrupt loses nothing."""
        with self._reports_failure(Exception):
            return jax.device_get(outputs)

    def _choose_bucket(self, step: Step, lens: np.ndarray, prefix_len: int) -> Bucket:
        if self._config.batch_invariant:  # One bucket for generated tokens, and one for prompts.
            return next(
                bucket
                for bucket in self.graphs.buckets
                if (bucket.max_decodes if step.num_decodes else bucket.max_prefills)
            )
        # With drafts the query length is explicit: a prompt of 1 + k tokens looks like a row with drafts.
        query_len = None if self._proposer is None else 1 + step.num_draft_tokens
        graphs = self._runs[prefix_len > 0].graphs
        return graphs.choose_for(lens, step.block_tables.shape[1], query_len)

    def _build_metadata(
        self, step: Step, lens: np.ndarray, bucket: Bucket
    ) -> tuple[BatchMetadata, SlidingWindowTables | None]:
        """Return the metadata of a step as numpy arrays, and the tables of layers with their own blocks."""
        seq_lens = np.asarray(step.seq_lens)
        metadata = arrange_batch(lens, seq_lens, step.block_tables, bucket, self.block_size)
        window_metadata = window_tables = None
        if step.sliding_window_tables is not None:
            window_metadata = arrange_batch(
                lens, seq_lens, step.sliding_window_tables, bucket, self.block_size
            )
            window_tables = SlidingWindowTables(window_metadata.block_table, window_metadata.slot_mapping)
        if self._config.check_batches:
            window_layers = self._config.window_layers
            check_batch(metadata, self._cache_specs[window_layers.index(False) if window_layers else 0])
            if window_metadata is not None:
                check_batch(window_metadata, self._cache_specs[window_layers.index(True)])
        return metadata, window_tables

    # -------------------------------------------------------------------------------------- weights
    def have_weights_changed(self) -> bool:
        """Return whether the weights have changed since the last call, in whatever way."""
        old_leaves, self._leaves = self._leaves, self.graphs.leaves_of(self.weights.state)
        return self._leaves is not old_leaves

    def update_weights(self, state: Any) -> None:
        """Replace the model's weights; see `Engine.update_weights`."""
        to_host = None if self._processes is None else host_tree(state)
        self.weights.update(state)
        self._broadcast("update_weights", to_host)
        if self._processes is not None and not self._processes.is_leader:
            self.have_weights_changed()

    # ------------------------------------------------------------------------------------ executables
    @property
    def num_compiles(self) -> int:
        """Number of compiled executables, including cascade attention's and a draft model's."""
        num_drafting = 0 if self._proposer is None else self._proposer.num_compiles
        return num_drafting + sum([runs.graphs.num_compiles for runs in self._runs])

    def explain(self) -> str:
        """Return tables of the attention implementations; see `Engine.explain`."""
        model = nnx.merge(self._graphdef, self.weights.refresh())
        return explain(model, self._caches, self.graphs.buckets, self.block_size)

    def precompile(self, progress: bool, wait: bool) -> None:
        """Compile all buckets; see `Engine.precompile`."""
        self._broadcast("precompile", False, wait)
        sizes = {
            bucket: (self._sampler.num_rows[bucket], bucket.decode_query_len)
            for runs in self._runs
            for bucket in runs.graphs.buckets
        }
        pool = concurrent.futures.ThreadPoolExecutor(available_cores())
        # What the first step needs compiles while other processes lower the steps.
        largest = max(sizes.values())
        samplers = {largest: pool.submit(self._sampler.compile, *largest)}
        copies = [pool.submit(compiler) for compiler in self._copies.compilers(self._caches)]
        # On a mesh and on a CPU, steps are lowered in this process.
        num_processes = min(available_cores() - 2, MAX_LOWERING_PROCESSES)
        processes, files = None, None
        devices = jax.tree.leaves(self._caches)[0].devices()
        if num_processes > 1 and jax.default_backend() == "gpu" and len(devices) == 1:
            processes = LoweringProcesses(num_processes)
            if (folder := jax.config.jax_compilation_cache_dir) is not None:
                files = ExecutableFiles(folder)
        for runs in self._runs:
            runs.graphs.precompile(
                self.weights.refresh(),
                self._caches,
                block_size=self.block_size,
                inputs=runs.inputs,
                progress=progress,
                wait=wait,
                serves_all=runs.graphs is self.graphs,
                processes=processes,
                files=files,
            )
        if self._proposer is not None:
            self._proposer.precompile(progress=progress, wait=wait)
        ready = {sizes[bucket] for runs in self._runs for bucket in runs.graphs.executables}
        for size in sorted(set(sizes.values()) - set(samplers), key=lambda size: size not in ready):
            samplers[size] = pool.submit(self._sampler.compile, *size)
        for future in (*copies, *(samplers[size] for size in ready)):
            future.result()
        pool.shutdown(wait=wait)

    def cold_executables(self, max_tokens: int | None = None) -> list[ColdExecutable]:
        """Return the compiled executables that have hardly run, smallest first.

        Buckets of more than `max_tokens` tokens are omitted; None omits none.
        """
        runs = [*self._runs, *(() if self._proposer is None else self._proposer.runs)]
        cold_executables = [
            ColdExecutable(graph_index, bucket)
            for graph_index, warmup_runs in enumerate(runs)
            for bucket in warmup_runs.cold_buckets(max_tokens)
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

    # -------------------------------------------------------------------------- failures and processes
    def reset(self) -> None:
        """Create new KV caches. A failed call has consumed the old ones."""
        self._broadcast("reset")
        free_caches(self._caches)  # There is no memory for both.
        self._caches = self._new_caches()
        self._last_tokens = jnp.zeros(self._max_rows, jnp.int32)
        if self._proposer is not None:
            self._proposer.reset()

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
                if method == "run":
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

    @contextlib.contextmanager
    def _reports_failure(self, kind: type[BaseException]) -> Iterator[None]:
        """Report an error to the other processes, which run the same step and would wait forever."""
        try:
            yield
        except kind as error:
            if self._processes is not None and self._processes.remote_failure() is None:
                self._processes.fail(error)
            raise


def arrange_tokens(
    step: Step, sequences: Sequence[SequenceState], lens: np.ndarray, bucket: Bucket, num_rows: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return token_ids, source_rows and logits_indices of a step's `ModelInputs`.

    Args:
        step: Scheduled requests and tokens of the step.
        sequences: Sequence of each row.
        lens: Number of new tokens of each row.
        bucket: Bucket of the step.
        num_rows: Number of sampler rows.
    """
    starts = place_requests(lens, bucket).first_tokens
    last_ids, sources = [], []  # of the last token of each row
    for sequence, end in zip(sequences, step.seq_lens, strict=True):
        is_known = len(sequence.token_ids) >= end
        last_ids.append(sequence.token_ids[end - 1] if is_known else 0)
        sources.append(-1 if is_known else sequence.row)  # Only the device has the token.
    token_ids = np.zeros(bucket.max_tokens, np.int32)
    source_rows = np.full(bucket.max_tokens, -1, np.int32)
    last_indices = starts + lens - 1
    token_ids[last_indices], source_rows[last_indices] = last_ids, sources
    for row in np.flatnonzero(lens > 1).tolist():
        end = step.seq_lens[row] - 1
        previous_tokens = sequences[row].token_ids[end + 1 - step.query_lens[row] : end]
        token_ids[starts[row] : last_indices[row]] = previous_tokens
    logits_indices = np.zeros(num_rows, np.int32)
    logits_indices[: len(lens)] = last_indices
    return token_ids, source_rows, logits_indices


def next_prompt_tokens(step: Step, row: int, sequence: SequenceState) -> tuple[int, list[int]]:
    """Return the prompt tokens that follow a row's tokens in a step, and the position of the first."""
    end = step.seq_lens[row]
    first = end - step.query_lens[row] + 1
    return first, sequence.token_ids[first : min(end + 1, sequence.num_prompt_tokens)]


def max_num_logprobs(requested: Sequence[int | None]) -> int | None:
    """Return the largest requested number as a power of two or 0, so that few programs are compiled."""
    numbers = [num for num in requested if num is not None]
    if not numbers:
        return None
    return 1 << (max(numbers) - 1).bit_length() if max(numbers) else 0


def _request_adjustments(sequence: SequenceState) -> RequestAdjustments:
    """Return a sequence's adjustments. If its mask allows only stop tokens, min_tokens is ignored."""
    allowed, end_ids = None if sequence.mask is None else sequence.mask.allowed_bitmask(), sequence.end_ids
    if allowed is not None and end_ids and not without(allowed, end_ids).any():
        end_ids = ()
    return RequestAdjustments(
        sequence.sampling_params,
        *sequence.penalized_ids(),
        end_ids=end_ids,
        num_generated=sequence.num_generated,
        pending_row=sequence.row if sequence.num_pending else -1,
        allowed=allowed,
    )
