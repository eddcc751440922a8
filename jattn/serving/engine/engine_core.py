"""The engine loop: schedule, prepare, run and sample a step, and give its tokens to the sequences.

The host prepares a step while the device runs the one before it, so it learns one step late that a request
has stopped. The token generated in between is dropped. The request's blocks can be reused at once because the
device runs steps in order. A step with draft tokens is read before the next step is scheduled, since the next
step starts after the accepted drafts.

A failing step destroys the KV caches, which were donated to it, and with them the keys of every request. All
requests then end with the error, and later requests use new caches. The same happens if Ctrl-C interrupts
anything but the wait for the device (where most of the time is spent, and where nothing is lost), or
interrupts a call that adds or drops requests.
"""

import collections
import contextlib
import itertools
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence

import jax

from jattn.serving.engine.input_processor import Request
from jattn.serving.engine.outputs import Logprobs, RequestError
from jattn.serving.engine.runner import Runner, StepInputs, next_prompt_tokens
from jattn.serving.engine.sampler import StepOutputs
from jattn.serving.engine.scheduled_step import Step
from jattn.serving.engine.scheduler import Scheduler
from jattn.serving.engine.sequence import SequenceState
from jattn.serving.engine.speculative import Speculation
from jattn.serving.engine.stats import (
    INTER_TOKEN_LATENCY,
    REQUEST_SECONDS,
    STEP_TOKENS,
    TIME_TO_FIRST_TOKEN,
    Histogram,
)

# What is scheduled, what the device gets, and what comes back.
type StepInFlight = tuple[Step, StepInputs, StepOutputs]


class EngineCore:
    """The unfinished sequences by id, and the loop that runs them.

    The scheduler schedules sequences: the id of a sequence is its request id there.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, speculation: Speculation | None = None) -> None:
        """Start without sequences. If `speculation` is None, no tokens are drafted."""
        self._scheduler, self._runner, self._speculation = scheduler, runner, speculation
        self._sequences: dict[int, SequenceState] = {}  # the unfinished sequences
        self._masked_sequences: dict[int, SequenceState] = {}  # those with a mask
        self._new_ids = itertools.count()
        self._in_flight: collections.deque[StepInFlight] = collections.deque()  # started and not read
        self._num_in_flight_before_read: int | None = None  # set while waiting for a step
        weakref.finalize(self, _wait_for_steps, self._in_flight)  # Runs at process exit at the latest.
        self.time_to_first_token = Histogram(TIME_TO_FIRST_TOKEN)
        self.inter_token_latency = Histogram(INTER_TOKEN_LATENCY)
        self.queue_time, self.prefill_time = Histogram(REQUEST_SECONDS), Histogram(REQUEST_SECONDS)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.num_generated = self.num_failed_steps = 0

    # --------------------------------------------------------------------------------------- a step
    def step(self) -> None:
        """Start the next step, and read the step before it.

        Raises:
            Exception: The error of the step. All unfinished sequences have ended with it.
        """
        with self._fail_all_on_error():
            # Read what the next step depends on: accepted drafts, or the last token of a changing mask. More
            # than one step is unread if reading was interrupted.
            has_drafts = bool(self._in_flight) and self._in_flight[-1][0].num_draft_tokens > 0
            needs_last_token = any(
                [sequence.needs_last_token for sequence in self._masked_sequences.values()]
            )
            self._postprocess(keep=0 if has_drafts or needs_last_token else 1)
            if self._runner.have_weights_changed():
                self._scheduler.reset_prefix_cache()

            # Schedule.
            num_draft_tokens = 0 if self._speculation is None else self._num_draft_tokens(self._speculation)
            step = self._scheduler.schedule(num_draft_tokens)
            if step is None:
                self._postprocess(keep=0)
                return
            sequences = [self._sequences[seq_id] for seq_id in step.request_ids]
            for seq_id in step.preempted:
                self._sequences[seq_id].draft_state.num_read = 0

            # Prepare, run and sample. Nothing waits for the device.
            inputs = self._runner.prepare(step, sequences)
            outputs = self._runner.run(inputs)
            for array in jax.tree.leaves(outputs):
                array.copy_to_host_async()
            self._in_flight.append((step, inputs, outputs))
            self._scheduler.update_after_start(step, self._record_start(step, sequences))

            # Postprocess the step before this one, or this one if it has drafts.
            self._postprocess(keep=0 if step.num_draft_tokens else 1)

    def _num_draft_tokens(self, speculation: Speculation) -> int:
        """Return the number of draft tokens per row of the next step.

        Waits for the rows' latest tokens if drafting is expected to pay off.
        """
        if not speculation.can_pay(self._scheduler.num_running):
            return 0
        if not self._scheduler.can_draft(speculation.num_tokens):
            return 0
        if not speculation.proposes(self._running()):
            return 0
        if self._in_flight:
            promising = [sequence for sequence in self._running() if sequence.draft_state.num_drafted]
            self._postprocess(keep=0)
            if not speculation.proposes(self._running()):
                speculation.record_unused(
                    [sequence for sequence in promising if not sequence.draft_state.num_drafted]
                )
                return 0
        return speculation.num_tokens

    def _running(self) -> list[SequenceState]:
        return [self._sequences[seq_id] for seq_id in self._scheduler.running]

    def _record_start(self, step: Step, sequences: Sequence[SequenceState]) -> list[int]:
        """Record that a step has been started. Return the requests that need no further step."""
        self.step_tokens.add(float(sum(step.query_lens)))
        finished = []
        for row, (seq_id, sequence) in enumerate(zip(step.request_ids, sequences, strict=True)):
            if sequence.queue_time is None:
                sequence.queue_time = time.perf_counter() - sequence.arrival_time
                self.queue_time.add(sequence.queue_time)
                sequence.num_cached_tokens = step.seq_lens[row] - step.query_lens[row]
            if step.samples[row]:
                sequence.num_pending += 1
                sequence.row = row
                if sequence.num_sampled == sequence.max_tokens:
                    finished.append(seq_id)
        return finished

    def _postprocess(self, *, keep: int) -> None:
        """Read all steps except the newest `keep` ones and distribute their tokens. Waits for the steps."""
        while (num_in_flight := len(self._in_flight)) > keep:
            step, inputs, outputs = self._in_flight[0]
            self._num_in_flight_before_read = num_in_flight
            outputs = self._runner.read(outputs)
            self._in_flight.popleft()
            self._num_in_flight_before_read = None
            is_plain = outputs.num_accepted is None and not (outputs.logprobs or outputs.prompt_logprobs)
            token_ids = outputs.token_ids.tolist()
            for row, seq_id in enumerate(step.request_ids):
                sequence = self._sequences.get(seq_id)
                if sequence is None:  # It stopped a step ago or was dropped.
                    continue
                try:
                    if not is_plain:
                        self._append_row(row, sequence, step, inputs, outputs)
                    elif step.samples[row]:
                        sequence.num_pending -= 1
                        self._append(sequence, token_ids[row], None)
                except Exception as error:  # Only this sequence fails.
                    sequence.fail(error)
                if sequence.finish_reason is not None:
                    self._drop([seq_id])

    def _append_row(
        self, row: int, sequence: SequenceState, step: Step, inputs: StepInputs, outputs: StepOutputs
    ) -> None:
        """Append a row's new tokens and log-probabilities, in a step with drafts or log-probabilities."""
        seq_id, params = step.request_ids[row], sequence.sampling_params
        if outputs.prompt_logprobs is not None and params.prompt_logprobs is not None:
            first, prompt_ids = next_prompt_tokens(step, row, sequence)
            index = int(inputs.model_inputs.logits_indices[row]) + 1 - step.query_lens[row]
            num_known = len(sequence.prompt_logprobs) - first  # After a preemption, some are already known.
            if num_known >= 0:
                sequence.prompt_logprobs += [
                    outputs.prompt_logprobs.at(index + i, prompt_ids[i], params.prompt_logprobs)
                    for i in range(num_known, len(prompt_ids))
                ]
        if not step.samples[row]:
            return
        token_ids, query_len, num_accepted = outputs.token_ids, 1 + step.num_draft_tokens, 0
        if outputs.num_accepted is not None:
            num_accepted = int(outputs.num_accepted[row])
            token_ids = outputs.token_ids[row]
            if self._speculation is not None:
                self._speculation.record(sequence, num_accepted)
            if num_accepted and seq_id in self._scheduler:
                self._scheduler.accept(seq_id, num_accepted)
        sequence.num_pending -= 1
        first_index = 0 if query_len > 1 else row
        for i in range(1 + num_accepted):
            token_id, logprobs = int(token_ids[first_index + i]), None
            if outputs.logprobs is not None and params.logprobs is not None:
                logprobs = outputs.logprobs.at(row * query_len + i, token_id, params.logprobs)
            self._append(sequence, token_id, logprobs)
            if sequence.finish_reason is not None:  # Later accepted tokens are dropped.
                break

    def _append(self, sequence: SequenceState, token_id: int, logprobs: Logprobs | None) -> None:
        sequence.append(token_id, logprobs)
        self.num_generated += 1
        times = sequence.times
        if len(times) == 1:
            self.time_to_first_token.add(times[0])
            self.prefill_time.add(times[0] - (sequence.queue_time or 0.0))
        else:
            self.inter_token_latency.add(times[-1] - times[-2])

    # ------------------------------------------------------------------------------------- sequences
    def has_work(self) -> bool:
        """Return whether sequences are unfinished or a step is in flight."""
        return bool(self._sequences or self._in_flight)

    def are_unfinished(self, seq_ids: Sequence[int]) -> bool:
        """Return whether any of these sequences is unfinished."""
        return any(seq_id in self._sequences for seq_id in seq_ids)

    def admit(self, requests: Sequence[Request]) -> list[int]:
        """Add all sequences of some requests to the queue, and return their ids."""
        with self._fail_all_if_interrupted():
            sequences = [sequence for request in requests for sequence in request.sequences]
            seq_ids = list(itertools.islice(self._new_ids, len(sequences)))
            for seq_id, sequence in zip(seq_ids, sequences, strict=True):
                self._sequences[seq_id] = sequence
                if sequence.mask is not None:
                    self._masked_sequences[seq_id] = sequence
            unused = iter(seq_ids)
            for request in requests:
                parent = None  # The first completion computes the prompt for all.
                for sequence in request.sequences:
                    seq_id = next(unused)
                    self._scheduler.add(
                        seq_id,
                        sequence.num_prompt_tokens,
                        sequence.max_tokens,
                        sequence.hashes,
                        parent_id=parent,
                    )
                    parent = seq_id if parent is None else parent
            return seq_ids

    def drop(self, seq_ids: Sequence[int]) -> None:
        """Abort the unfinished ones among some sequences. Their tokens in flight are ignored."""
        with self._fail_all_if_interrupted():
            self._drop(seq_ids)

    def _drop(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            sequence = self._sequences.pop(seq_id, None)
            self._masked_sequences.pop(seq_id, None)
            if sequence is not None and seq_id in self._scheduler:
                self._scheduler.abort(seq_id)

    def warm_up(self, max_executables: int | None, max_tokens: int | None) -> int:
        """Run executables that have hardly run on an empty batch; see `Engine.warm_up`.

        Raises:
            Exception: The error of a run. All unfinished sequences have ended with it, as in `step`.
        """
        cold_executables = self._runner.cold_executables(max_tokens)
        if chosen := cold_executables[:max_executables]:  # Do not broadcast empty lists.
            with self._fail_all_on_error():
                self._runner.warm_up(chosen)
        return len(cold_executables) - len(chosen)

    # -------------------------------------------------------------------------------------- failures
    @contextlib.contextmanager
    def _fail_all_if_interrupted(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            raise
        except BaseException:  # An incomplete request would never end.
            self.interrupt()
            raise

    def interrupt(self, others: Sequence[SequenceState] = ()) -> None:
        """End all unfinished sequences and `others` with an error, because of an interrupt."""
        error = RequestError("the engine was interrupted")
        for sequence in others:
            sequence.fail(error)
        self._fail_all(error)

    @contextlib.contextmanager
    def _fail_all_on_error(self) -> Iterator[None]:
        self._num_in_flight_before_read = None
        try:
            yield
        except Exception as error:
            cause = self._runner.cause_of(error)
            self.num_failed_steps += 1
            self._fail_all(cause)
            if cause is error:
                raise
            raise cause from error
        except BaseException:  # The caches or blocks may be inconsistent.
            if self._num_in_flight_before_read != len(self._in_flight):
                self.num_failed_steps += 1
                self._fail_all(RequestError("a step was interrupted"))
            raise

    def _fail_all(self, error: Exception) -> None:
        for sequence in self._sequences.values():
            sequence.fail(error)
        self._sequences.clear()
        self._masked_sequences.clear()
        self._in_flight.clear()
        self._scheduler.abort_all()
        self._runner.reset()


def _wait_for_steps(in_flight: Iterable[StepInFlight]) -> None:
    """Wait until the outputs of steps are on the host or have failed.

    Called when the process ends: JAX's transfer threads would abort the process if they finished after
    Python.
    """
    for _, _, outputs in in_flight:
        with contextlib.suppress(Exception):
            jax.device_get(outputs)
