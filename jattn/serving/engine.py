"""The engine: prompts in, tokens out, with as many requests a step as the cache and the budgets allow.

A step's tokens stay on the device and feed the next one, which is started before they are read: the host
prepares a step while the device runs the last. So it learns one step late that a request has stopped; the
token made in between is dropped, and the request's blocks may be given away at once, since the device takes
steps in order.
"""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jattn.bucket import Bucket
from jattn.cache.move import copy_blocks, padded_pairs
from jattn.metadata.batch import build_batch_metadata
from jattn.metadata.check import check_batch
from jattn.requests import row_indices
from jattn.serving.block_manager import BlockManager
from jattn.serving.doctor import explain
from jattn.serving.generation import Generation, GenerationResult, StreamedToken
from jattn.serving.prompts import Prompt, PromptLimits, build_generations, stop_ids_of
from jattn.serving.sampler import SamplingParams, build_sampling_metadata
from jattn.serving.scheduler import Scheduler, Step
from jattn.serving.served_model import as_served
from jattn.serving.sizes import StepLimits
from jattn.serving.step import StepTokens, make_step, next_tokens, with_implementation
from jattn.serving.step_inputs import StepInFlight, StepSampling, step_tokens
from jattn.serving.weights import Weights
from pallas_kernels.checks import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counts since the engine was made.

    Attributes:
        num_steps: Steps run.
        num_compiles: Executables compiled, one a bucket.
        num_preemptions: Times that a request lost its blocks to an older one and was computed again.
        num_blocks: Cache blocks that requests can have.
        peak_blocks: Most of them in use at once.
    """

    num_steps: int
    num_compiles: int
    num_preemptions: int
    num_blocks: int
    peak_blocks: int


class Engine:
    """Serves a decoder: continuous batching, chunked prefill, a paged cache, one executable a bucket.

    What a prompt becomes does not depend on what else runs, but for rounding: matrix products of another size
    may round differently. Not for several threads at once; several streams may be open.
    """

    def __init__(
        self,
        model: Any,
        *,
        num_blocks: int | None = None,
        cache_bytes: int | None = None,
        block_size: int = 16,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        cache_dtype: DTypeLike | None = None,
        quantization: str | None = None,
        skip_layers: Sequence[int] = (),
        buckets: Sequence[Bucket] | None = None,
        implementation: str | Sequence[str] | None = None,
        check_batches: bool = False,
    ) -> None:
        """Makes the caches; compiles nothing yet.

        Args:
            model: A `jattn.models.Decoder`, another ServedModel, or a Hugging Face folder to load one from.
            num_blocks: Blocks of each layer's cache; block 0 is never used. None = as cache_bytes says.
            cache_bytes: Memory for all layers' caches. None = enough for max_num_seqs requests of the model's
                longest context, but at most 80 % of the device's free memory, or 1 GiB where it is unknown.
            block_size: Tokens of a block.
            max_num_seqs: Most requests of a step.
            max_num_batched_tokens: Most new tokens of a step; longer prompts are computed in chunks.
            cache_dtype: Of keys and values; None = the model's.
            quantization: Of the cache, as in `CacheSpec`. Static scales are the model's kv_scales.
            skip_layers: Layers whose caches are not quantised; negative numbers count from the last.
            buckets: Sizes to compile; one of them must fit every step. None = a handful.
            implementation: Of the attention, as in `attend`; None = as the model's layers say.
            check_batches: Each step's metadata goes through `jattn.check_batch`: for tests; it takes time.

        Raises:
            ValueError: A size is no positive int, both num_blocks and cache_bytes are given, they make less
                than two blocks, or no bucket fits the largest step; an argument is of another kind.
            NotImplementedError: This machine does not have the implementation.
            FileNotFoundError: There is no such folder, or a file of it is missing.
        """
        how: dict[str, Any] = {"dtype": cache_dtype, "quantization": quantization, "skip_layers": skip_layers}
        step_sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        limits = StepLimits(block_size, **step_sizes)
        limits.check(skip_layers, num_blocks=num_blocks, cache_bytes=cache_bytes)
        self.model = as_served(model)
        self.tokenizer, self.block_size, self._check_batches = self.model.tokenizer, block_size, check_batches
        num_blocks = limits.num_blocks_for(self.model, num_blocks, cache_bytes, how)
        self.scheduler = Scheduler(BlockManager(num_blocks, block_size), **step_sizes)
        self._weights = Weights(self.model)
        self._graphdef = nnx.graphdef(with_implementation(self.model, implementation))
        self.graphs = limits.graphs(self.model, make_step(self._graphdef), buckets, num_blocks)
        self._caches = self.model.create_caches(num_blocks, block_size=block_size, **how)
        self._cache_spec = self.model.cache_specs(num_blocks, block_size=block_size, **how)[0]
        self._generations: dict[int, Generation] = {}
        self._new_ids, self._num_steps = itertools.count(), 0
        self._in_flight: collections.deque[StepInFlight] = collections.deque()  # two at most
        self._max_rows = max(bucket.max_reqs for bucket in self.graphs.buckets)
        self._last_tokens, self._sampling = jnp.zeros(self._max_rows, jnp.int32), StepSampling()

    @property
    def stats(self) -> EngineStats:
        """Counts since the engine was made."""
        manager = self.scheduler.block_manager
        return EngineStats(
            num_steps=self._num_steps,
            num_compiles=self.graphs.num_compiles,
            num_preemptions=self.scheduler.num_preemptions,
            num_blocks=manager.capacity,
            peak_blocks=manager.peak_used,
        )

    def explain(self) -> str:
        """What serves each kind of layer in every bucket, and why no faster one: what `print(plan)` says."""
        model = nnx.merge(self._graphdef, self._weights.refresh())
        return explain(model, self._caches, self.graphs.buckets, self.block_size)

    def precompile(self, *, progress: bool = True) -> None:
        """Compiles every bucket now, not when a step first needs it. `progress` shows a bar."""

        def inputs(bucket: Bucket) -> list[StepTokens]:
            shapes = (bucket.max_tokens,), (bucket.max_tokens,), (self._max_rows,)
            return [StepTokens._make(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)]

        self.graphs.precompile(
            self._weights.refresh(),
            self._caches,
            block_size=self.block_size,
            inputs=inputs,
            progress=progress,
        )
        greedy, drawn = SamplingParams(), SamplingParams(temperature=1.0, seed=0)
        for rows in {bucket.max_reqs for bucket in self.graphs.buckets}:
            logits = jnp.zeros((rows, self.model.config.vocab_size))
            for params in (greedy, drawn, dataclasses.replace(drawn, top_k=1)):
                sampling = build_sampling_metadata([params], num_rows=rows)
                next_tokens(logits, sampling, np.zeros(rows, np.int32), max_rows=self._max_rows)

    def update_weights(self, state: Any) -> None:
        """Puts new weights in the place of the model's: the next step runs them, and nothing compiles.

        Assigning to the model's own Variables (`nnx.update`) does the same. Requests under way keep the keys
        and values that the old weights made.

        Args:
            state: `nnx.state` of a model of the same structure, or nested dictionaries of arrays; what it
                lacks stays as it is.

        Raises:
            ValueError: It holds what the model has not, or another shape or dtype. Nothing has changed then.
        """
        self._weights.update(state)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        max_tokens: int | Sequence[int] = 16,
        *,
        stop_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        on_token: Callable[[int, int, str], Any] | None = None,
    ) -> list[GenerationResult]:
        """Completes prompts.

        Args:
            prompts: Text or token ids, mixed as you like.
            sampling_params: How tokens are picked, for all prompts or for each; None = greedily.
            max_tokens: Most new tokens, for all prompts or for each. The model's longest context may end a
                prompt earlier.
            stop_ids: Token ids that end a prompt, besides the model's eos_token_ids.
            ignore_eos: eos_token_ids do not end a prompt.
            on_token: Called with (index of the prompt, token id, text) for each new token.

        Returns:
            One result for each prompt, in their order.

        Raises:
            ValueError: A prompt cannot be served: empty, text without a tokenizer, a token outside the
                vocabulary, longer than the model's context or than the cache; or an argument is of another
                kind. Nothing has started then.
        """
        require(on_token is None or callable(on_token), "on_token", "be a function or None", repr(on_token))
        generations = self._checked(prompts, sampling_params, max_tokens, stop_ids, ignore_eos)
        with contextlib.closing(self._stream(generations)) as tokens:
            for token in tokens:
                if on_token is not None:
                    on_token(*token)
        return [generation.result() for generation in generations]

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        max_tokens: int | Sequence[int] = 16,
        *,
        stop_ids: Sequence[int] = (),
        ignore_eos: bool = False,
    ) -> Iterator[StreamedToken]:
        """Completes prompts and yields each new token: (index of the prompt, token id, text).

        Arguments and errors as `generate`. Closing the iterator drops what is unfinished.
        """
        return self._stream(self._checked(prompts, sampling_params, max_tokens, stop_ids, ignore_eos))

    # --------------------------------------------------------------------------------------- inside
    def _checked(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        max_tokens: int | Sequence[int],
        stop_ids: Sequence[int],
        ignore_eos: bool,
    ) -> list[Generation]:
        config = self.model.config
        self._weights.refresh()
        limits = PromptLimits(
            vocab_size=config.vocab_size,
            max_model_len=config.max_position_embeddings,
            capacity_tokens=self.scheduler.capacity_tokens,
        )
        return build_generations(
            prompts,
            max_tokens,
            sampling_params,
            stop_ids=stop_ids_of(stop_ids, () if ignore_eos else config.eos_token_ids),
            tokenizer=self.tokenizer,
            limits=limits,
        )

    def _stream(self, generations: list[Generation]) -> Generator[StreamedToken]:
        ids = list(itertools.islice(self._new_ids, len(generations)))
        for request_id, generation in zip(ids, generations, strict=True):
            self._generations[request_id] = generation
            self.scheduler.add(request_id, generation.num_prompt_tokens, generation.max_tokens)
        try:
            while True:
                for generation in generations:
                    while generation.unread:
                        yield generation.unread.popleft()
                if not any(request_id in self._generations for request_id in ids):
                    return
                self._run_step()
        finally:
            for request_id in ids:
                if request_id in self._generations:
                    self._drop(request_id)

    def _run_step(self) -> None:
        """Starts a step of whatever is scheduled, whoever's stream it is, and reads the one before."""
        self._read(keep=1)  # more are left where a reading was interrupted
        step = self.scheduler.schedule()
        if step is not None:
            self._start(step)
        self._read(keep=0 if step is None else 1)

    def _start(self, step: Step) -> None:
        """Starts a step; waits for nothing."""
        bucket = self.graphs.choose(step.query_lens, num_blocks=max(map(len, step.block_tables)))
        metadata = build_batch_metadata(
            step.query_lens,
            step.seq_lens,
            step.block_tables,
            block_size=self.block_size,
            bucket=bucket,
            to_device=False,
        )
        if self._check_batches:
            check_batch(metadata, self._cache_spec)
        rows = row_indices(np.asarray(step.query_lens), bucket)
        generations = [self._generations[request_id] for request_id in step.request_ids]
        tokens = step_tokens(step, generations, bucket, self._in_flight, self._last_tokens)
        sampling, num_generated = self._sampling.of(step, generations, bucket, rows)
        if step.block_copies:
            self._caches = copy_blocks(self._caches, padded_pairs(step.block_copies))
        logits, self._caches = self.graphs(self._weights.state, self._caches, metadata, tokens)
        self._last_tokens = next_tokens(logits, sampling, num_generated, max_rows=self._max_rows)
        self._last_tokens.copy_to_host_async()
        self._in_flight.append(StepInFlight(step, rows, self._last_tokens))
        self._num_steps += 1
        ended = []  # no step more, whatever its tokens are
        for request_id, generation, samples in zip(step.request_ids, generations, step.samples, strict=True):
            generation.num_pending += samples
            if samples and generation.num_asked_for == generation.max_tokens:
                ended.append(request_id)
        self.scheduler.complete(step, ended)

    def _read(self, *, keep: int) -> None:
        """Hands out the tokens of all steps but the newest ones; waits for them."""
        while len(self._in_flight) > keep:
            step, rows, tokens = self._in_flight[0]
            new_tokens = jax.device_get(tokens)[rows].tolist()
            self._in_flight.popleft()
            for request_id, token_id, samples in zip(step.request_ids, new_tokens, step.samples, strict=True):
                generation = self._generations.get(request_id)
                if samples and generation is not None:  # None: stopped a step ago, or nobody wants it now
                    generation.num_pending -= 1
                    generation.append(token_id)
                    if generation.finish_reason is not None:
                        self._drop(request_id)

    def _drop(self, request_id: int) -> None:
        """Forgets a request; what is on its way for it will not be read."""
        generation = self._generations.pop(request_id)
        if generation.num_asked_for < generation.max_tokens:
            self.scheduler.abort(request_id)
