"""Error responses in OpenAI's format."""

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
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
ERROR_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded", 503: "not_ready"}
REQUEST_NAMES = {"prompts": "prompt"}  # The engine's name of an argument -> the request's.
RETRY_SECONDS = "1"


class ApiError(Exception):
    """An error response.

    Attributes:
        status: HTTP status code.
        message: Description of the error.
        param: Request parameter that caused the error, or None.
        code: Machine-readable error code, or None.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.code = ERROR_CODES.get(status) if code is None else code

    def body(self) -> dict[str, Any]:
        """Return the response body in OpenAI's format."""
        error_type = ERROR_TYPES.get(self.status, "internal_error")
        return {
            "error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}
        }

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """Return the HTTP response, with a Retry-After header for statuses 429 and 503."""
        extra = {"Retry-After": RETRY_SECONDS} if self.status in (429, 503) else {}
        return JSONResponse(self.body(), self.status, headers=extra | dict(headers or {}))


# Response to requests that are unfinished when the server shuts down.
SHUTDOWN_ERROR = ApiError(503, "The server shut down before the request was finished.", code="stopped")


def to_api_error(error: Exception) -> ApiError:
    """Convert any exception to an error response; log it if the client is not the cause."""
    match error:
        case ApiError():
            return error
        case HTTPException():
            return ApiError(error.status_code, error.detail)
        case pydantic.ValidationError():
            return _from_validation_error(error)
        case jinja2.TemplateError():
            return ApiError(400, f"The chat template rejected the messages: {error}", "messages")
        case ValueError():
            return ApiError(400, str(error), _find_param(str(error)))
        case NotImplementedError():
            return ApiError(422, str(error), _find_param(str(error)), "unsupported")
    LOG.error("Request failed", exc_info=error)
    message = str(error) if isinstance(error, RequestError) else "Internal server error"
    return ApiError(500, message, code="internal_error")


async def handle_exception(request: Request, error: Exception) -> Response:
    """Return the error response of an exception (Starlette exception handler)."""
    return to_api_error(error).response(getattr(error, "headers", None))


def _from_validation_error(error: pydantic.ValidationError) -> ApiError:
    """Convert the first validation error. Of a union's members, report the one that was parsed furthest."""
    first = max(error.errors(include_url=False, include_context=False), key=lambda detail: len(detail["loc"]))
    is_unknown, loc = first["type"] == "extra_forbidden", [str(part) for part in first["loc"]]
    unknown_name = [loc.pop()] if is_unknown else []
    # Keep parameter names and list indices; drop the names of the types that pydantic tried.
    path = [part for part in loc if re.fullmatch(r"[a-z_]+|\d+", part)]
    path = [part for part in path if part not in ("str", "int", "float", "bool")] + unknown_name
    param = path[0] if path else None
    if is_unknown:
        return ApiError(400, f"Unrecognized request argument supplied: {'.'.join(path)}", param)
    if first["type"] == "json_invalid":
        return ApiError(400, f"The request body is not valid JSON: {first['msg']}")
    return ApiError(400, f"{'.'.join(path) or 'The request body'}: {first['msg']}", param)


# jattn's error messages begin with the name of the argument.
NAMED_ARGUMENT = re.compile(
    r"([a-z_]+)[\w.\[\]]*"
    r"(?: (?:must|and its|cannot|contains|contradicts|exceeds|has|have|is|needs|names|requires)\b|: |=)"
)


def _find_param(message: str) -> str | None:
    """Return the request parameter that an error message names, or None."""
    match = NAMED_ARGUMENT.match(message)
    return REQUEST_NAMES.get(match[1], match[1]) if match else None
