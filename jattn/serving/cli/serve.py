"""`jattn serve`: an HTTP server with the OpenAI API."""

import argparse
import functools
import importlib
import pathlib
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any, override

from jattn.models import load
from jattn.models.loading.hub import resolve_checkpoint
from jattn.serving.cli.nodes import add_node_options, runs_on_nodes
from jattn.serving.cli.options import (
    MODEL_HELP,
    add_engine_options,
    import_extra,
    make_engine,
    option_name,
)
from jattn.serving.cli.parser import OneLineParser

# Fields of ServerOptions that have an option of the same name.
SERVER_OPTIONS = ("host", "port", "max_queue", "drain_seconds", "tool_call_parser", "reasoning_parser")


class _ModelAction(argparse.Action):
    """Store the model, which is a positional argument or an option, and reject a second, different one."""

    @override
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        previous = getattr(namespace, self.dest, None)
        if previous not in (None, values):
            parser.error(f"got two models, {previous} and {values}; pass one of them")
        setattr(namespace, self.dest, values)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.set_defaults(run=serve)
    parser.add_argument(
        "model",
        nargs="?",
        action=_ModelAction,
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help=MODEL_HELP,
    )
    parser.add_argument("--model", action=_ModelAction, metavar="MODEL", help="the same")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file of options, by name without dashes; command-line values win (default: none)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port",
        type=int,
        default=8000,
        metavar="N",
        help="port to listen on; 0 picks a free port (default: %(default)s)",
    )
    parser.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="model name in the API; may be repeated, responses use the first"
        " (default: the name of the folder, or of the model on the Hub)",
    )
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="API key that clients must send; may be repeated (default: no authentication)",
    )
    parser.add_argument(
        "--allowed-origins",
        nargs="+",
        action="extend",
        default=[],
        metavar="URL",
        help="origins allowed by CORS; '*' allows all (default: CORS is disabled)",
    )
    parser.add_argument(
        "--max-queue",
        type=int,
        default=1024,
        metavar="N",
        help="maximum number of waiting completions; more get status 429 (default: %(default)s)",
    )
    parser.add_argument(
        "--drain-seconds",
        type=int,
        default=30,
        metavar="N",
        help="seconds that running requests may take to finish at shutdown (default: %(default)s)",
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help="Jinja chat template (default: the model folder's)"
    )
    parser.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        help="format of tool calls: hermes or llama3_json (default: detected from the chat template)",
    )
    parser.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="format of the model's reasoning, which responses contain as reasoning_content: qwen3,"
        " deepseek_r1 or openai_gptoss (default: reasoning is part of the content)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="random seed of requests that have none (default: another seed in each process)",
    )
    add_engine_options(parser)
    add_node_options(parser)


@runs_on_nodes
def serve(args: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT."""
    server = import_extra("serve", "jattn.serving.server")
    if args.model is None:
        raise ValueError("No model given. Pass MODEL: a folder, or a name on the Hub such as org/name.")
    folder = resolve_checkpoint(args.model, args.revision, has_weights=args.load_format != "dummy")
    is_local = folder == pathlib.Path(args.model)
    default_name = folder.resolve().name if is_local else args.model
    args.model = str(folder)
    options = server.ServerOptions(
        served_model_names=tuple(args.served_model_name or [default_name]),
        folder=folder,
        chat_template=args.chat_template and pathlib.Path(args.chat_template),
        api_keys=tuple(args.api_key),
        allowed_origins=tuple(args.allowed_origins),
        **{name: getattr(args, name) for name in SERVER_OPTIONS},
    )
    load_model = functools.partial(load, progress=sys.stderr.isatty())
    with server.create_server_socket(options) as sock:
        server.serve(functools.partial(make_engine, args, load_model, seed=args.seed), options, sock)
    # The process now waits for running compilations before it exits. Restore the default handler, since a
    # KeyboardInterrupt at this point would abort with a traceback.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def expand_config(argv: Sequence[str]) -> list[str]:
    """Insert the options of a `--config` file into the arguments of `jattn serve`.

    Options that the command line sets, lists included, replace those of the file.

    Raises:
        ValueError: If the file is not a YAML mapping.
        FileNotFoundError: If the file does not exist.
        ImportError: If PyYAML is not installed.
    """
    if not argv or argv[0] != "serve":
        return list(argv)
    config_parser = OneLineParser(prog="jattn serve", add_help=False, allow_abbrev=False)
    config_parser.add_argument("--config")
    parsed, _ = config_parser.parse_known_args(list(argv))
    if parsed.config is None:
        return list(argv)
    values = _read_yaml(pathlib.Path(parsed.config))
    if not isinstance(values, dict):
        raise ValueError(f"{parsed.config} must map option names to values, got {values!r}.")
    serve_parser: argparse.ArgumentParser = OneLineParser(prog="jattn serve")
    add_options(serve_parser)
    on_command_line = {word.partition("=")[0] for word in argv}
    if serve_parser.parse_known_args(argv[1:])[0].model is not None:
        on_command_line.add("--model")
    words = [word for name, value in values.items() for word in _to_arguments(str(name), value)]
    from_file = [word for word in words if word.partition("=")[0] not in on_command_line]
    return [argv[0], *from_file, *argv[1:]]


def _read_yaml(file: pathlib.Path) -> Any:
    """Return the content of a YAML file."""
    yaml = importlib.import_module("yaml")
    try:
        return yaml.safe_load(file.read_text())
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{file} is not valid YAML: {' '.join(str(error).split())}.") from error


def _to_arguments(name: str, value: Any) -> list[str]:
    """Return the command-line arguments that set an option to a value of the YAML file."""
    option = option_name(name)
    if isinstance(value, bool):
        return [option if value else option.replace("--", "--no-", 1)]
    if isinstance(value, list):
        return [f"{option}={element}" for element in value]
    if not isinstance(value, str | int | float):
        raise ValueError(f"config: {name} must be a string, a number, true, false or a list, got {value!r}.")
    return [f"{option}={value}"]
