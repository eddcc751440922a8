"""The application: which path is whose, who may ask, and what becomes of errors."""

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jattn.serving.engine.detokenizer import tokenize_async
from jattn.serving.engine.doctor import version_of
from jattn.serving.server.chat_completions import create_chat_completion
from jattn.serving.server.chat_prompts import chat_tokens
from jattn.serving.server.completions import create_completion
from jattn.serving.server.errors import STOPPED, ApiError, respond
from jattn.serving.server.metrics import exposition
from jattn.serving.server.openapi import openapi
from jattn.serving.server.protocol import DetokenizeBody, TokenizeChatBody, TokenizeCompletionBody, read
from jattn.serving.server.sampling_params import refuse_other
from jattn.serving.server.service import Service

type Handler = Callable[[Request], Coroutine[Any, Any, Response]]

OPEN_TO_ALL = ("/health", "/ping", "/metrics")  # what probes and scrapers ask for; they have no key
STARTED = int(time.time())


class BearerKey:
    """Lets through who has one of the keys."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        """In front of an application."""
        self._app, self._wanted = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http" and scope["path"] not in OPEN_TO_ALL and not self._is_known(scope):
            error = ApiError(401, "a request must have one of the server's API keys (Authorization: Bearer)")
            await error.response({"WWW-Authenticate": "Bearer"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        is_bearer = scheme.lower() == b"bearer"  # in any case, as HTTP has its schemes
        return any([secrets.compare_digest(given, wanted) for wanted in self._wanted]) and is_bearer


def build_app(service: Service, lifespan: Callable[[Starlette], Any] | None = None) -> Starlette:
    """The server's paths over a service.

    Args:
        service: What answers.
        lifespan: What goes before the first request and behind the last, as Starlette has it.
    """
    keys, origins = service.options.api_keys, service.options.allowed_origins
    pages = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    outer = [pages] if origins else []  # a browser asks before it sends, and has no key then
    app = Starlette(
        routes=ROUTES,
        middleware=[*outer, *([Middleware(BearerKey, keys=keys)] if keys else [])],
        exception_handlers={HTTPException: respond, 404: no_such_path, 405: no_such_method},
        lifespan=lifespan,
    )
    app.state.service = service
    return app


def _quiet(handler: Handler) -> Any:
    """A handler whose errors are answers."""

    async def quietly(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)  # as nginx has it; nobody reads it
        except asyncio.CancelledError:  # by the server alone, at its end
            return STOPPED.response()
        except Exception as error:
            return await respond(request, error)

    return quietly


async def no_such_path(request: Request, error: Exception) -> Response:
    """What is asked for is not here."""
    told = f"Invalid URL ({request.method} {request.url.path}). GET /openapi.json lists the paths."
    return ApiError(404, told).response()


async def no_such_method(request: Request, error: Exception) -> Response:
    """What is asked for is here, but to be asked for in another way."""
    headers = (error.headers if isinstance(error, HTTPException) else None) or {}
    told = f"{request.method} is not served at {request.url.path}, which takes {headers.get('Allow')}."
    return ApiError(405, told).response(headers)


async def models(request: Request) -> Response:
    """What is served."""
    service: Service = request.app.state.service
    names = service.options.served_model_names
    return JSONResponse({"object": "list", "data": [_described(service, name) for name in names]})


async def model(request: Request) -> Response:
    """One of the names that are served."""
    service: Service = request.app.state.service
    name = request.path_params["name"]
    service.check_model(name)
    return JSONResponse(_described(service, name))


def _described(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": STARTED,
        "owned_by": "jattn",
        "root": service.model_name,
        "parent": None,
        "max_model_len": service.info.max_model_len,
    }


async def health(request: Request) -> Response:
    """200 once everything is compiled, 503 before."""
    service: Service = request.app.state.service
    if service.is_ready:
        return Response()
    return ApiError(503, "the model is being made ready").response()


async def load(request: Request) -> Response:
    """How many completions are being served, as vLLM tells of requests."""
    service: Service = request.app.state.service
    return JSONResponse({"server_load": service.num_open})


async def reset_prefix_cache(request: Request) -> Response:
    """Has later requests find nothing of earlier ones."""
    service: Service = request.app.state.service
    await service.engine.reset_prefix_cache()
    return Response()


async def version(request: Request) -> Response:
    """Of this package."""
    return JSONResponse({"version": version_of("jattn")})


async def description(request: Request) -> Response:
    """Of all paths."""
    return JSONResponse(openapi())


async def metrics(request: Request) -> Response:
    """For Prometheus."""
    service: Service = request.app.state.service
    stats = await service.engine.read_stats()
    cache = {"block_size": service.info.block_size, "num_gpu_blocks": stats.num_blocks}
    page = exposition(service.model_name, stats, service.counts, service.num_waiting(stats), cache)
    return Response(page, media_type=CONTENT_TYPE_LATEST)


async def tokenize(request: Request) -> Response:
    """The tokens of a text or of a conversation."""
    service: Service = request.app.state.service
    body: TokenizeCompletionBody | TokenizeChatBody = await read(
        request, TokenizeCompletionBody | TokenizeChatBody
    )
    service.check_model(body.model)
    if isinstance(body, TokenizeChatBody):
        refuse_other("chat_template", body.chat_template, ())
        ids = await chat_tokens(service, body)
    else:
        special = body.add_special_tokens
        (ids,) = await tokenize_async(service.tokenizer, [body.prompt], add_special_tokens=special)
    texts = [service.tokenizer.id_to_token(i) for i in ids] if body.return_token_strs else None
    longest = service.info.max_model_len
    told = {"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": texts}
    return JSONResponse(told)


async def detokenize(request: Request) -> Response:
    """The text of tokens."""
    service: Service = request.app.state.service
    body: DetokenizeBody = await read(request, DetokenizeBody)
    service.check_model(body.model)
    return JSONResponse({"prompt": service.text_of("tokens", body.tokens)})


def _post(path: str, handler: Handler) -> Route:
    return Route(path, _quiet(handler), methods=["POST"])


ROUTES = [
    _post("/v1/completions", create_completion),
    _post("/v1/chat/completions", create_chat_completion),
    _post("/tokenize", tokenize),
    _post("/detokenize", detokenize),
    Route("/v1/models", _quiet(models)),
    Route("/v1/models/", _quiet(models)),
    Route("/v1/models/{name:path}", _quiet(model)),
    Route("/health", health),
    Route("/ping", health, methods=["GET", "POST"]),
    Route("/load", load),
    _post("/reset_prefix_cache", reset_prefix_cache),
    Route("/version", version),
    Route("/openapi.json", description),
    Route("/metrics", metrics),
]
