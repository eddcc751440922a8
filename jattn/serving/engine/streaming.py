"""Requests' new tokens as they come."""

from collections.abc import Generator

from jattn.serving.engine.engine_core import EngineCore
from jattn.serving.engine.outputs import RequestError, StreamedToken
from jattn.serving.engine.prompts import Request


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
