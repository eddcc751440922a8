"""`GET /openapi.json`: what the server's paths take, for whoever makes a client or tests one."""

from typing import Any

from pydantic.json_schema import models_json_schema

from jattn.serving.engine.doctor import version_of
from jattn.serving.server.protocol import (
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeChatBody,
    TokenizeCompletionBody,
)

BODIES: dict[str, tuple[Any, ...]] = {
    "/v1/completions": (CompletionBody,),
    "/v1/chat/completions": (ChatCompletionBody,),
    "/tokenize": (TokenizeCompletionBody, TokenizeChatBody),
    "/detokenize": (DetokenizeBody,),
}
BARE = ("/reset_prefix_cache",)
READ = ("/v1/models", "/version", "/health", "/ping", "/load", "/metrics")
SCHEMAS = "#/components/schemas/"


def openapi() -> dict[str, Any]:
    """The description, as OpenAPI 3.1 has it."""
    bodies = [body for some in BODIES.values() for body in some]
    _, shared = models_json_schema(
        [(body, "validation") for body in bodies], ref_template=SCHEMAS + "{model}"
    )
    own = {"version": version_of("jattn"), "title": "jattn serve"}
    paths = {path: {"post": _operation(path, some)} for path, some in BODIES.items()}
    paths |= {path: {"post": _operation(path, ())} for path in BARE}
    paths |= {path: {"get": _operation(path, ())} for path in READ}
    return {"openapi": "3.1.0", "info": own, "paths": paths, "components": {"schemas": shared["$defs"]}}


def _operation(path: str, bodies: tuple[Any, ...]) -> dict[str, Any]:
    answers = {"200": {"description": "as the OpenAI API has it, or text"}}
    answers["default"] = {"description": "an error, as the OpenAI API has it"}
    operation: dict[str, Any] = {"operationId": path.strip("/").replace("/", "_"), "responses": answers}
    if bodies:
        schemas = [{"$ref": SCHEMAS + body.__name__} for body in bodies]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation
