"""The engine: prompts in, tokens out, with as many requests a step as the cache and the budgets allow."""

import contextlib
import itertools
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from jax.typing import DTypeLike

from jattn.batch.bucket import Bucket
from jattn.runtime.decode_graphs import DecodeGraphs
from jattn.serving.engine.engine_core import EngineCore
from jattn.serving.engine.engine_setup import CacheOptions, DraftOptions, SizeOptions, StepOptions, make_parts
from jattn.serving.engine.input_processor import Prompt, Request, require_one_each
from jattn.serving.engine.outputs import GenerationResult, RequestError, RequestOutput, StreamedToken
from jattn.serving.engine.processes import must_follow, must_lead
from jattn.serving.engine.runner import Runner
from jattn.serving.engine.sampling_params import SamplingParams, default_params
from jattn.serving.engine.scheduler import Scheduler
from jattn.serving.engine.sequence import Generation
from jattn.serving.engine.speculative import Speculation
from jattn.serving.engine.stats import EngineStats
from jattn.serving.engine.structured_outputs import Grammars
from pallas_kernels.checks import require, require_type


class Engine:
    """Serves a decoder: continuous batching, chunked prefill, a paged cache, one executable a bucket.

    Requests share the blocks of what they begin with. What a prompt becomes does not depend on what else
    runs, but for rounding: matrix products of another size may round differently. Not for several threads at
    once; several streams may be open, and requests of `add_request` run beside them.

    Attributes:
        default_sampling_params: What requests get that say nothing: 16 tokens, greedily, unless the
            checkpoint's generation_config.json asks for sampling. `SamplingParams()` is greedy all the same.
    """

    def __init__(
        self,
        model: Any,
        *,
        num_blocks: int | None = None,
        cache_bytes: int | None = None,
        block_size: int = 16,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        enable_prefix_caching: bool = True,
        cache_dtype: DTypeLike | None = None,
        quantization: str | None = None,
        skip_layers: Sequence[int] = (),
        speculative: Any = None,
        num_speculative_tokens: int = 4,
        cascade_attention: bool | None = None,
        batch_invariant: bool = False,
        buckets: Sequence[Bucket] | None = None,
        implementation: str | Sequence[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        check_batches: bool = False,
    ) -> None:
        """Makes the caches; compiles nothing yet.

        Args:
            model: A `jattn.models.Decoder`, another ServedModel, or a Hugging Face folder to load one from.
            num_blocks: Blocks of each layer's cache; block 0 is never used. None = as cache_bytes says.
            cache_bytes: On each device. None = enough for any step, or 80 % of what is free (1 GiB: unknown).
            block_size: Tokens of a block, on each device that has keys of its own.
            max_num_seqs: Most requests of a step. None = as vLLM on a GPU, 256; fewer else (docs/serving.md).
            max_num_batched_tokens: Most new tokens of a step; longer prompts come in chunks. None likewise.
            max_model_len: Prompt and new tokens but the last (vLLM, our server: all). None = the model's.
            enable_prefix_caching: A prompt that begins as another did is computed from where they part.
            cache_dtype: Of keys and values; None = the model's.
            quantization: Of the cache, as in `CacheSpec`. Static scales are the model's kv_scales.
            skip_layers: Layers whose caches are not quantised; negative numbers count from the last.
            speculative: Who drafts: None, "ngram", an NgramProposer, or another model or its folder.
            num_speculative_tokens: Drafts of a request in a step.
            cascade_attention: Blocks that all decoding requests begin with are read once; None = if it pays.
            batch_invariant: A request's bits do not depend on what else runs or is cached; this takes time.
            buckets: Sizes to compile; one must fit every step. None = vLLM's capture sizes, and more.
            implementation: Of the attention, as in `attend`; None = as the model's layers say.
            cache_dir: Where JAX keeps this process's executables for the next. None = as configured.
            check_batches: Each step's metadata goes through `jattn.check_batch`: for tests; it takes time.

        Raises:
            ValueError: An argument is not as above, or another forbids it; no bucket fits the largest step.
            NotImplementedError: This machine lacks the implementation; no cascades or invariance here.
            FileNotFoundError: There is no such folder, or a file of it is missing.
        """
        sizes = SizeOptions(block_size, max_num_seqs, max_num_batched_tokens, max_model_len, batch_invariant)
        cache = CacheOptions(num_blocks, cache_bytes, cache_dtype, quantization, skip_layers)
        drafts = DraftOptions(speculative, num_speculative_tokens)
        steps = StepOptions(buckets, implementation, cascade_attention, check_batches)
        parts = make_parts(model, sizes, cache, drafts, steps, enable_prefix_caching, cache_dir)
        self.model, self.scheduler, self._runner, self._core, self._intake, *_ = parts
        self._processes, self._speculation = parts.processes, parts.speculation
        self.default_sampling_params = default_params(self.model)
        self._open: dict[int | str, tuple[Request, list[int]]] = {}  # of add_request, until they are read

    @property
    def tokenizer(self) -> Any:
        """Of texts, in and out: the model's, or what it was set to; None = there are only token ids."""
        return self._intake.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._intake.tokenizer = tokenizer

    @property
    def block_size(self) -> int:
        """Tokens of a block, of all devices together."""
        return self._intake.limits.block_size

    @property
    def max_model_len(self) -> int:
        """The longest context, in tokens."""
        return self._intake.limits.max_model_len

    @property
    def graphs(self) -> DecodeGraphs:
        """The executables."""
        return self._runner.graphs

    @property
    def grammars(self) -> Grammars:
        """The forms that texts have been given, compiled for the model's vocabulary."""
        return self._intake.grammars

    @property
    def stats(self) -> EngineStats:
        """Now, and counts since the engine was made."""
        return stats_of(self.scheduler, self._core, self._runner, self._speculation)

    def explain(self) -> str:
        """What serves each kind of layer in every bucket, and why no faster one: what `print(plan)` says."""
        return self._runner.explain()

    def precompile(self, *, progress: bool = True, wait: bool = True) -> None:
        """Compiles the buckets now, not when a step first needs one, and runs each once ready (`warm_up`).

        Args:
            progress: Shows a bar.
            wait: False = returns when every step has a bucket that fits; the rest compile in threads behind,
                and a step takes the smallest that is ready (`graphs.wait()` waits for them).
        """
        must_lead(self._processes)
        self._runner.precompile(progress, wait)
        self.warm_up()

    def warm_up(self, most: int | None = None, *, max_tokens: int | None = None) -> int:
        """Runs executables that are new on no requests: first runs load kernels and make CUDA graphs.

        Args:
            most: So many, smallest first; None = all. An AsyncEngine does one at a time where it is idle.
            max_tokens: Those whose steps have no more; None = all.

        Returns:
            How many of those are left.
        """
        must_lead(self._processes)
        return self._core.warm_up(most, max_tokens)

    def follow(self) -> None:
        """Runs what process 0's engine runs until that is closed (docs/scaling.md); raises if one fails."""
        must_follow(self._processes)
        self._runner.follow()

    def close(self) -> None:
        """Lets the engines of other processes return from `follow`; nothing else is closed."""
        if self._processes is not None:
            self._processes.close()

    def update_weights(self, state: Any) -> None:
        """Puts new weights in the place of the model's: the next step runs them, and nothing compiles.

        Assigning to the model's own Variables (`nnx.update`) does the same. Requests under way keep the keys
        and values that the old weights made; requests to come find none of these.

        Args:
            state: `nnx.state` of a model of the same structure, or nested dictionaries of arrays; what it
                lacks stays as it is.

        Raises:
            ValueError: It holds what the model has not, or another shape or dtype. Nothing has changed then.
        """
        must_lead(self._processes)
        self._runner.update_weights(state)

    # --------------------------------------------------------------------------------- request by request
    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: int | str | None = None
    ) -> int | str:
        """Puts a prompt in the queue; `step` runs it.

        Args:
            prompt: Text or token ids.
            params: How its tokens are picked, and where it ends; None = default_sampling_params.
            request_id: What to call it; None = a number that is free.

        Returns:
            What it is called.

        Raises:
            ValueError: The prompt cannot be served, or the name is taken. Nothing has changed then.
        """
        require_type("request_id", request_id, (int, str, type(None)), "or None, for a free number")
        require(request_id not in self._open, "request_id", "be new", repr(request_id))
        params = self.default_sampling_params if params is None else params
        request = self._intake.request(prompt, params)
        ids = self._core.admit([request])
        if request_id is None:
            request_id = next(i for i in itertools.count(ids[0]) if i not in self._open)
        self._open[request_id] = request, ids
        return request_id

    def step(self) -> list[RequestOutput]:
        """Starts a step of what is scheduled and reads the one before.

        Returns:
            What is new of the requests of `add_request`, one entry a completion, in order of arrival. Empty
            where nothing came yet: the first step's tokens are read when the second has begun. A step that
            fails ends every request with its error; those to come are served.
        """
        if self._core.has_work():
            with contextlib.suppress(Exception):  # every request under way has it
                self._core.run_step()
        outputs: list[RequestOutput] = []
        told: list[Generation] = []  # of them outputs are made
        ended: set[int | str] = set()
        try:
            for request_id, (request, _) in self._open.items():
                has_ended = False
                for index, generation in enumerate(request.generations):
                    if generation.has_news:
                        told.append(generation)
                        outputs.append(generation.output(request_id, index))
                        has_ended |= generation.finish_reason is not None
                if has_ended and request.is_finished:
                    ended.add(request_id)
            if ended:
                self._open = {name: one for name, one in self._open.items() if name not in ended}
        except BaseException:  # what is told by now reaches nobody: their texts would have holes
            if told:
                self._core.interrupt(told)
            raise
        return outputs

    def abort(self, request_id: int | str) -> None:
        """Drops a request of `add_request`: its blocks are free at once, and nothing more is heard of it.

        Raises:
            ValueError: There is no such request, or it has ended.
        """
        require_type("request_id", request_id, (int, str), "of one request")
        require(request_id in self._open, "request_id", "be unfinished", repr(request_id))
        _, ids = self._open.pop(request_id)
        self._core.drop(ids)

    def has_unfinished_requests(self) -> bool:
        """Whether requests of `add_request` have more to come."""
        return bool(self._open)

    # --------------------------------------------------------------------------------- prompts at once
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        max_tokens: int | Sequence[int] | None = None,
        *,
        stop_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        on_token: Callable[[int, int, str], Any] | None = None,
    ) -> list[GenerationResult]:
        """Completes prompts.

        Args:
            prompts: Text or token ids, mixed as you like.
            sampling_params: How tokens are picked, for all prompts or for each; None = as
                default_sampling_params say.
            max_tokens: Most new tokens, for all prompts or for each; None = as sampling_params say (16). The
                longest context may end a prompt earlier.
            stop_ids: Token ids that end a prompt, besides the model's eos and those of sampling_params.
            ignore_eos: The model's eos does not end a prompt.
            on_token: Called with (index of the prompt, token id, text) for each new token.

        Returns:
            One result for each prompt, in their order.

        Raises:
            ValueError: A prompt cannot be served: empty, text without a tokenizer, a token outside the
                vocabulary, longer than the longest context or than the cache; or an argument is of another
                kind. Nothing has started then.
            RequestError: A prompt could not be finished; a step's own error where that failed.
        """
        require(on_token is None or callable(on_token), "on_token", "be a function or None", repr(on_token))
        requests = self._requests(prompts, sampling_params, max_tokens, stop_ids, ignore_eos)
        if on_token is not None:
            require_one_each(requests, "with on_token")
        with contextlib.closing(stream_of(self._core, requests)) as tokens:
            for token in tokens:
                if on_token is not None:
                    on_token(*token)
        return [request.result() for request in requests]

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        max_tokens: int | Sequence[int] | None = None,
        *,
        stop_ids: Sequence[int] = (),
        ignore_eos: bool = False,
    ) -> Iterator[StreamedToken]:
        """Completes prompts and yields each new token: (index of the prompt, token id, text).

        Arguments and errors as `generate`. Closing the iterator drops what is unfinished.
        """
        requests = self._requests(prompts, sampling_params, max_tokens, stop_ids, ignore_eos)
        require_one_each(requests, "in a stream")
        return stream_of(self._core, requests)

    # --------------------------------------------------------------------------------------- inside
    def _requests(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        max_tokens: int | Sequence[int] | None,
        stop_ids: Sequence[int],
        ignore_eos: bool,
    ) -> list[Request]:
        sampling_params = self.default_sampling_params if sampling_params is None else sampling_params
        return self._intake.requests(
            prompts, sampling_params, max_tokens, stop_ids=stop_ids, ignore_eos=ignore_eos
        )


def stats_of(
    scheduler: Scheduler, core: EngineCore, runner: Runner, drafts: Speculation | None
) -> EngineStats:
    """Now, and since the engine was made; no drafts = none are made."""
    manager = scheduler.block_manager
    return EngineStats(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_steps=runner.num_steps,
        num_cascade_steps=runner.num_cascade_steps,
        num_failed_steps=core.num_failed_steps,
        num_compiles=runner.num_compiles,
        num_preemptions=scheduler.num_preemptions,
        num_blocks=manager.capacity,
        num_used_blocks=manager.num_used,
        peak_blocks=manager.peak_used,
        num_prefix_tokens=scheduler.num_prefix_tokens,
        num_prefix_hit_tokens=scheduler.num_prefix_hit_tokens,
        num_forked_tokens=scheduler.num_forked_tokens,
        num_generated_tokens=core.num_generated,
        num_drafts=0 if drafts is None else drafts.num_drafts,
        num_draft_tokens=0 if drafts is None else drafts.num_draft_tokens,
        num_accepted_tokens=0 if drafts is None else drafts.num_accepted_tokens,
        time_to_first_token=core.first_times,
        inter_token_latency=core.times,
        queue_time=core.queue_times,
        prefill_time=core.prefill_times,
        step_tokens=core.step_tokens,
    )


def stream_of(core: EngineCore, requests: list[Request]) -> Generator[StreamedToken]:
    """Admits requests and yields their new tokens; closed, it drops what is unfinished."""
    ids = core.admit(requests)
    try:
        while True:
            for index, request in enumerate(requests):
                for generation in request.generations:
                    while generation.unread:
                        new = generation.unread.popleft()
                        yield StreamedToken(index, new.token_id, new.text)
                    if generation.error is not None:
                        raise _request_error(index, generation.error) from generation.error
            if not core.are_under_way(ids):
                return
            core.run_step()
    finally:
        core.drop(ids)


def _request_error(index: int, error: Exception) -> RequestError:
    return RequestError(f"prompts[{index}] could not be finished: {type(error).__name__}: {error}")
