"""State that the request handlers share: the engine, the model's names and texts, and admission control."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from jattn.serving.engine.engine_client import EngineClient
from jattn.serving.engine.outputs import RequestOutput
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.stats import EngineStats
from jattn.serving.server.chat_template import load_chat_template
from jattn.serving.server.errors import ApiError
from jattn.serving.server.logprobs import TokenFormatter
from jattn.serving.server.metrics import RequestMetrics
from jattn.serving.server.options import ServerOptions
from jattn.serving.server.protocol import GenerationBody
from jattn.serving.server.reasoning import load_reasoning_format
from jattn.serving.server.sampling_params import default_sampling
from jattn.serving.server.tool_call_formats import find_tool_call_format


class Service:
    """One engine behind one server.

    Attributes:
        engine: Engine that serves the requests.
        options: Configuration of the server.
        info: Properties of the engine.
        tokenizer: The model's `tokenizers.Tokenizer`.
        token_formatter: Formatter of tokens in responses.
        chat_template: The model's chat template, or None.
        tool_call_format: The model's tool-call format, or None if it is unknown.
        reasoning_format: The way that the model separates reasoning from its answer; None: it does not.
        default_sampling: Sampling parameters of requests that do not set them.
        metrics: Metrics of requests.
        is_ready: Whether the first step's executables have been compiled.
        num_open: Number of completions that clients wait for.
    """

    def __init__(self, engine: EngineClient, options: ServerOptions) -> None:
        """Read the checkpoint's files for serving.

        Args:
            engine: Engine that serves the requests.
            options: Configuration of the server.

        Raises:
            ValueError: If the model has no tokenizer, or the chat template is invalid.
        """
        self.engine, self.options, self.info = engine, options, engine.info
        self.tokenizer: Any = self.info.tokenizer
        if self.tokenizer is None:
            raise ValueError(
                "The model folder has no tokenizer.json, which the server requires. Copy it from the "
                "checkpoint."
            )
        self.token_formatter = TokenFormatter(self.tokenizer)
        self.chat_template = load_chat_template(options.folder, options.chat_template)
        template = None if self.chat_template is None else self.chat_template.source
        self.tool_call_format = find_tool_call_format(options.tool_call_parser, template)
        self.reasoning_format = load_reasoning_format(options.reasoning_parser, self.tokenizer)
        self.default_sampling = default_sampling(self.info.default_sampling_params)
        self.metrics = RequestMetrics(self.model_name)
        self.is_ready = False
        self.num_open = 0

    @property
    def model_name(self) -> str:
        """Name of the model in responses."""
        return self.options.served_model_names[0]

    def check_model(self, name: str | None) -> None:
        """Check that a request's model is the served one.

        Raises:
            ApiError: If it is another model (404).
        """
        if name is not None and name not in self.options.served_model_names:
            message = f"The model `{name}` does not exist."
            raise ApiError(404, message, "model", "model_not_found")

    def decode_tokens(self, param: str, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, including special ones.

        Args:
            param: Request parameter that holds the tokens.
            token_ids: Token ids.

        Raises:
            ValueError: If a token is not in the vocabulary.
        """
        size = self.info.vocab_size
        invalid = [i for i in token_ids if not 0 <= i < size]
        if invalid:
            raise ValueError(f"{param} contains token ids outside the vocabulary [0, {size}): {invalid}.")
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def token_formatter_for(self, body: GenerationBody) -> TokenFormatter:
        """Return the formatter of tokens in a request's response."""
        return (
            self.token_formatter.with_ids_as_names()
            if body.return_tokens_as_token_ids
            else self.token_formatter
        )

    def num_waiting(self, stats: EngineStats) -> int:
        """Return the number of completions that are not in a step yet."""
        return max(self.num_open - stats.num_running, 0)

    def check_num_completions(self, count: int) -> None:
        """Check that the server can admit the completions of a request when it is idle.

        Args:
            count: Number of completions of one request.

        Raises:
            ApiError: If it never can (400).
        """
        max_completions = self.info.max_num_seqs + self.options.max_queue
        if count > max_completions:
            message = (
                f"The request asks for {count} completions, but this server admits at most {max_completions}."
                " To admit more, start it with a larger --max-queue."
            )
            raise ApiError(400, message, "n")

    @contextlib.contextmanager
    def admit(self, count: int) -> Iterator[None]:
        """Admit the completions of a request for the duration of a block.

        Args:
            count: Number of completions.

        Raises:
            ApiError: If the request has too many completions (400), the model is not ready (503), or the
                queue is full (429).
        """
        self.check_num_completions(count)
        if not self.is_ready:
            raise ApiError(503, "The model is not ready yet.")
        num_queued = max(self.num_open - self.info.max_num_seqs, 0)
        if self.num_open + count > self.info.max_num_seqs + self.options.max_queue:
            message = (
                f"The server is overloaded: {num_queued} completions are waiting, and the maximum is"
                f" {self.options.max_queue}. Please retry later."
            )
            raise ApiError(429, message)
        self.num_open += count
        try:
            yield
        finally:
            self.num_open -= count

    async def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Yield the outputs of several prompts, each with the index of its completion over all prompts.

        Args:
            prompts: Token ids of each prompt.
            params: Sampling parameters of all prompts.

        Raises:
            ApiError: If the request is not admitted; see `admit`.
            ValueError: If a prompt is invalid.
            RequestError: If a completion could not be finished.
        """
        with self.admit(len(prompts) * params.n):
            requests = [self._generate_with_metrics(prompt, params) for prompt in prompts]
            async with contextlib.aclosing(merge_streams(requests)) as outputs:
                async for index, output in outputs:
                    yield index * params.n + output.index, output

    async def _generate_with_metrics(
        self, prompt: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput]:
        start, first, num_generated = time.perf_counter(), None, 0
        async with contextlib.aclosing(self.engine.generate(prompt, params)) as outputs:
            async for output in outputs:
                num_generated += len(output.new_token_ids)
                if first is None:
                    first = time.perf_counter()
                    self.metrics.num_prompt_tokens.inc(len(prompt))
                if output.finish_reason is not None:
                    self.metrics.success[output.finish_reason].inc()
                yield output
        end = time.perf_counter()
        self.metrics.prompt_tokens.observe(len(prompt))
        self.metrics.generation_tokens.observe(num_generated)
        if params.max_tokens is not None:
            self.metrics.max_tokens.observe(params.max_tokens)
        self.metrics.num_completions.observe(params.n)
        self.metrics.seconds.observe(end - start)
        self.metrics.decode_seconds.observe(end - (first or end))


async def merge_streams[T](streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Yield the items of several streams as they arrive, with the index of their stream.

    The first error ends all streams.
    """
    if len(streams) == 1:  # The common case; it takes a third less time per token.
        async with contextlib.aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()

    async def forward(index: int, stream: AsyncGenerator[T]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for item in stream:
                    queue.put_nowait((index, item))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(forward(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            entry = await queue.get()
            if isinstance(entry, Exception):
                raise entry
            if entry is None:
                num_open -= 1
            else:
                yield entry
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
