"""Configuration of the HTTP server."""

import dataclasses
import pathlib

from jattn.serving.server.reasoning import check_reasoning_parser
from jattn.serving.server.tool_call_formats import find_tool_call_format


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Configuration of the HTTP server, without the engine's options.

    Attributes:
        served_model_names: Model names that clients may use. Responses contain the first one.
        folder: Folder of the checkpoint, which may contain a chat template; None for no folder.
        chat_template: Jinja file that replaces the folder's chat template.
        tool_call_parser: Name of the model's tool-call format, as in vLLM; None detects the format from the
            chat template.
        reasoning_parser: Name of the model's reasoning parser, as in vLLM; None does not separate reasoning.
        host: Address to listen on.
        port: Port to listen on; 0 picks a free port.
        api_keys: Accepted bearer keys; () disables authentication.
        allowed_origins: Origins allowed by CORS, such as "https://example.org"; "*" allows all.
        max_queue: Maximum number of completions that wait, in addition to those that fit into a step.
            Further requests get status 429.
        max_body_bytes: Maximum size of a request body, in bytes.
        stall_seconds: Time limit for a client to accept each event of a stream, in seconds; then the stream
            is closed.
        drain_seconds: Time that running requests may take to finish at shutdown, in seconds.
    """

    served_model_names: tuple[str, ...] = ("model",)
    folder: pathlib.Path | None = None
    chat_template: pathlib.Path | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_queue: int = 1024
    max_body_bytes: int = 8 * 2**20
    stall_seconds: float = 60.0
    drain_seconds: int = 30

    def __post_init__(self) -> None:
        if not self.served_model_names:
            raise ValueError("served_model_names must contain at least one name.")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port must be in [0, 65535], got {self.port}.")
        if not all(self.api_keys):
            raise ValueError("api_keys must not contain an empty key.")
        find_tool_call_format(self.tool_call_parser, None)
        check_reasoning_parser(self.reasoning_parser)
        if self.chat_template is not None and not self.chat_template.is_file():
            raise ValueError(
                f"chat_template {self.chat_template} is not a file. Pass the path of a Jinja file."
            )
