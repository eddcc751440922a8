"""An engine shared by asyncio tasks."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable
from typing import Any, Self

from jattn.serving.engine.detokenizer import tokenize_async
from jattn.serving.engine.engine import Engine
from jattn.serving.engine.engine_client import EngineInfo
from jattn.serving.engine.engine_thread import EngineThread
from jattn.serving.engine.input_processor import Prompt
from jattn.serving.engine.mailbox import Mailbox, RequestOutputCollector
from jattn.serving.engine.outputs import RequestOutput
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.stats import EngineStats
from pallas_kernels.checks import require_type


class AsyncEngine:
    """An asyncio interface to an engine, shared by tasks of one or several event loops.

    The engine's steps run in a separate thread, which starts with the first request, so that a slow reader
    does not delay other requests. From then on until AsyncEngine is closed, do not use the engine directly.

        async with AsyncEngine(engine) as async_engine:
            async for output in async_engine.generate("def fib(n):", SamplingParams(max_tokens=64)):
                print(output.new_text, end="")
    """

    def __init__(self, engine: Engine) -> None:
        """Wrap an engine. The thread starts with the first request.

        Raises:
            ValueError: If `engine` is not an Engine.
        """
        require_type("engine", engine, Engine, "jattn.serving.Engine(model)")
        self.engine = engine
        self._thread = EngineThread(engine)
        self._mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}
        self._close = weakref.finalize(self, self._thread.close)  # Also runs at process exit.

    @property
    def info(self) -> EngineInfo:
        """Properties of the engine that do not change while it serves."""
        return EngineInfo.from_engine(self.engine)

    @property
    def stats(self) -> EngineStats:
        """The engine's statistics, also while a step is running."""
        return self.engine.stats

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: int | str | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """Generate completions of a prompt, and yield their new tokens after each step.

        A slow reader receives the tokens of several steps in one output. If the caller stops iterating (a
        cancelled task, `aclose()`), the request is aborted and its blocks are freed before the next step.

        Args:
            prompt: Text or token ids.
            params: Sampling parameters. None: the engine's default_sampling_params.
            request_id: Identifier of the request. None: an unused integer.

        Yields:
            New tokens of a completion. The last output of each completion has a finish_reason.

        Raises:
            ValueError: If the prompt cannot be served, the identifier is in use, or AsyncEngine is closed.
            RequestError: If the request could not be finished because a step failed or AsyncEngine was
                closed.
        """
        params = self.engine.default_sampling_params if params is None else params
        require_type(
            "params", params, SamplingParams, "for a number of tokens: SamplingParams(max_tokens=...)"
        )
        prompt = await self._tokenize_prompt(prompt)
        if params.structured_outputs is not None:  # Compile outside the engine's thread.
            await asyncio.to_thread(self.engine.grammars.mask, params.structured_outputs)
        reader = RequestOutputCollector(params.n, self._mailbox())
        self._thread.add(reader, prompt, params, request_id)
        try:
            while reader.num_unread:
                yield await reader.get()
        finally:
            if reader.num_unread:
                self._thread.drop(reader)

    async def abort(self, request_id: int | str) -> None:
        """Abort a request.

        Its blocks are freed, and its reader receives an output with finish_reason "abort".

        Raises:
            ValueError: If there is no such unfinished request.
        """
        await self.call(lambda engine: self._thread.abort(request_id))

    async def update_weights(self, state: Any) -> None:
        """Replace the model's weights between two steps; see `Engine.update_weights`."""
        await self.call(lambda engine: engine.update_weights(state))

    async def precompile(self, *, progress: bool) -> None:
        """Compile the executables that a first step needs, and the remaining ones in the background."""
        await self.call(lambda engine: engine.precompile(progress=progress, wait=False))

    async def reset_prefix_cache(self) -> None:
        """Discard all cached prefixes, so that later requests reuse none of them."""
        await self.call(lambda engine: engine.scheduler.reset_prefix_cache())

    async def read_stats(self) -> EngineStats:
        """Return `stats`; a coroutine because an engine in another process must be asked for them."""
        return self.stats

    async def call[T](self, function: Callable[[Engine], T]) -> T:
        """Call a function with the engine in the engine's thread between two steps, and return its result.

        Raises:
            ValueError: If AsyncEngine is closed.
            Exception: Any exception raised by the function.
        """
        return await asyncio.wrap_future(self._thread.submit(lambda: function(self.engine)))

    async def aclose(self) -> None:
        """Stop the engine's thread after its current step. Unfinished requests end with a RequestError."""
        await asyncio.to_thread(self._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def _mailbox(self) -> Mailbox:
        """Return the mailbox of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._mailboxes:
            still = {old: box for old, box in self._mailboxes.items() if not old.is_closed()}
            self._mailboxes = still | {loop: Mailbox(loop)}
        return self._mailboxes[loop]

    async def _tokenize_prompt(self, prompt: Prompt) -> Prompt:
        """Tokenize a text prompt in this task, so that the engine's steps do not wait for it."""
        if not isinstance(prompt, str) or not prompt or self.engine.tokenizer is None:
            return prompt  # The engine reports the error.
        try:
            (token_ids,) = await tokenize_async(self.engine.tokenizer, [prompt])
        except TypeError:  # Invalid Unicode: the engine reports the error.
            return prompt
        return token_ids
