"""The offline inference engine: batch prompts, run steps, and return the generated tokens."""

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from jax.typing import DTypeLike

from jattn.batch.bucket import Bucket
from jattn.runtime.decode_graphs import DecodeGraphs
from jattn.serving.engine.config import EngineConfig, resolve
from jattn.serving.engine.engine_core import EngineCore
from jattn.serving.engine.input_processor import (
    InputProcessor,
    Prompt,
    Request,
    require_single_completions,
)
from jattn.serving.engine.outputs import GenerationResult, RequestError, RequestOutput, StreamedToken
from jattn.serving.engine.processes import make_process_group, require_follower, require_leader
from jattn.serving.engine.runner import Runner
from jattn.serving.engine.sampling_params import SamplingParams, default_sampling_params_of
from jattn.serving.engine.scheduler import make_scheduler
from jattn.serving.engine.sequence import SequenceState
from jattn.serving.engine.served_model import resolve_model
from jattn.serving.engine.speculative import make_speculation
from jattn.serving.engine.stats import EngineStats
from jattn.serving.engine.step import use_compilation_cache
from jattn.serving.engine.structured_outputs import Grammars
from pallas_kernels.checks import require, require_type, suggest_argument_names

ENGINE_HINTS = {  # for arguments of vLLM's LLM
    "quantization": (
        "The quantization of weights is read from the checkpoint. For the KV cache, use kv_cache_dtype="
    ),
    **dict.fromkeys(("gpu_memory_utilization", "kv_cache_memory_bytes"), "Use cache_bytes= or num_blocks="),
    "tensor_parallel_size": "Load the model with mesh=jattn.parallel.make_mesh(tp=)",
    "pipeline_parallel_size": "Load the model with mesh=jattn.parallel.make_mesh(tp=)",
    "dtype": "Use jattn.models.load(model, dtype=)",
    "speculative_config": "Use speculative= and num_speculative_tokens=",
    "enforce_eager": "Steps are always compiled",
    "trust_remote_code": "Code in checkpoints is never run",
    "enable_lora": "LoRA is not supported",
}
GENERATE_HINTS = {  # for fields of SamplingParams, and arguments of vLLM's LLM.generate
    **{
        field.name: f"Use sampling_params=SamplingParams({field.name}=)"
        for field in dataclasses.fields(SamplingParams)
        if field.name not in ("max_tokens", "ignore_eos")
    },
    "prompt_token_ids": "Pass lists of token ids as prompts",
    "lora_request": "LoRA is not supported",
}


class Engine:
    """An inference engine with continuous batching, chunked prefill and a paged KV cache.

    Requests that share a prefix share its cache blocks. A request's tokens do not depend on the other
    requests, except for rounding: matrix products of different sizes may round differently (see
    `batch_invariant`). The engine is not thread-safe; use AsyncEngine to share it. Several streams may be
    open at once, and requests of `add_request` run beside them.

    Attributes:
        default_sampling_params: Sampling parameters of requests that do not specify any: 16 greedy tokens,
            unless the checkpoint's generation_config.json requests sampling. `SamplingParams()` itself is
            always greedy.
    """

    @suggest_argument_names("Engine", ENGINE_HINTS)
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
        kv_cache_dtype: DTypeLike = "auto",
        skip_layers: Sequence[int] = (),
        speculative: Any = None,
        num_speculative_tokens: int = 4,
        cascade_attention: bool | None = None,
        batch_invariant: bool = False,
        buckets: Sequence[Bucket] | None = None,
        implementation: str | Sequence[str] | None = None,
        seed: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        check_batches: bool = False,
    ) -> None:
        """Create the engine and its KV caches. Nothing is compiled yet.

        Args:
            model: A `jattn.models.Decoder`, another ServedModel, or the path of a Hugging Face model folder.
            num_blocks: Number of blocks in each layer's KV cache. Block 0 is reserved for padding. None:
                derived from cache_bytes.
            cache_bytes: KV-cache memory per device, in bytes. None: enough for the largest step, but at most
                80 % of the free memory (1 GiB if the free memory is unknown).
            block_size: Number of tokens per cache block and context-parallel rank.
            max_num_seqs: Maximum number of requests per step. None: 256 on a GPU, as in vLLM; 16 on a CPU.
            max_num_batched_tokens: Maximum number of new tokens per step; longer prompts are computed in
                chunks. None: depends on the device (docs/serving.md).
            max_model_len: Maximum context length in tokens. The last generated token does not count, unlike
                in vLLM and in jattn's server. None: the model's maximum.
            enable_prefix_caching: Whether requests reuse the cached blocks of a prefix that an earlier
                request has computed.
            kv_cache_dtype: Storage of keys and values: "auto" (the model's dtype), a float dtype, or a
                quantization: "fp8", "fp8_e4m3", "fp8_e5m2", "int8" or another name of `CacheSpec`. Static
                scales come from the model's kv_scales.
            skip_layers: Indices of layers whose KV cache is not quantized; negative indices count from the
                last layer.
            speculative: Draft method: None, "ngram", an NgramProposer, a draft model, or the path of one.
            num_speculative_tokens: Number of draft tokens per request and step.
            cascade_attention: Whether a decode step reads a prefix that all of its requests share only once.
                None: where that is expected to be faster.
            batch_invariant: Whether a request's results are bitwise independent of the other requests and of
                the cache. This is slower.
            buckets: Step sizes to compile; one of them must fit the largest step. None: as many as keep
                padding small (`jattn.serving.engine.step.step_buckets`).
            implementation: Attention implementation; see `attend`. None: as configured in the model's layers.
            seed: Random seed of requests without a seed of their own. None: another seed in each process.
            cache_dir: Folder that keeps lowered and compiled steps for later processes. Its files are code
                that these processes run. None: JAX's own configuration.
            check_batches: Whether each step's metadata is validated with `jattn.check_batch`. For tests; this
                is slow.

        Raises:
            ValueError: If an argument is invalid or conflicts with another one, or no bucket fits the largest
                step.
            NotImplementedError: If this machine or model does not support the requested implementation,
                cascade attention or batch invariance.
            FileNotFoundError: If the model folder or one of its files does not exist.
        """
        config = EngineConfig(
            num_blocks=num_blocks,
            cache_bytes=cache_bytes,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            kv_cache_dtype=kv_cache_dtype,
            skip_layers=skip_layers,
            speculative=speculative,
            num_speculative_tokens=num_speculative_tokens,
            cascade_attention=cascade_attention,
            batch_invariant=batch_invariant,
            buckets=buckets,
            implementation=implementation,
            seed=seed,
            cache_dir=cache_dir,
            check_batches=check_batches,
        )
        if cache_dir is not None:
            use_compilation_cache(cache_dir)
        self.model = resolve_model(model)
        mesh = getattr(self.model, "mesh", None)
        self._processes = None if mesh is None else make_process_group(mesh)
        self._config = resolve(config, self.model, self._processes)
        self.scheduler = make_scheduler(self._config)
        self._speculation = (
            None if self._config.speculative is None else make_speculation(self.model, self._config)
        )
        self._runner = Runner(self.model, self._config, self._speculation, self._processes)
        self._core = EngineCore(self.scheduler, self._runner, self._speculation)
        self._input_processor = InputProcessor(
            self.model,
            self._config,
            self._runner.weights,
            self._processes,
            capacity_tokens=self.scheduler.capacity_tokens,
        )
        self.default_sampling_params = default_sampling_params_of(self.model)
        self._open: dict[int | str, tuple[Request, list[int]]] = {}  # unfinished requests of add_request

    @property
    def tokenizer(self) -> Any:
        """The tokenizer for prompts and generated text; None if only token ids are supported."""
        return self._input_processor.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._input_processor.tokenizer = tokenizer

    @property
    def block_size(self) -> int:
        """Number of tokens per cache block, summed over all context-parallel ranks."""
        return self._config.block_size

    @property
    def max_model_len(self) -> int:
        """Maximum context length in tokens."""
        return self._config.max_model_len

    @property
    def graphs(self) -> DecodeGraphs:
        """The compiled executables, one per bucket."""
        return self._runner.graphs

    @property
    def grammars(self) -> Grammars:
        """The grammars of structured outputs, compiled for the model's vocabulary."""
        return self._input_processor.grammars

    @property
    def stats(self) -> EngineStats:
        """The engine's current state, and its counters since it was created."""
        scheduler, core, runner, speculation = self.scheduler, self._core, self._runner, self._speculation
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
            num_drafts=0 if speculation is None else speculation.num_drafts,
            num_draft_tokens=0 if speculation is None else speculation.num_draft_tokens,
            num_accepted_tokens=0 if speculation is None else speculation.num_accepted_tokens,
            time_to_first_token=core.time_to_first_token,
            inter_token_latency=core.inter_token_latency,
            queue_time=core.queue_time,
            prefill_time=core.prefill_time,
            step_tokens=core.step_tokens,
        )

    def explain(self) -> str:
        """Return tables of each layer type's attention implementation in every bucket, like `print(plan)`.

        They include the reasons why a faster implementation is not used.
        """
        return self._runner.explain()

    def precompile(self, *, progress: bool = True, wait: bool = True) -> None:
        """Compile all buckets before the first request, and run each executable once (`warm_up`).

        Args:
            progress: Whether to show a progress bar.
            wait: Whether to wait for all buckets. If False, return as soon as every step fits a compiled
                bucket. The remaining buckets compile in background threads, and each step uses the smallest
                bucket that is ready; `graphs.wait()` waits for them.
        """
        require_leader(self._processes)
        self._runner.precompile(progress, wait)
        self.warm_up()

    def warm_up(self, max_executables: int | None = None, *, max_tokens: int | None = None) -> int:
        """Run new executables on an empty batch: first runs load kernels and record CUDA graphs.

        Args:
            max_executables: Maximum number of executables to run, smallest first. None: all. An idle
                AsyncEngine runs them one at a time.
            max_tokens: Only run executables with at most this many tokens. None: no limit.

        Returns:
            Number of matching executables that have not run yet.
        """
        require_leader(self._processes)
        return self._core.warm_up(max_executables, max_tokens)

    def follow(self) -> None:
        """Run the steps of process 0's engine until that engine is closed (docs/scaling.md).

        Raises:
            ProcessError: If another process fails.
        """
        require_follower(self._processes)
        self._runner.follow()

    def close(self) -> None:
        """Let the engines of the other processes return from `follow`. Nothing else is closed."""
        if self._processes is not None:
            self._processes.close()

    def update_weights(self, state: Any) -> None:
        """Replace the model's weights. The next step uses the new weights, without recompilation.

        Assigning to the model's own Variables (`nnx.update`) has the same effect. Running requests keep the
        keys and values computed with the old weights; later requests do not reuse these.

        Args:
            state: `nnx.state` of a model with the same structure, or nested dictionaries of arrays. Missing
                weights keep their values.

        Raises:
            ValueError: If a weight does not exist in the model or has another shape or dtype. No weight is
                changed then.
        """
        require_leader(self._processes)
        self._runner.update_weights(state)

    # --------------------------------------------------------------------------------- request by request
    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: int | str | None = None
    ) -> int | str:
        """Add a request to the queue. `step` runs it.

        Args:
            prompt: Text or token ids.
            params: Sampling parameters. None: default_sampling_params.
            request_id: Identifier of the request. None: an unused integer.

        Returns:
            The request's identifier.

        Raises:
            ValueError: If the prompt cannot be served or the identifier is in use. Nothing is changed then.
        """
        require_type("request_id", request_id, (int, str, type(None)), "or None for an unused integer")
        if request_id in self._open:
            raise ValueError(f"request_id {request_id!r} is already in use. Pass a unique id per request.")
        params = self.default_sampling_params if params is None else params
        request = self._input_processor.request(prompt, params)
        ids = self._core.admit([request])
        if request_id is None:
            request_id = next(i for i in itertools.count(ids[0]) if i not in self._open)
        self._open[request_id] = request, ids
        return request_id

    def step(self) -> list[RequestOutput]:
        """Start the next step, and read the results of the step before it.

        Returns:
            New outputs of the requests added with `add_request`, one per completion, in order of arrival. The
            list can be empty: the tokens of the first step are read when the second one has started. If a
            step fails, all unfinished requests end with its error; later requests are served normally.
        """
        if self._core.has_work():
            with contextlib.suppress(Exception):  # Every unfinished request has the error.
                self._core.step()
        outputs: list[RequestOutput] = []
        reported: list[SequenceState] = []  # sequences whose new tokens are in `outputs`
        finished_ids: set[int | str] = set()
        try:
            for request_id, (request, _) in self._open.items():
                has_ended = False
                for index, sequence in enumerate(request.sequences):
                    if sequence.has_output:
                        reported.append(sequence)
                        outputs.append(sequence.output(request_id, index))
                        has_ended |= sequence.finish_reason is not None
                if has_ended and request.is_finished:
                    finished_ids.add(request_id)
            if finished_ids:
                self._open = {
                    open_id: entry for open_id, entry in self._open.items() if open_id not in finished_ids
                }
        except BaseException:  # The outputs are lost, so their sequences must end.
            if reported:
                self._core.interrupt(reported)
            raise
        return outputs

    def abort(self, request_id: int | str) -> None:
        """Abort a request of `add_request`. Its blocks are freed, and it has no further outputs.

        Raises:
            ValueError: If there is no such unfinished request.
        """
        require_type("request_id", request_id, (int, str), "the identifier of a request")
        if request_id not in self._open:
            raise ValueError(
                f"Request {request_id!r} is unknown or has finished. Pass an id that add_request returned."
            )
        _, ids = self._open.pop(request_id)
        self._core.drop(ids)

    def has_unfinished_requests(self) -> bool:
        """Return whether requests added with `add_request` are unfinished."""
        return bool(self._open)

    # --------------------------------------------------------------------------------- prompts at once
    @suggest_argument_names("generate", GENERATE_HINTS)
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
        """Generate completions for a list of prompts.

        Args:
            prompts: Prompts; each is text or a list of token ids.
            sampling_params: Sampling parameters for all prompts, or one for each. None:
                default_sampling_params.
            max_tokens: Maximum number of new tokens, for all prompts or for each. None: the value in
                sampling_params. The maximum context length can end a completion earlier.
            stop_ids: Token ids that end a completion, in addition to the model's EOS tokens and those in
                sampling_params.
            ignore_eos: Whether generation continues after the model's EOS token.
            on_token: Function called with (prompt index, token id, text) for each new token.

        Returns:
            One result per prompt, in the order of the prompts.

        Raises:
            ValueError: If an argument is invalid or a prompt cannot be served: it is empty, contains a token
                outside the vocabulary, exceeds the context length or the KV cache, or is text while the model
                has no tokenizer. Nothing has started then.
            RequestError: If a completion could not be finished. A failing step raises its own error.
        """
        require(on_token is None or callable(on_token), "on_token", "be a function or None", repr(on_token))
        requests = self._requests(prompts, sampling_params, max_tokens, stop_ids, ignore_eos)
        if on_token is not None:
            require_single_completions(requests, "with on_token")
        with contextlib.closing(stream_tokens(self._core, requests)) as tokens:
            for token in tokens:
                if on_token is not None:
                    on_token(*token)
        return [request.result() for request in requests]

    @suggest_argument_names("stream", GENERATE_HINTS)
    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        max_tokens: int | Sequence[int] | None = None,
        *,
        stop_ids: Sequence[int] = (),
        ignore_eos: bool = False,
    ) -> Iterator[StreamedToken]:
        """Generate completions, and yield each new token as (prompt index, token id, text).

        Takes the arguments of `generate` and raises the same errors. Closing the iterator aborts unfinished
        completions.
        """
        requests = self._requests(prompts, sampling_params, max_tokens, stop_ids, ignore_eos)
        require_single_completions(requests, "in a stream")
        return stream_tokens(self._core, requests)

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
        return self._input_processor.requests(
            prompts, sampling_params, max_tokens, stop_ids=stop_ids, ignore_eos=ignore_eos
        )


def stream_tokens(core: EngineCore, requests: list[Request]) -> Generator[StreamedToken]:
    """Admit requests and yield their new tokens. Closing the generator aborts unfinished requests."""
    ids = core.admit(requests)
    try:
        while True:
            for index, request in enumerate(requests):
                for sequence in request.sequences:
                    while (token := sequence.next_token()) is not None:
                        yield StreamedToken(index, *token)
                    if sequence.error is not None:
                        raise _request_error(index, sequence.error) from sequence.error
            if not core.are_unfinished(ids):
                return
            core.step()
    finally:
        core.drop(ids)


def _request_error(index: int, error: Exception) -> RequestError:
    return RequestError(f"prompts[{index}] could not be finished: {type(error).__name__}: {error}")
