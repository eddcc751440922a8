"""What a server is told."""

import dataclasses
import pathlib

from jattn.serving.server.tool_call_formats import call_format
from pallas_kernels.checks import require, require_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Everything but the engine.

    Attributes:
        served_model_names: What clients may call the model; the first is what answers call it.
        folder: Of the checkpoint: its chat template; None = it has none.
        chat_template: A file in the place of the folder's template.
        tool_call_parser: How the model writes calls of tools, by vLLM's names; None = as its chat template
            asks it to.
        host: Where to listen.
        port: Likewise; 0 = one that is free.
        api_keys: Bearer keys, one of which a client must have; none = anybody may ask.
        allowed_origins: Of pages whose browsers may ask ("https://example.org"); "*" = all of them.
        max_queue: Completions that may wait, besides those that a step can hold; more are turned away (429).
        max_body_bytes: Of a request.
        body_seconds: Within which a request's head must have come, and then its body.
        stall_seconds: Within which a client must take what it is sent of a stream; else it is dropped.
        drain_seconds: How long requests may go on when the server is told to stop.
    """

    served_model_names: tuple[str, ...] = ("model",)
    folder: pathlib.Path | None = None
    chat_template: pathlib.Path | None = None
    tool_call_parser: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_queue: int = 1024
    max_body_bytes: int = 8 * 2**20
    body_seconds: float = 60.0
    stall_seconds: float = 60.0
    drain_seconds: int = 30

    def __post_init__(self) -> None:
        require(len(self.served_model_names) > 0, "served_model_names", "have one name", ())
        require(
            all(self.served_model_names), "served_model_names", "hold no empty name", self.served_model_names
        )
        require(0 <= self.port < 2**16, "port", "be in [0, 65536)", self.port)
        require(all(self.api_keys), "api_keys", "hold no empty key", repr(self.api_keys))
        call_format(self.tool_call_parser, None)
        template = self.chat_template
        require(template is None or template.is_file(), "chat_template", "be a file", template)
        require_positive(max_body_bytes=self.max_body_bytes)
        require_positive(body_seconds=self.body_seconds, stall_seconds=self.stall_seconds)
        for name in ("max_queue", "drain_seconds"):
            require(getattr(self, name) >= 0, name, "be at least 0", getattr(self, name))
