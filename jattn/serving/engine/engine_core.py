"""The engine's loop: what is scheduled runs, and what it brought goes to the generations under way.

The host prepares a step while the device runs the last, and learns one step late that a request has stopped;
the token made in between is dropped, and the request's blocks may be given away at once, since the device
takes steps in order. A step with drafts is read before the next one is scheduled, which begins behind those
drafts that stay.

A step that fails takes its caches with it, which it was given to write into, and with them the keys of every
request: all end with the error, and the next ones find new caches. So they do where Ctrl-C comes anywhere but
in the wait for the device, which is most of the time: there nothing is lost. Where it comes while requests
are put in the queue or dropped, which are half known then, all end likewise.
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
from jattn.serving.engine.sequence import Generation
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
    """Generations under way, by numbers of its own: the scheduler's request ids."""

    def __init__(self, scheduler: Scheduler, runner: Runner, speculation: Speculation | None = None) -> None:
        """Starts with nothing under way; no speculation = no drafts."""
        self._scheduler, self._runner, self._speculation = scheduler, runner, speculation
        self._generations: dict[int, Generation] = {}  # unfinished ones
        self._masked: dict[int, Generation] = {}  # those of them that have a mask
        self._new_numbers = itertools.count()
        self._num_awaited: int | None = None  # steps in flight, while the oldest is waited for
        self.first_times, self.times = Histogram(TIME_TO_FIRST_TOKEN), Histogram(INTER_TOKEN_LATENCY)
        self.queue_times, self.prefill_times = Histogram(REQUEST_SECONDS), Histogram(REQUEST_SECONDS)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.num_generated = self.num_failed_steps = 0

    def has_work(self) -> bool:
        """Whether something is under way, or a step in flight."""
        return bool(self._generations or self._runner.num_in_flight)

    def are_under_way(self, numbers: Sequence[int]) -> bool:
        """Whether one of these is unfinished."""
        return any(number in self._generations for number in numbers)

    def admit(self, requests: Sequence[Request]) -> list[int]:
        """Puts all generations of requests in the queue; their numbers."""
        with self._ends_all_if_interrupted():
            return self._admit(requests)

    def drop(self, numbers: Sequence[int]) -> None:
        """Forgets those of them that are unfinished; what is on its way for them will not be read."""
        with self._ends_all_if_interrupted():
            self._drop(numbers)

    @contextlib.contextmanager
    def _ends_all_if_interrupted(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            raise
        except BaseException:  # what has no place in the queue would be waited for forever
            self.interrupt()
            raise

    def interrupt(self, others: Sequence[Generation] = ()) -> None:
        """Ends all that is under way, and these, which may have ended, where Ctrl-C left them half known."""
        error = RequestError("the engine was interrupted")
        for generation in others:
            generation.fail(error)
        self._fail_all(error)

    def _admit(self, requests: Sequence[Request]) -> list[int]:
        generations = [generation for request in requests for generation in request.generations]
        numbers = list(itertools.islice(self._new_numbers, len(generations)))
        self._generations.update(zip(numbers, generations, strict=True))
        masked = [number for number in numbers if self._generations[number].mask is not None]
        self._masked.update((number, self._generations[number]) for number in masked)
        new = iter(numbers)
        for request in requests:
            parent = None  # the first completion, which computes the prompt for all
            for one in request.generations:
                number = next(new)
                sizes = one.num_prompt_tokens, one.max_tokens
                self._scheduler.add(number, *sizes, one.hashes, parent_id=parent)
                parent = number if parent is None else parent
        return numbers

    def _drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            generation = self._generations.pop(number, None)
            self._masked.pop(number, None)
            if generation is not None and number in self._scheduler:
                self._scheduler.abort(number)

    def run_step(self) -> None:
        """Starts a step of whatever is scheduled, whoever's it is, and reads the one before.

        Raises:
            Exception: What the step failed with; it has ended all that was under way.
        """
        with self._ends_all_on_error():
            self._run_step()

    def warm_up(self, most: int | None, max_tokens: int | None) -> int:
        """As `Engine.warm_up`, between two steps.

        Raises:
            Exception: As `run_step`: the caches are gone with it.
        """
        cold = self._runner.cold_buckets(max_tokens)
        if chosen := cold[:most]:  # else other processes would be told of nothing at every look
            with self._ends_all_on_error():
                self._runner.warm_up(chosen)
        return len(cold) - len(chosen)

    @contextlib.contextmanager
    def _ends_all_on_error(self) -> Iterator[None]:
        self._num_awaited = None
        try:
            yield
        except Exception as error:
            cause = self._runner.cause_of(error)
            self.num_failed_steps += 1
            self._fail_all(cause)
            if cause is error:
                raise
            raise cause from error
        except BaseException:  # caches may be given away, blocks taken for a step that never ran
            if self._num_awaited != self._runner.num_in_flight:
                self.num_failed_steps += 1
                self._fail_all(RequestError("a step was interrupted"))
            raise

    def _run_step(self) -> None:
        # More are left where a reading was interrupted; none may be where a token decides what the next is.
        waits = self._runner.is_verifying or self._any_needs_its_last_token()
        self._read(keep=0 if waits else 1)
        if self._runner.have_weights_changed():
            self._scheduler.forget_prefixes()
        step = self._scheduler.schedule(self._num_draft_tokens())
        if step is not None:
            self._start(step)
        self._read(keep=0 if step is None or step.num_draft_tokens else 1)

    def _start(self, step: Step) -> None:
        generations = [self._generations[number] for number in step.request_ids]
        for number in step.preempted:
            self._generations[number].drafting.num_read = 0
        self._runner.start(*self._runner.prepare(step, generations))
        self.step_tokens.add(float(sum(step.query_lens)))
        ended = []  # no step more, whatever its tokens are
        for number, one, samples in zip(step.request_ids, generations, step.samples, strict=True):
            if one.queue_time is None:
                one.queue_time = time.perf_counter() - one.started
                self.queue_times.add(one.queue_time)
            one.num_pending += samples
            if samples and one.num_asked_for == one.max_tokens:
                ended.append(number)
        self._scheduler.complete(step, ended)

    def _num_draft_tokens(self) -> int:
        """Drafts for each row of the next step; waits for the rows' tokens where drafts promise to pay."""
        speculation = self._speculation
        if speculation is None or not speculation.can_pay(self._scheduler.num_running):
            return 0
        if not self._scheduler.can_draft(speculation.num_tokens):
            return 0
        if not speculation.proposes(self._running()):
            return 0
        if self._runner.num_in_flight:
            promising = [one for one in self._running() if one.drafting.num_drafted]
            self._read(keep=0)
            if not speculation.proposes(self._running()):
                speculation.note_none([one for one in promising if not one.drafting.num_drafted])
                return 0
        return speculation.num_tokens

    def _any_needs_its_last_token(self) -> bool:
        return any([generation.needs_last_token for generation in self._masked.values()])

    def _running(self) -> list[Generation]:
        return [self._generations[number] for number in self._scheduler.running]

    def _fail_all(self, error: Exception) -> None:
        for generation in self._generations.values():
            generation.fail(error)
        self._generations.clear()
        self._masked.clear()
        self._scheduler.abort_all()
        self._runner.reset()

    def _read(self, *, keep: int) -> None:
        """Hands out the tokens of all steps but the newest ones; waits for them."""
        while (num_in_flight := self._runner.num_in_flight) > keep:
            self._num_awaited = num_in_flight
            for new in self._runner.read():
                self._num_awaited = None
                generation = self._generations.get(new.request_id)
                if generation is not None:  # else stopped a step ago, or nobody wants it now
                    try:
                        self._hand_out(new, generation)
                    except Exception as error:  # of its text, say; the others' tokens are as good as before
                        generation.fail(error)
                    if generation.finish_reason is not None:
                        self._drop([new.request_id])
            self._num_awaited = None

    def _hand_out(self, new: NewTokens, generation: Generation) -> None:
        num_known = len(generation.prompt_logprobs)  # some of the new ones, where it was preempted
        if new.prompt_logprobs and new.prompt_start <= num_known:
            generation.prompt_logprobs += new.prompt_logprobs[num_known - new.prompt_start :]
        if not new.token_ids:
            return
        num_accepted = len(new.token_ids) - 1
        if self._speculation is not None and new.is_verified:
            self._speculation.note(generation, num_accepted)
        if num_accepted and new.request_id in self._scheduler:
            self._scheduler.accept(new.request_id, num_accepted)
        generation.num_pending -= 1
        if not (num_accepted or new.logprobs):  # nearly always
            self._append(generation, new.token_ids[0], None)
            return
        of_each = new.logprobs or [None] * len(new.token_ids)
        for token_id, logprobs in zip(new.token_ids, of_each, strict=True):
            self._append(generation, token_id, logprobs)
            if generation.finish_reason is not None:  # what was accepted behind it is nobody's
                self._drop([new.request_id])
                break

    def _append(self, generation: Generation, token_id: int, logprobs: Logprobs | None) -> None:
        generation.append(token_id, logprobs)
        self.num_generated += 1
        times = generation.times
        if len(times) == 1:
            self.first_times.add(times[0])
            self.prefill_times.add(times[0] - (generation.queue_time or 0.0))
        else:
            self.times.add(times[-1] - times[-2])
