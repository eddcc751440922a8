"""A minimal streaming client for servers with the OpenAI API."""

import asyncio
import json
import urllib.parse
from collections.abc import AsyncGenerator
from typing import Any

DATA, DONE = b"data:", b"[DONE]"


class ServerError(OSError):
    """An error response from the server, or a response that is not valid HTTP."""


def parse_url(url: str) -> urllib.parse.SplitResult:
    """Split a server's URL into its parts.

    Raises:
        ValueError: If it is not an http or https URL with a valid host and port.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # The port is out of range.
        is_valid = False
    if not is_valid:
        raise ValueError(f"--url must have the form http://HOST:PORT, got {url}.")
    return parts


async def stream_events(
    url: str, path: str, body: dict[str, Any], api_key: str | None = None
) -> AsyncGenerator[dict[str, Any]]:
    """Send a streaming request and yield the chunks of the response.

    Args:
        url: URL of the server, such as "http://127.0.0.1:8000". https and a trailing "/v1" are accepted.
        path: Path of the endpoint, such as "/v1/completions".
        body: Request body; `"stream": true` is added.
        api_key: The server's API key, or None if it requires none.

    Raises:
        ValueError: If the URL is invalid.
        ServerError: If the server reports an error, does not speak HTTP, or closes the connection before
            the response ends.
        OSError: If the server cannot be reached.
    """
    parts = parse_url(url)
    is_tls = parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=is_tls or None, limit=2**24)
    try:
        path_prefix = parts.path.rstrip("/").removesuffix("/v1")
        writer.write(_encode_request(parts.netloc, path_prefix + path, body, api_key))
        await writer.drain()
        status = _parse_status(await reader.readline())
        while (await reader.readline()).strip():  # Skip the headers.
            pass
        if status != 200:
            raise ServerError(_error_message(status, await reader.read()))
        async for line in reader:
            data = line.removeprefix(DATA).strip() if line.startswith(DATA) else b""
            if data == DONE:
                return
            if data:  # Otherwise a blank line, a keep-alive comment or an event name.
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ServerError(chunk["error"]["message"])
                yield chunk
        raise ServerError("The server closed the connection before the response was complete.")
    finally:
        writer.close()


def _encode_request(host: str, path: str, body: dict[str, Any], api_key: str | None) -> bytes:
    """Encode an HTTP 1.0 request: its response is not chunked and ends with the connection."""
    data = json.dumps(body | {"stream": True}).encode()
    head = [
        f"POST {path} HTTP/1.0",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        *([f"Authorization: Bearer {api_key}"] if api_key else []),
    ]
    return "\r\n".join([*head, "", ""]).encode() + data


def _parse_status(line: bytes) -> int:
    """Return the status code in the first line of a response."""
    _, status, *_ = [*line.split(maxsplit=2), b"", b""]
    if not status.isdigit():
        raise ServerError(f"The server does not speak HTTP: it sent {line[:80]!r}.")
    return int(status)


def _error_message(status: int, body: bytes) -> str:
    try:
        return f"HTTP {status}: {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}: {body[:200]!r}"
