"""The engine loop: run scheduled steps and give their tokens to the unfinished sequences.

The host prepares a step while the device runs the one before it, so it learns one step late that a request
has stopped. The token generated in between is dropped. The request's blocks can be reused at once because the
device runs steps in order. A step with draft tokens is read before the next step is scheduled, since the next
step starts after the accepted drafts.

A failing step destroys the KV caches, which were donated to it, and with them the keys of every request. All
requests then end with the error, and later requests use new caches. The same happens if Ctrl-C interrupts
anything but the wait for the device (where most of the time is spent, and where nothing is lost), or
interrupts a call that adds or drops requests.
"""

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence

from jattn.serving.engine.input_processor import Request
from jattn.serving.engine.outputs import Logprobs, RequestError
from jattn.serving.engine.runner import Runner
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
from jattn.serving.engine.step_io import NewTokens


class EngineCore:
    """The unfinished sequences by number, and the loop that runs them.

    A number is the scheduler's request id.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, speculation: Speculation | None = None) -> None:
        """Start without sequences. If `speculation` is None, no tokens are drafted."""
        self._scheduler, self._runner, self._speculation = scheduler, runner, speculation
        self._sequences: dict[int, SequenceState] = {}  # the unfinished sequences
        self._with_mask: dict[int, SequenceState] = {}  # unfinished sequences with a mask
        self._new_numbers = itertools.count()
        self._num_in_flight_before_read: int | None = None  # set while waiting for a step
        self.time_to_first_token, self.times = Histogram(TIME_TO_FIRST_TOKEN), Histogram(INTER_TOKEN_LATENCY)
        self.queue_times, self.prefill_times = Histogram(REQUEST_SECONDS), Histogram(REQUEST_SECONDS)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.num_generated = self.num_failed_steps = 0

    def has_work(self) -> bool:
        """Return whether sequences are unfinished or a step is in flight."""
        return bool(self._sequences or self._runner.num_in_flight)

    def are_unfinished(self, numbers: Sequence[int]) -> bool:
        """Return whether any sequence of `numbers` is unfinished."""
        return any(number in self._sequences for number in numbers)

    def admit(self, requests: Sequence[Request]) -> list[int]:
        """Add all sequences of some requests to the queue, and return their numbers."""
        with self._fail_all_if_interrupted():
            return self._admit(requests)

    def drop(self, numbers: Sequence[int]) -> None:
        """Abort the unfinished ones among the sequences `numbers`. Their tokens in flight are ignored."""
        with self._fail_all_if_interrupted():
            self._drop(numbers)

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

    def _admit(self, requests: Sequence[Request]) -> list[int]:
        sequences = [sequence for request in requests for sequence in request.sequences]
        numbers = list(itertools.islice(self._new_numbers, len(sequences)))
        self._sequences.update(zip(numbers, sequences, strict=True))
        masked = [number for number in numbers if self._sequences[number].mask is not None]
        self._with_mask.update((number, self._sequences[number]) for number in masked)
        new_tokens = iter(numbers)
        for request in requests:
            parent = None  # The first completion computes the prompt for all.
            for sequence in request.sequences:
                number = next(new_tokens)
                lengths = sequence.num_prompt_tokens, sequence.max_tokens
                self._scheduler.add(number, *lengths, sequence.hashes, parent_id=parent)
                parent = number if parent is None else parent
        return numbers

    def _drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            sequence = self._sequences.pop(number, None)
            self._with_mask.pop(number, None)
            if sequence is not None and number in self._scheduler:
                self._scheduler.abort(number)

    def run_step(self) -> None:
        """Start the next scheduled step, and read the step before it.

        Raises:
            Exception: The error of the step. All unfinished sequences have ended with it.
        """
        with self._fail_all_on_error():
            self._run_step()

    def warm_up(self, max_executables: int | None, max_tokens: int | None) -> int:
        """Run executables that have hardly run on an empty batch; see `Engine.warm_up`.

        Raises:
            Exception: The error of a run. All unfinished sequences have ended with it, as in `run_step`.
        """
        cold_executables = self._runner.cold_buckets(max_tokens)
        if chosen := cold_executables[:max_executables]:  # Do not broadcast empty lists.
            with self._fail_all_on_error():
                self._runner.warm_up(chosen)
        return len(cold_executables) - len(chosen)

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
            if self._num_in_flight_before_read != self._runner.num_in_flight:
                self.num_failed_steps += 1
                self._fail_all(RequestError("a step was interrupted"))
            raise

    def _run_step(self) -> None:
        # More steps remain if reading was interrupted. None may remain if the next token depends on the last.
        must_read_all = self._runner.is_verifying or self._any_needs_its_last_token()
        self._read(keep=0 if must_read_all else 1)
        if self._runner.have_weights_changed():
            self._scheduler.reset_prefix_cache()
        step = self._scheduler.schedule(self._num_draft_tokens())
        if step is not None:
            self._start(step)
        self._read(keep=0 if step is None or step.num_draft_tokens else 1)

    def _start(self, step: Step) -> None:
        sequences = [self._sequences[number] for number in step.request_ids]
        for number in step.preempted:
            self._sequences[number].draft_state.num_read = 0
        self._runner.start(*self._runner.prepare(step, sequences))
        self.step_tokens.add(float(sum(step.query_lens)))
        finished = []  # requests that need no further step
        for number, sequence, samples in zip(step.request_ids, sequences, step.samples, strict=True):
            if sequence.queue_time is None:
                sequence.queue_time = time.perf_counter() - sequence.arrival_time
                self.queue_times.add(sequence.queue_time)
            sequence.num_pending += samples
            if samples and sequence.num_requested == sequence.max_tokens:
                finished.append(number)
        self._scheduler.update_after_start(step, finished)

    def _num_draft_tokens(self) -> int:
        """Return the number of draft tokens per row of the next step.

        Waits for the rows' latest tokens if drafting is expected to pay off.
        """
        speculation = self._speculation
        if speculation is None or not speculation.can_pay(self._scheduler.num_running):
            return 0
        if not self._scheduler.can_draft(speculation.num_tokens):
            return 0
        if not speculation.proposes(self._running()):
            return 0
        if self._runner.num_in_flight:
            promising = [sequence for sequence in self._running() if sequence.draft_state.num_drafted]
            self._read(keep=0)
            if not speculation.proposes(self._running()):
                speculation.record_unused(
                    [sequence for sequence in promising if not sequence.draft_state.num_drafted]
                )
                return 0
        return speculation.num_tokens

    def _any_needs_its_last_token(self) -> bool:
        return any([sequence.needs_last_token for sequence in self._with_mask.values()])

    def _running(self) -> list[SequenceState]:
        return [self._sequences[number] for number in self._scheduler.running]

    def _fail_all(self, error: Exception) -> None:
        for sequence in self._sequences.values():
            sequence.fail(error)
        self._sequences.clear()
        self._with_mask.clear()
        self._scheduler.abort_all()
        self._runner.reset()

    def _read(self, *, keep: int) -> None:
        """Read all steps except the newest `keep` ones and distribute their tokens. Waits for the steps."""
        while (num_in_flight := self._runner.num_in_flight) > keep:
            self._num_in_flight_before_read = num_in_flight
            for new_tokens in self._runner.read():
                self._num_in_flight_before_read = None
                sequence = self._sequences.get(new_tokens.request_id)
                if sequence is not None:  # Otherwise it stopped a step ago or was dropped.
                    try:
                        self._hand_out(new_tokens, sequence)
                    except Exception as error:  # Only this sequence fails.
                        sequence.fail(error)
                    if sequence.finish_reason is not None:
                        self._drop([new_tokens.request_id])
            self._num_in_flight_before_read = None

    def _hand_out(self, new_tokens: NewTokens, sequence: SequenceState) -> None:
        num_known = len(sequence.prompt_logprobs)  # After a preemption, some are already known.
        if new_tokens.prompt_logprobs and new_tokens.prompt_start <= num_known:
            sequence.prompt_logprobs += new_tokens.prompt_logprobs[num_known - new_tokens.prompt_start :]
        if not new_tokens.token_ids:
            return
        num_accepted = len(new_tokens.token_ids) - 1
        if self._speculation is not None and new_tokens.is_verified:
            self._speculation.record(sequence, num_accepted)
        if num_accepted and new_tokens.request_id in self._scheduler:
            self._scheduler.accept(new_tokens.request_id, num_accepted)
        sequence.num_pending -= 1
        if not (num_accepted or new_tokens.logprobs):  # the common case
            self._append(sequence, new_tokens.token_ids[0], None)
            return
        logprobs_by_token = new_tokens.logprobs or [None] * len(new_tokens.token_ids)
        for token_id, logprobs in zip(new_tokens.token_ids, logprobs_by_token, strict=True):
            self._append(sequence, token_id, logprobs)
            if sequence.finish_reason is not None:  # Later accepted tokens are dropped.
                self._drop([new_tokens.request_id])
                break

    def _append(self, sequence: SequenceState, token_id: int, logprobs: Logprobs | None) -> None:
        sequence.append(token_id, logprobs)
        self.num_generated += 1
        times = sequence.times
        if len(times) == 1:
            self.time_to_first_token.add(times[0])
            self.prefill_times.add(times[0] - (sequence.queue_time or 0.0))
        else:
            self.times.add(times[-1] - times[-2])
