"""Reading a request's body, within bounds."""

import asyncio
from typing import Any

import pydantic
from starlette.requests import Request

from jattn.serving.server.errors import ApiError
from jattn.serving.server.options import ServerOptions


async def read(request: Request, kind: Any) -> Any:
    """The body as one of the protocol's, or as one of a union of them.

    Raises:
        ApiError: It is too large (413), or did not come in time (408).
        pydantic.ValidationError: It is another thing.
    """
    options: ServerOptions = request.app.state.service.options
    try:
        async with asyncio.timeout(options.body_seconds):
            body = await _bytes(request, options.max_body_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body must come within {options.body_seconds:g} seconds") from None
    return pydantic.TypeAdapter(kind).validate_json(body)


async def _bytes(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes, int(announced))
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes, len(body))
    return bytes(body)


def _too_large(max_bytes: int, got: int) -> ApiError:
    return ApiError(413, f"the body must have at most {max_bytes} bytes, got {got}.")
