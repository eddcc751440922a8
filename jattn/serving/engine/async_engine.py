"""An engine that many tasks share."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable
from typing import Any, Self

from jattn.serving.engine.detokenizer import encoded
from jattn.serving.engine.engine import Engine
from jattn.serving.engine.engine_client import EngineInfo
from jattn.serving.engine.engine_thread import EngineThread
from jattn.serving.engine.input_processor import Prompt
from jattn.serving.engine.mailbox import Mailbox, Reader
from jattn.serving.engine.outputs import RequestOutput
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.stats import EngineStats
from pallas_kernels.checks import require_type


class AsyncEngine:
    """Serves requests of many tasks, of several event loops if need be, over one engine.

    The engine's steps run in a thread of their own, which starts with the first request, so that no reader
    holds up another. From then on until it is closed, nobody else may use the engine.

        async with AsyncEngine(engine) as async_engine:
            async for output in async_engine.generate("def fib(n):", SamplingParams(max_tokens=64)):
                print(output.new_text, end="")
    """

    def __init__(self, engine: Engine) -> None:
        """Starts nothing yet.

        Raises:
            ValueError: It is no Engine.
        """
        require_type("engine", engine, Engine, "jattn.serving.Engine(model)")
        self.engine = engine
        self._thread = EngineThread(engine)
        self._mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}
        self._close = weakref.finalize(self, self._thread.close)  # as the process ends, at the latest

    @property
    def info(self) -> EngineInfo:
        """What does not change while it serves."""
        return EngineInfo.of(self.engine)

    @property
    def stats(self) -> EngineStats:
        """The engine's, between two of its steps or within one."""
        return self.engine.stats

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: int | str | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """Completes a prompt, and yields what each step brings it; who reads late gets several at once.

        Whoever stops reading (a task that is cancelled, `aclose()`) drops the request: its blocks are free
        before the next step.

        Args:
            prompt: Text or token ids.
            params: How its tokens are picked, and where it ends; None = the engine's default_sampling_params.
            request_id: What to call it; None = a number that is free.

        Yields:
            What is new of a completion. The last one of each has a finish_reason.

        Raises:
            ValueError: The prompt cannot be served, the name is taken, or the engine is closed.
            RequestError: It could not be finished: a step failed, or the engine was closed.
        """
        params = self.engine.default_sampling_params if params is None else params
        require_type("params", params, SamplingParams, "how many tokens is its max_tokens")
        prompt = await self._tokens_of(prompt)
        if params.structured_outputs is not None:  # compiled here, not where steps wait for it
            await asyncio.to_thread(self.engine.grammars.mask, params.structured_outputs)
        reader = Reader(params.n, self._mailbox())
        self._thread.add(reader, prompt, params, request_id)
        try:
            while reader.num_unread:
                yield await reader.get()
        finally:
            if reader.num_unread:
                self._thread.drop(reader)

    async def abort(self, request_id: int | str) -> None:
        """Ends a request: its blocks are free, and its reader gets an output whose finish_reason is "abort".

        Raises:
            ValueError: There is no such request, or it has ended.
        """
        await self.call(lambda engine: self._thread.abort(request_id))

    async def update_weights(self, state: Any) -> None:
        """As `Engine.update_weights`, between two steps."""
        await self.call(lambda engine: engine.update_weights(state))

    async def precompile(self, *, progress: bool) -> None:
        """As `Engine.precompile`, which does not wait for what a first step can do without."""
        await self.call(lambda engine: engine.precompile(progress=progress, wait=False))

    async def reset_prefix_cache(self) -> None:
        """Has later requests find nothing of earlier ones, whose blocks are free for others."""
        await self.call(lambda engine: engine.scheduler.forget_prefixes())

    async def read_stats(self) -> EngineStats:
        """As `stats`: what an engine in another process has to be asked for."""
        return self.stats

    async def call[T](self, function: Callable[[Engine], T]) -> T:
        """What a function of the engine returns, run in its thread between two steps.

        Raises:
            ValueError: The engine is closed.
            Exception: Whatever the function raises.
        """
        return await asyncio.wrap_future(self._thread.submit(lambda: function(self.engine)))

    async def aclose(self) -> None:
        """Ends the thread behind the step that it is in; open requests end with a RequestError."""
        await asyncio.to_thread(self._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def _mailbox(self) -> Mailbox:
        """That of the loop that runs this, which its readers share."""
        loop = asyncio.get_running_loop()
        if loop not in self._mailboxes:
            still = {old: box for old, box in self._mailboxes.items() if not old.is_closed()}
            self._mailboxes = still | {loop: Mailbox(loop)}
        return self._mailboxes[loop]

    async def _tokens_of(self, prompt: Prompt) -> Prompt:
        """The prompt's tokens: made here, not where steps wait for them."""
        if not isinstance(prompt, str) or not prompt or self.engine.tokenizer is None:
            return prompt  # as it is in an error's words
        try:
            (token_ids,) = await encoded(self.engine.tokenizer, [prompt])
        except TypeError:  # it has halves of characters, as the engine says in more words
            return prompt
        return token_ids
