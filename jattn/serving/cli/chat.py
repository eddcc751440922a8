"""`jattn chat`: a conversation on the terminal, with a model of a folder or of a server."""

import argparse
import asyncio
import dataclasses
import functools
import importlib
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from jattn.models import load
from jattn.serving.cli.nodes import add_node_options
from jattn.serving.cli.openai_client import address, events
from jattn.serving.cli.options import (
    add_engine_options,
    add_sampling_options,
    make_engine,
    requested_implementations,
    require_silence,
)
from jattn.serving.engine.detokenizer import tokenize
from jattn.serving.engine.sampling_params import SamplingParams
from pallas_kernels.checks import require

type Message = dict[str, str]
type Speaker = Callable[[list[Message]], Iterator[str]]


def add_chat(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The command's options."""
    parser = commands.add_parser("chat", help="talk with a model (the extra jattn[serve])")
    parser.set_defaults(run=chat)
    parser.add_argument("--model", metavar="DIR", help="a Hugging Face folder; with --url a served name")
    its_own = "of a server with OpenAI's API, in the place of a folder; what is not said is as it has it"
    parser.add_argument("--url", help=its_own)
    parser.add_argument("--api-key", metavar="KEY", help="of that server")
    _add_template(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of an answer [to the context's end]")
    add_sampling_options(parser)
    add_engine_options(parser)
    add_node_options(parser)


def _add_template(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chat-template", metavar="FILE", help="in the place of the folder's")


def chat(args: argparse.Namespace) -> None:
    """Answers line by line, until the input ends. Ctrl-C ends an answer; at the prompt, the conversation."""
    require(args.url is not None or args.model is not None, "model", "be a folder, or url a server", None)
    if args.url is None:
        require(args.api_key is None, "api_key", "be left out without a server (--url)", "one")
    else:
        of_folders = [_add_template, add_engine_options, add_node_options]
        require_silence(args, of_folders, "be left out with url: it is the server's")
    speak = _of_folder(args) if args.url is None else _of_server(args)
    messages: list[Message] = [{"role": "system", "content": args.system}] if args.system else []
    while (said := _next_line()) is not None:
        messages.append({"role": "user", "content": said})
        answer = ""
        try:
            for text in speak(messages):
                answer += text
                print(text, end="", flush=True)
        except KeyboardInterrupt:
            pass
        print(flush=True)
        messages.append({"role": "assistant", "content": answer})


def _next_line() -> str | None:
    """What is said next; None at the end. A prompt is shown to people alone."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None


def _of_folder(args: argparse.Namespace) -> Speaker:
    templates: Any = importlib.import_module("jattn.serving.server.chat_template")
    folder, file = pathlib.Path(args.model), args.chat_template and pathlib.Path(args.chat_template)
    require(folder.is_dir(), "model", "be a folder", args.model)
    template = templates.load_chat_template(folder, file)
    has_one = template is not None
    require(has_one, "model", "have a chat template (or give --chat-template FILE)", args.model)
    asked = requested_implementations(args) | {"max_tokens": args.max_tokens}
    SamplingParams(**asked)  # an error now, not when the model is loaded
    engine = make_engine(args, functools.partial(load, progress=sys.stderr.isatty()))
    require(engine.tokenizer is not None, "model", "have a tokenizer (tokenizer.json)", args.model)
    params = dataclasses.replace(engine.default_sampling_params, **asked)

    refusal: Any = importlib.import_module("jinja2").TemplateError

    def speak(messages: list[Message]) -> Iterator[str]:
        try:
            text = template.render(messages)
        except refusal as error:
            raise ValueError(f"messages must fit the chat template, got {error}.") from error
        prompt = tokenize("messages", text, engine.tokenizer, add_special_tokens=False)
        for token in engine.stream([prompt], [params]):
            yield token.text

    return speak


def _of_server(args: argparse.Namespace) -> Speaker:
    address(args.url)
    others = {"max_tokens": args.max_tokens, "model": args.model}
    asked = requested_implementations(args) | {
        name: value for name, value in others.items() if value is not None
    }

    def speak(messages: list[Message]) -> Iterator[str]:
        with asyncio.Runner() as runner:
            chunks = events(args.url, "/v1/chat/completions", asked | {"messages": messages}, args.api_key)
            while chunk := runner.run(_next_or_none(chunks)):
                for choice in chunk["choices"]:
                    yield choice["delta"].get("content") or ""

    return speak


async def _next_or_none(chunks: Any) -> Any:
    return await anext(chunks, None)
