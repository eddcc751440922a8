"""An HTTP server with the OpenAI API (extra 'serve')."""

from jattn.serving.server.app import build_app
from jattn.serving.server.http_process import HttpProcess
from jattn.serving.server.launcher import Server, create_server_socket, serve
from jattn.serving.server.options import ServerOptions
from jattn.serving.server.service import Service

__all__ = ["HttpProcess", "Server", "ServerOptions", "Service", "build_app", "create_server_socket", "serve"]
