"""The form that a request wants its text to have: the ways to say it that clients know."""

from typing import Any

from jattn.serving.engine.structured_outputs import StructuredOutputsParams
from jattn.serving.server.errors import ApiError
from jattn.serving.server.protocol import GenerationBody, ResponseFormat
from pallas_kernels.checks import require

GUIDED = ("json", "regex", "choice", "grammar")  # vLLM's guided_ parameters


type Form = tuple[str, StructuredOutputsParams]  # which parameter wants a form, and which form


def wanted_form(body: GenerationBody, of_tools: Form | None = None) -> Form | None:
    """Which parameter wants a form, and which form; None = none does.

    Args:
        body: The request.
        of_tools: The form that its tools want.

    Raises:
        ValueError: Several do, or one wants no form, or several.
    """
    found: dict[str, dict[str, Any]] = {
        f"guided_{name}": {name: value}
        for name in GUIDED
        if (value := getattr(body, f"guided_{name}")) is not None
    }
    if body.structured_outputs is not None:
        told = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
        found["structured_outputs"] = told
    if body.response_format is not None and body.response_format.type != "text":
        found["response_format"] = _of_response_format(body.response_format)
    names = [*found, *([of_tools[0]] if of_tools else [])]
    if not names:
        return None
    name, *others = names
    require(not others, name, "be the only one of its kind", names)
    if of_tools:
        return of_tools
    try:
        return name, StructuredOutputsParams(**found[name])
    except ValueError as error:
        raise ApiError(400, str(error), name) from error


def _of_response_format(told: ResponseFormat) -> dict[str, Any]:
    if told.type == "json_object":
        return {"json_object": True}
    has_one = told.json_schema is not None
    require(has_one, "response_format", 'have a json_schema with type "json_schema"', None)
    assert told.json_schema is not None
    return {"json": told.json_schema.schema_}
