"""What the handlers share: the engine, its model's names and texts, who is being served."""

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
from jattn.serving.server.logprobs import TokenTexts
from jattn.serving.server.metrics import Counts
from jattn.serving.server.options import ServerOptions
from jattn.serving.server.protocol import GenerationBody
from jattn.serving.server.sampling_params import default_sampling
from jattn.serving.server.tool_call_formats import call_format
from pallas_kernels.checks import require


class Service:
    """One engine behind one server."""

    def __init__(self, engine: EngineClient, options: ServerOptions) -> None:
        """Reads what the checkpoint's folder has for a server; not ready yet.

        Raises:
            ValueError: The model has no tokenizer.
        """
        self.engine, self.options, self.info = engine, options, engine.info
        self.tokenizer: Any = self.info.tokenizer
        require(self.tokenizer is not None, "model", "have a tokenizer (tokenizer.json)", None)
        self.token_texts = TokenTexts(self.tokenizer)
        self.chat_template = load_chat_template(options.folder, options.chat_template)
        template = None if self.chat_template is None else self.chat_template.source
        self.call_format = call_format(options.tool_call_parser, template)
        self.default_sampling = default_sampling(self.info.default_sampling_params)
        self.counts = Counts()
        self.is_ready = False
        self.num_open = 0  # completions that clients wait for

    @property
    def model_name(self) -> str:
        """What answers call the model."""
        return self.options.served_model_names[0]

    def check_model(self, name: str | None) -> None:
        """Whether a request means this model.

        Raises:
            ApiError: It means another (404).
        """
        if name is not None and name not in self.options.served_model_names:
            told = f"The model `{name}` does not exist."
            raise ApiError(404, told, "model", "model_not_found")

    def text_of(self, name: str, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones too.

        Raises:
            ValueError: One is not in the vocabulary; `name` is what they are called.
        """
        size = self.info.vocab_size
        wrong = [i for i in token_ids if not 0 <= i < size]
        require(not wrong, name, f"be in the vocabulary, [0, {size})", wrong)
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def num_waiting(self, now: EngineStats) -> int:
        """Completions that are in no step yet."""
        return max(self.num_open - now.num_running, 0)

    def require_room(self, count: int) -> None:
        """Whether so many completions of one request could be served if nobody else asked for any.

        Raises:
            ApiError: They could not, however often they are asked for (400).
        """
        most = self.info.max_num_seqs + self.options.max_queue
        if count > most:
            told = f"a request must ask for at most {most} completions (--max-queue: more), got {count}."
            raise ApiError(400, told, "n")

    @contextlib.contextmanager
    def admitted(self, count: int) -> Iterator[None]:
        """So many completions are being served.

        Raises:
            ApiError: As `require_room`; the executables are not there yet (503), or too many wait (429).
        """
        self.require_room(count)
        if not self.is_ready:
            raise ApiError(503, "the model is being made ready")
        num_queued = max(self.num_open - self.info.max_num_seqs, 0)
        if self.num_open + count > self.info.max_num_seqs + self.options.max_queue:
            told = f"{num_queued} completions wait, and no more than {self.options.max_queue} may"
            raise ApiError(429, told)
        self.num_open += count
        try:
            yield
        finally:
            self.num_open -= count

    async def outputs(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """What prompts become, with the number of each piece's completion, over all prompts.

        Raises:
            ApiError: As `admitted`.
            ValueError: A prompt cannot be served.
            RequestError: One could not be finished.
        """
        with self.admitted(len(prompts) * params.n):
            requests = [self._counted(prompt, params) for prompt in prompts]
            async with contextlib.aclosing(merged(requests)) as outputs:
                async for index, output in outputs:
                    yield index * params.n + output.index, output

    async def _counted(self, prompt: Sequence[int], params: SamplingParams) -> AsyncGenerator[RequestOutput]:
        start, first, num_generated = time.perf_counter(), None, 0
        async with contextlib.aclosing(self.engine.generate(prompt, params)) as outputs:
            async for output in outputs:
                num_generated += len(output.new_token_ids)
                if first is None:
                    first = time.perf_counter()
                    self.counts.began(len(prompt))
                if output.finish_reason is not None:
                    self.counts.finished(output.finish_reason)
                yield output
        end = time.perf_counter()
        self.counts.served(params, len(prompt), num_generated)
        self.counts.took(end - start, end - (first or end))


def texts_of(service: Service, body: GenerationBody) -> TokenTexts:
    """What tokens are called in a request's answer."""
    return service.token_texts.as_ids() if body.return_tokens_as_token_ids else service.token_texts


async def merged[T](streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """What several streams bring, as it comes, with the number of its stream; the first error ends all."""
    if len(streams) == 1:  # mostly, and for a third less time a token
        async with contextlib.aclosing(streams[0]) as only:
            async for piece in only:
                yield 0, piece
        return
    news: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[T]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for piece in stream:
                    news.put_nowait((index, piece))
            news.put_nowait(None)
        except Exception as error:
            news.put_nowait(error)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            found = await news.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                num_open -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
