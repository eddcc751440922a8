"""Errors as OpenAI's clients read them: one shape, the right status, never a traceback."""

import logging
import re
from collections.abc import Mapping
from typing import Any

import jinja2
import pydantic
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jattn.serving.engine.outputs import RequestError

LOG = logging.getLogger("jattn.server")
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded", 503: "not_ready"}
OURS = {"prompts": "prompt"}  # what the engine calls it -> what the request does
RETRY_SECONDS = "1"


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: Of HTTP.
        message: For a person.
        param: The parameter that is to blame; None = none is.
        code: For a program.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code = CODES.get(status) if code is None else code

    def body(self) -> dict[str, Any]:
        """As JSON, in OpenAI's shape."""
        kind = TYPES.get(self.status, "internal_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """As an answer; one that says "later" says when."""
        extra = {"Retry-After": RETRY_SECONDS} if self.status in (429, 503) else {}
        return JSONResponse(self.body(), self.status, headers=extra | dict(headers or {}))


# What requests are told that the server, which was told to stop, waits for no more.
STOPPED = ApiError(503, "the server stopped before the request was finished", code="stopped")


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of whatever went wrong; what it cannot help is logged here and named there."""
    match error:
        case ApiError():
            return error
        case HTTPException():
            return ApiError(error.status_code, error.detail)
        case pydantic.ValidationError():
            return _of_validation(error)
        case jinja2.TemplateError():
            return ApiError(400, f"messages do not fit the chat template: {error}", "messages")
        case ValueError():
            return ApiError(400, str(error), _blamed(str(error)))
        case NotImplementedError():
            return ApiError(422, str(error), _blamed(str(error)), "unsupported")
    LOG.error("a request failed", exc_info=error)
    told = str(error) if isinstance(error, RequestError) else "internal error"
    return ApiError(500, told, code="internal_error")


async def respond(request: Request, error: Exception) -> Response:
    """The handler of all exceptions."""
    return as_api_error(error).response(getattr(error, "headers", None))


def _of_validation(error: pydantic.ValidationError) -> ApiError:
    """The first thing that is wrong; of a union's members the one that came furthest."""
    first = max(error.errors(include_url=False, include_context=False), key=lambda one: len(one["loc"]))
    is_unknown, loc = first["type"] == "extra_forbidden", [str(part) for part in first["loc"]]
    own = [loc.pop()] if is_unknown else []  # the client's word, whatever it looks like
    # Names of parameters and places in lists; pydantic has the types that it tried in between.
    path = [part for part in loc if re.fullmatch(r"[a-z_]+|\d+", part)]
    path = [part for part in path if part not in ("str", "int", "float", "bool")] + own
    param = path[0] if path else None
    if is_unknown:
        return ApiError(400, f"Unrecognized request argument supplied: {'.'.join(path)}", param)
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body must be JSON: {first['msg']}")
    return ApiError(400, f"{'.'.join(path) or 'the body'}: {first['msg']}", param)


def _blamed(message: str) -> str | None:
    """The parameter that one of our errors names: they begin with it."""
    found = re.match(r"([a-z]\w*)[\w.\[\]]* (?:must|is|has) |(\w+): ", message)
    name = (found[1] or found[2]) if found else None
    return OURS.get(name, name) if name else None
