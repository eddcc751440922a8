"""`jattn serve`: a server with OpenAI's API."""

import argparse
import functools
import importlib
import pathlib
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from jattn.models import load
from jattn.serving.cli.nodes import add_node_options
from jattn.serving.cli.options import OneLineParser, add_engine_options, make_engine
from pallas_kernels.checks import require

OPTIONS = (
    "host",
    "port",
    "max_queue",
    "drain_seconds",
    "tool_call_parser",
)  # of ServerOptions, under the same names


def add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The command's options."""
    parser = commands.add_parser("serve", help="a server with OpenAI's API (the extra jattn[serve])")
    parser.set_defaults(run=serve)
    parser.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face folder")
    parser.add_argument("--config", metavar="FILE", help="YAML: options by their names; words here go first")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen [127.0.0.1]")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="likewise; 0 = a free one [8000]")
    parser.add_argument(
        "--served-model-name", action="append", metavar="NAME", help="may be repeated [the folder's]"
    )
    parser.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="may be repeated [none]"
    )
    parser.add_argument(
        "--allowed-origins",
        nargs="+",
        action="extend",
        default=[],
        metavar="URL",
        help="of pages that may ask; '*' = all",
    )
    parser.add_argument(
        "--max-queue", type=int, default=1024, metavar="N", help="completions that may wait [1024]"
    )
    parser.add_argument(
        "--drain-seconds", type=int, default=30, metavar="N", help="to finish in, once told to stop [30]"
    )
    parser.add_argument("--chat-template", metavar="FILE", help="in the place of the checkpoint's")
    parser.add_argument(
        "--tool-call-parser", metavar="NAME", help="hermes or llama3_json [what the chat template asks for]"
    )
    add_engine_options(parser)
    add_node_options(parser)


def serve(args: argparse.Namespace) -> None:
    """Serves until it is told to stop."""
    server: Any = _server()
    folder = pathlib.Path(args.model)
    options = server.ServerOptions(
        served_model_names=tuple(args.served_model_name or [folder.resolve().name]),
        folder=folder,
        chat_template=args.chat_template and pathlib.Path(args.chat_template),
        api_keys=tuple(args.api_key),
        allowed_origins=tuple(args.allowed_origins),
        **{name: getattr(args, name) for name in OPTIONS},
    )
    loading = functools.partial(load, progress=sys.stderr.isatty())
    with server.listening(options) as sock:
        server.serve(functools.partial(make_engine, args, loading), options, sock)
    # What follows is the end of the process, which waits for what compiles: an exception would abort it.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _server() -> Any:
    try:
        return importlib.import_module("jattn.serving.server")
    except ModuleNotFoundError as error:
        told = f"jattn serve needs {error.name}, of the extra 'serve': pip install '.[serve]' in a checkout"
        raise ImportError(told) from error


def with_config(argv: Sequence[str]) -> list[str]:
    """The words of a command, behind those of its --config file that it does not say itself.

    Raises:
        ValueError: The file holds other things than options.
        FileNotFoundError: There is no such file.
        ImportError: There is no YAML to read it with.
    """
    if not argv or argv[0] != "serve":
        return list(argv)
    finder = OneLineParser(prog="jattn serve", add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    found, _ = finder.parse_known_args(list(argv))
    if found.config is None:
        return list(argv)
    values = _read(pathlib.Path(found.config))
    require(isinstance(values, dict), "config", "hold options by their names", repr(values))
    known: argparse.ArgumentParser = OneLineParser(prog="jattn")
    add_serve(known.add_subparsers())
    untold = vars(known.parse_args(["serve", "--model="]))
    # A switch that is off where nobody turns it on has no --no- to be told so by.
    told = {
        name: value
        for name, value in values.items()
        if not (value is False and untold.get(str(name).replace("-", "_")) is False)
    }
    words = [word for name, value in told.items() for word in _words(str(name), value)]
    _, unknown = known.parse_known_args(["serve", "--model=", *words])
    unknown += [word for word in words if word.startswith("--config=")]
    require(not unknown, "config", "hold options of jattn serve", unknown)
    typed = {word.partition("=")[0] for word in argv}  # lists, too, take the place of the file's
    kept = [word for word in words if word.partition("=")[0] not in typed]
    return [argv[0], *kept, *argv[1:]]


def _read(file: pathlib.Path) -> Any:
    """What a YAML file holds."""
    yaml = importlib.import_module("yaml")
    try:
        return yaml.safe_load(file.read_text())
    except UnicodeDecodeError as error:
        told = str(error)
    except yaml.MarkedYAMLError as error:
        told = f"{error.problem}, in line {error.problem_mark.line + 1}"
    except yaml.YAMLError as error:
        told = " ".join(str(error).split())
    require(False, "config", "be YAML", told)


def _words(name: str, value: Any) -> list[str]:
    """An option as one types it."""
    option = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [option if value else option.replace("--", "--no-", 1)]
    if isinstance(value, list):
        return [f"{option}={one}" for one in value]
    require(isinstance(value, str | int | float), f"config: {name}", "be a value or a list", repr(value))
    return [f"{option}={value}"]
