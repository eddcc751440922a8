"""`jattn chat`: an interactive conversation with a local model or with a server."""

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
from jattn.models.loading.hub import resolve_checkpoint
from jattn.serving.cli.nodes import add_node_options, runs_on_nodes
from jattn.serving.cli.openai_client import parse_url, stream_events
from jattn.serving.cli.options import (
    MODEL_HELP,
    add_engine_options,
    add_sampling_options,
    import_extra,
    make_engine,
    require_defaults,
    sampling_options,
)
from jattn.serving.engine.detokenizer import tokenize
from jattn.serving.engine.sampling_params import SamplingParams

type Message = dict[str, str]
type StreamReply = Callable[[list[Message]], Iterator[str]]  # Conversation -> pieces of the reply.


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.set_defaults(run=chat)
    parser.add_argument("--model", metavar="NAME", help=f"{MODEL_HELP}; with --url, the server's model name")
    parser.add_argument(
        "--url",
        help="chat with the server at this URL (OpenAI API) instead of loading a model",
    )
    parser.add_argument("--api-key", metavar="KEY", help="API key of the server at --url")
    _add_template_option(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message (default: none)")
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="maximum number of tokens per reply (default: up to the context length)",
    )
    add_sampling_options(parser, "; with --url, the server's")
    add_engine_options(parser)
    add_node_options(parser)


def _add_template_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chat-template", metavar="FILE", help="Jinja chat template (default: the model folder's)"
    )


@runs_on_nodes
def chat(args: argparse.Namespace) -> None:
    """Reply to stdin line by line until it ends.

    Ctrl-C during a reply ends the reply; at the prompt, it ends the conversation.
    """
    if args.url is None and args.model is None:
        raise ValueError("Pass --model NAME to load a model, or --url URL to use a server.")
    if args.url is None:
        if args.api_key is not None:
            raise ValueError("--api-key requires --url.")
        stream_reply = _local_model(args)
    else:
        local_options = [_add_template_option, add_engine_options, add_node_options]
        require_defaults(args, local_options, "cannot be combined with --url; set it on the server.")
        stream_reply = _remote_model(args)
    messages: list[Message] = [{"role": "system", "content": args.system}] if args.system else []
    while (line := _read_line()) is not None:
        messages.append({"role": "user", "content": line})
        reply = ""
        try:
            for text in stream_reply(messages):
                reply += text
                print(text, end="", flush=True)
        except KeyboardInterrupt:
            pass
        print(flush=True)
        messages.append({"role": "assistant", "content": reply})


def _read_line() -> str | None:
    """Read the next line of stdin, showing a prompt on terminals; return None at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None


def _local_model(args: argparse.Namespace) -> StreamReply:
    """Load the model of a folder and return the function that replies with it."""
    templates = import_extra("chat", "jattn.serving.server.chat_template")
    folder = resolve_checkpoint(args.model, args.revision, has_weights=args.load_format != "dummy")
    file = args.chat_template and pathlib.Path(args.chat_template)
    template = templates.load_chat_template(folder, file)
    if template is None:
        raise ValueError(f"{args.model} has no chat template. Pass --chat-template FILE.")
    args.model = str(folder)
    requested = sampling_options(args) | {"max_tokens": args.max_tokens}
    SamplingParams(**requested)  # Report invalid values before loading the model.
    engine = make_engine(args, functools.partial(load, progress=sys.stderr.isatty()))
    if engine.tokenizer is None:
        raise ValueError(
            f"{args.model} has no tokenizer.json, which the chat requires. Copy it from the checkpoint."
        )
    params = dataclasses.replace(engine.default_sampling_params, **requested)

    template_error: Any = importlib.import_module("jinja2").TemplateError

    def stream_reply(messages: list[Message]) -> Iterator[str]:
        try:
            text = template.render(messages)
        except template_error as error:
            raise ValueError(
                f"The chat template rejected the messages: {error}. Pass another one with --chat-template."
            ) from error
        prompt = tokenize("messages", text, engine.tokenizer, add_special_tokens=False)
        for token in engine.stream([prompt], [params]):
            yield token.text

    return stream_reply


def _remote_model(args: argparse.Namespace) -> StreamReply:
    """Return the function that replies with the model of a server."""
    parse_url(args.url)
    options = {"max_tokens": args.max_tokens, "model": args.model}
    body = sampling_options(args) | {name: value for name, value in options.items() if value is not None}

    def stream_reply(messages: list[Message]) -> Iterator[str]:
        with asyncio.Runner() as runner:
            chunks = stream_events(
                args.url, "/v1/chat/completions", body | {"messages": messages}, args.api_key
            )
            while chunk := runner.run(_next_or_none(chunks)):
                for choice in chunk["choices"]:
                    yield choice["delta"].get("content") or ""

    return stream_reply


async def _next_or_none(chunks: Any) -> Any:
    return await anext(chunks, None)
