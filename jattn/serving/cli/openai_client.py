"""A client of servers with OpenAI's API: one request, its events as they come."""

import asyncio
import json
import urllib.parse
from collections.abc import AsyncGenerator
from typing import Any

from pallas_kernels.checks import require

DATA, DONE = b"data:", b"[DONE]"


class ServerError(OSError):
    """The server answered with an error."""


def address(url: str) -> urllib.parse.SplitResult:
    """The parts of a server's url.

    Raises:
        ValueError: It is none.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is none
        is_one = False
    require(is_one, "url", "be http://HOST:PORT", url)
    return parts


async def events(
    url: str, path: str, body: dict[str, Any], api_key: str | None = None
) -> AsyncGenerator[dict[str, Any]]:
    """Asks for a stream, and yields its chunks.

    Args:
        url: Of the server, "http://127.0.0.1:8000"; https too, and with the "/v1" that servers print.
        path: Below it.
        body: What to ask.
        api_key: The server's, where it wants one.

    Raises:
        ValueError: The url is none.
        ServerError: The server says that something is wrong, does not speak HTTP, or ends within its answer.
        OSError: There is no server.
    """
    parts = address(url)
    is_tls = parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=is_tls or None, limit=2**24)
    try:
        before = parts.path.rstrip("/").removesuffix("/v1")
        writer.write(_request(parts.netloc, before + path, body, api_key))
        await writer.drain()
        status = _status(await reader.readline())
        while (await reader.readline()).strip():
            pass
        if status != 200:
            raise ServerError(_told(status, await reader.read()))
        async for line in reader:
            data = line.removeprefix(DATA).strip() if line.startswith(DATA) else b""
            if data == DONE:
                return
            if data:  # else a blank line, a comment that keeps the connection open, or an event's name
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ServerError(chunk["error"]["message"])
                yield chunk
        raise ServerError("the server ended within its answer")
    finally:
        writer.close()


def _request(host: str, path: str, body: dict[str, Any], api_key: str | None) -> bytes:
    """As HTTP 1.0 has it, where an answer ends with its connection and is not cut into chunks."""
    data = json.dumps(body | {"stream": True}).encode()
    head = [
        f"POST {path} HTTP/1.0",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        *([f"Authorization: Bearer {api_key}"] if api_key else []),
    ]
    return "\r\n".join([*head, "", ""]).encode() + data


def _status(line: bytes) -> int:
    """Of an answer's first line."""
    _, status, *_ = [*line.split(maxsplit=2), b"", b""]
    if not status.isdigit():
        raise ServerError(f"the server must speak HTTP, got {line[:80]!r}")
    return int(status)


def _told(status: int, body: bytes) -> str:
    try:
        return f"{status}: {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{status}: {body[:200]!r}"
