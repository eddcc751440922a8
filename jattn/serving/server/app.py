"""The ASGI application: routes, authentication, error handling and the small endpoints."""

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
from jattn.serving.server.chat_completions import create_chat_completion
from jattn.serving.server.chat_prompts import encode_chat
from jattn.serving.server.completions import create_completion
from jattn.serving.server.errors import SHUTDOWN_ERROR, ApiError, handle_exception
from jattn.serving.server.metrics import render_metrics
from jattn.serving.server.openapi import openapi
from jattn.serving.server.protocol import (
    DetokenizeBody,
    TokenizeChatBody,
    TokenizeCompletionBody,
    read_body,
)
from jattn.serving.server.responses import openai_response
from jattn.serving.server.sampling_params import check_unsupported
from jattn.serving.server.service import Service
from jattn.version import version_of

type Handler = Callable[[Request], Coroutine[Any, Any, Response]]

PUBLIC_PATHS = ("/health", "/ping", "/metrics")  # Probes and scrapers have no API key.
STARTED = int(time.time())


class BearerAuthentication:
    """ASGI middleware that requires one of the API keys, except for PUBLIC_PATHS."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        """Wrap an application.

        Args:
            app: The application.
            keys: Accepted API keys.
        """
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an authorized request to the application; respond to others with status 401."""
        if scope["type"] == "http" and scope["path"] not in PUBLIC_PATHS and not self._is_authorized(scope):
            error = ApiError(401, "Invalid API key. Send one as the header 'Authorization: Bearer KEY'.")
            await error.response({"WWW-Authenticate": "Bearer"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_authorized(self, scope: Scope) -> bool:
        scheme, _, credentials = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        is_bearer = scheme.lower() == b"bearer"  # HTTP's authentication schemes are case-insensitive.
        # Compare with every key, so that the time does not depend on which one matches.
        return any([secrets.compare_digest(credentials, key) for key in self._keys]) and is_bearer


def build_app(service: Service, lifespan: Callable[[Starlette], Any] | None = None) -> Starlette:
    """Return the ASGI application of a service.

    Args:
        service: State that the request handlers share.
        lifespan: Starlette's lifespan context manager, or None.
    """
    keys, origins = service.options.api_keys, service.options.allowed_origins
    cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    # CORS precedes authentication: a browser's preflight request has no API key.
    middleware = [cors] if origins else []
    if keys:
        middleware.append(Middleware(BearerAuthentication, keys=keys))
    app = Starlette(
        routes=ROUTES,
        middleware=middleware,
        exception_handlers={
            HTTPException: handle_exception,
            404: handle_not_found,
            405: handle_method_not_allowed,
        },
        lifespan=lifespan,
    )
    app.state.service = service
    return app


def _with_error_responses(handler: Handler) -> Any:
    """Wrap a handler so that its exceptions become error responses."""

    async def safe_handler(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)  # nginx's status for this case; the client never receives it.
        except asyncio.CancelledError:  # Only the server cancels, at shutdown.
            return SHUTDOWN_ERROR.response()
        except Exception as error:
            return await handle_exception(request, error)

    return safe_handler


async def handle_not_found(request: Request, error: Exception) -> Response:
    """Respond to an unknown path."""
    message = f"Invalid URL ({request.method} {request.url.path}). GET /openapi.json lists the endpoints."
    return ApiError(404, message).response()


async def handle_method_not_allowed(request: Request, error: Exception) -> Response:
    """Respond to a method that the path does not support."""
    headers = (error.headers if isinstance(error, HTTPException) else None) or {}
    message = f"{request.method} is not allowed for {request.url.path}. Use {headers.get('Allow')}."
    return ApiError(405, message).response(headers)


async def list_models(request: Request) -> Response:
    """List the served models."""
    service: Service = request.app.state.service
    names = service.options.served_model_names
    return JSONResponse({"object": "list", "data": [_model_card(service, name) for name in names]})


async def get_model(request: Request) -> Response:
    """Describe one served model."""
    service: Service = request.app.state.service
    name = request.path_params["name"]
    service.check_model(name)
    return openai_response("Model", _model_card(service, name))


def _model_card(service: Service, name: str) -> dict[str, Any]:
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
    """Respond with 200 once the server accepts requests, and with 503 before."""
    service: Service = request.app.state.service
    if service.is_ready:
        return Response()
    return ApiError(503, "The model is not ready yet.").response()


async def server_load(request: Request) -> Response:
    """Return the number of open completions, in vLLM's format."""
    service: Service = request.app.state.service
    return JSONResponse({"server_load": service.num_open})


async def reset_prefix_cache(request: Request) -> Response:
    """Empty the prefix cache."""
    service: Service = request.app.state.service
    await service.engine.reset_prefix_cache()
    return Response()


async def version(request: Request) -> Response:
    """Return the version of jattn."""
    return JSONResponse({"version": version_of("jattn")})


async def describe_api(request: Request) -> Response:
    """Return the OpenAPI description."""
    return JSONResponse(openapi())


async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' format."""
    service: Service = request.app.state.service
    stats = await service.engine.read_stats()
    cache_config = {"block_size": service.info.block_size, "num_gpu_blocks": stats.num_blocks}
    page = render_metrics(
        service.model_name, stats, service.metrics, service.num_waiting(stats), cache_config
    )
    return Response(page, media_type=CONTENT_TYPE_LATEST)


async def tokenize(request: Request) -> Response:
    """Return the tokens of a text or a conversation, as vLLM's endpoint does."""
    service: Service = request.app.state.service
    body: TokenizeCompletionBody | TokenizeChatBody = await read_body(
        request, TokenizeCompletionBody | TokenizeChatBody
    )
    service.check_model(body.model)
    if isinstance(body, TokenizeChatBody):
        check_unsupported("chat_template", body.chat_template, ())
        ids = await encode_chat(service, body)
    else:
        add_special_tokens = body.add_special_tokens
        (ids,) = await tokenize_async(service.tokenizer, [body.prompt], add_special_tokens=add_special_tokens)
    token_strs = [service.tokenizer.id_to_token(i) for i in ids] if body.return_token_strs else None
    return JSONResponse(
        {
            "count": len(ids),
            "max_model_len": service.info.max_model_len,
            "tokens": ids,
            "token_strs": token_strs,
        }
    )


async def detokenize(request: Request) -> Response:
    """Return the text of tokens, as vLLM's endpoint does."""
    service: Service = request.app.state.service
    body: DetokenizeBody = await read_body(request, DetokenizeBody)
    service.check_model(body.model)
    return JSONResponse({"prompt": service.decode_tokens("tokens", body.tokens)})


def _post(path: str, handler: Handler) -> Route:
    return Route(path, _with_error_responses(handler), methods=["POST"])


ROUTES = [
    _post("/v1/completions", create_completion),
    _post("/v1/chat/completions", create_chat_completion),
    _post("/tokenize", tokenize),
    _post("/detokenize", detokenize),
    Route("/v1/models", _with_error_responses(list_models)),
    Route("/v1/models/", _with_error_responses(list_models)),
    Route("/v1/models/{name:path}", _with_error_responses(get_model)),
    Route("/health", health),
    Route("/ping", health, methods=["GET", "POST"]),
    Route("/load", server_load),
    _post("/reset_prefix_cache", reset_prefix_cache),
    Route("/version", version),
    Route("/openapi.json", describe_api),
    Route("/metrics", metrics),
]
