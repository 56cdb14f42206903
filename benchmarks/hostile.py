"""Clients that no server wishes for, and what it should tell them; only the standard library.

Each takes a port and a random generator and returns what it saw, or raises `Fault`.
"""

from __future__ import annotations

import json
import random
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from typing import Any

from servers import HOST

TIMEOUT = 120.0
BLOCK = 1 << 16
LONG: dict[str, Any] = {"max_tokens": 300, "temperature": 0, "stream": True}


class Fault(Exception):  # noqa: N818 -- a finding about the server, not an error of ours
    """The server did what it must not."""


# Method, path and body (bytes are sent as they are): each must be answered by 400 to 499.
BAD: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/v1/completions", b"{not json"),
    ("POST", "/v1/completions", b""),
    ("POST", "/v1/completions", b"[]"),
    ("POST", "/v1/completions", b'{"prompt": "\xff\xfe"}'),
    ("POST", "/v1/completions", b"[" * 100_000),
    ("POST", "/v1/completions", b'{"prompt": "x", "temperature": NaN}'),
    ("POST", "/v1/completions", b'{"prompt": "x", "max_tokens": 1e999}'),
    ("POST", "/v1/completions", {"prompt": 5}),
    ("POST", "/v1/completions", {"prompt": {"text": "x"}}),
    ("POST", "/v1/completions", {"prompt": [1, "x"]}),
    ("POST", "/v1/completions", {"prompt": [99_999_999]}),
    ("POST", "/v1/completions", {"prompt": [-1]}),
    ("POST", "/v1/completions", {"prompt": "x " * 60_000}),
    ("POST", "/v1/completions", {"prompt": "x", "max_tokens": -1}),
    ("POST", "/v1/completions", {"prompt": "x", "max_tokens": "many"}),
    ("POST", "/v1/completions", {"prompt": "x", "temperature": "hot"}),
    ("POST", "/v1/completions", {"prompt": "x", "temperature": -1}),
    ("POST", "/v1/completions", {"prompt": "x", "top_p": 7}),
    ("POST", "/v1/completions", {"prompt": "x", "n": 0}),
    ("POST", "/v1/completions", {"prompt": "x", "logit_bias": {"99999999": 1}}),
    ("POST", "/v1/completions", {"prompt": "x", "logit_bias": {"word": 1}}),
    ("POST", "/v1/completions", {"prompt": "x", "logprobs": -1}),
    ("POST", "/v1/completions", {"prompt": "x", "stop": ["a"] * 17}),
    ("POST", "/v1/completions", {"prompt": "x", "stream": "maybe"}),
    ("POST", "/v1/completions", {"prompt": "x", "suffix": 5}),
    ("POST", "/v1/completions", {"prompt": "x", "model": "no-such-model"}),
    ("POST", "/v1/chat/completions", {"messages": []}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "no template"}]}),
    ("POST", "/infill", b"null"),
    ("POST", "/infill", {"input_prefix": 3, "input_suffix": ""}),
    ("POST", "/infill", {"input_prefix": "", "input_suffix": "", "input_extra": 3}),
    ("POST", "/completion", {"prompt": {"x": 1}}),
    ("POST", "/completion", {"prompt": "x", "n_predict": "many"}),
    ("POST", "/tokenize", b"{"),
    ("POST", "/detokenize", {"tokens": ["x"]}),
    ("POST", "/detokenize", {"tokens": [99_999_999]}),
    ("POST", "/api/generate", {"model": "no-such-model", "prompt": "x"}),
    ("GET", "/v1/completions", b""),
    ("GET", "/nowhere", b""),
    ("DELETE", "/health", b""),
)


def as_bytes(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def bad(port: int, rng: random.Random) -> str:
    """A request that must be refused with one clear object."""
    method, path, body = rng.choice(BAD)
    told = f"{method} {path} {as_bytes(body)[:80]!r}"
    connection = HTTPConnection(HOST, port, timeout=TIMEOUT)
    try:
        connection.request(method, path, as_bytes(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
    finally:
        connection.close()
    if response.status == 503:
        return "busy"
    if not 400 <= response.status < 500:
        raise Fault(f"{told} was answered {response.status} (expected 400 to 499)")
    if "error" not in json.loads(answer):
        raise Fault(f"{told} was answered without an error object: {answer[:200]!r}")
    return "refused"


def _head(length: int | None, path: str = "/v1/completions") -> bytes:
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    lines = f"POST {path} HTTP/1.1", f"Host: {HOST}", "Content-Type: application/json", size
    return "\r\n".join((*lines, "Connection: close", "", "")).encode()


def _connect(port: int, buffer: int | None = None) -> socket.socket:
    client = socket.socket()
    client.settimeout(TIMEOUT)
    if buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.connect((HOST, port))
    return client


def _slam(client: socket.socket, rng: random.Random) -> None:
    """Close; half the time without the usual goodbye."""
    if rng.random() < 0.5:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def _prompt(rng: random.Random) -> str:
    return f"def step_{rng.randrange(10**6)}(values):\n    total = 0\n" * rng.randint(1, 6)


def leave(port: int, rng: random.Random) -> str:
    """Ask for much, and leave after a few blocks of the answer or before any."""
    body = as_bytes({**LONG, "prompt": _prompt(rng), "stream": rng.random() < 0.7})
    client = _connect(port)
    client.sendall(_head(len(body)) + body)
    for _ in range(rng.randint(0, 4)):
        if not select.select([client], [], [], rng.uniform(0.0, 0.3))[0] or not client.recv(512):
            break
    _slam(client, rng)
    return "left"


def leave_early(port: int, rng: random.Random) -> str:
    """Announce a body, send a part of it, and go."""
    body = as_bytes({**LONG, "prompt": _prompt(rng)})
    client = _connect(port)
    client.sendall(_head(len(body)) + body[: rng.randint(0, len(body) - 1)])
    time.sleep(rng.uniform(0.0, 0.3))
    _slam(client, rng)
    return "left"


def read_slowly(port: int, rng: random.Random) -> str:
    """A long stream, read a few bytes at a time through a small window, and not to its end."""
    body = as_bytes({**LONG, "prompt": _prompt(rng)})
    client = _connect(port, buffer=2048)
    client.sendall(_head(len(body)) + body)
    ends = time.monotonic() + rng.uniform(2.0, 6.0)
    while time.monotonic() < ends and client.recv(64):
        time.sleep(0.02)
    _slam(client, rng)
    return "read"


def _blocks(size: int, chunked: bool) -> Iterator[bytes]:
    yield _head(None if chunked else size)
    block = b" " * BLOCK
    for _ in range(size // BLOCK):
        yield b"%x\r\n%s\r\n" % (BLOCK, block) if chunked else block


def oversized(port: int, rng: random.Random) -> str:
    """A body of 64 MiB, with its size announced or not; sending stops at the answer."""
    client = _connect(port)
    try:
        for block in _blocks(64 << 20, rng.random() < 0.5):
            client.sendall(block)
            if select.select([client], [], [], 0)[0]:
                break
        status = client.recv(64).split(b" ")[1:2]
    except (ConnectionResetError, BrokenPipeError):
        return "reset"  # the answer was lost with the connection
    finally:
        client.close()
    if status != [b"413"]:
        raise Fault(f"a body of 64 MiB was answered {status} (expected 413)")
    return "refused"


def _get(port: int, path: str) -> tuple[int, bytes]:
    connection = HTTPConnection(HOST, port, timeout=TIMEOUT)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


PAGES = ("/", "/health", "/v1/models", "/metrics", "/props", "/api/tags", "/openapi.json", "/docs")


def visit(port: int, rng: random.Random) -> str:
    path = rng.choice(PAGES)
    status, answer = _get(port, path)
    if status != 200 or not answer:
        raise Fault(f"GET {path} was answered {status} with {len(answer)} bytes")
    return "answered"


def metrics(port: int) -> dict[str, float]:
    """The sum of each metric's samples, whatever their labels."""
    found: dict[str, float] = {}
    for line in _get(port, "/metrics")[1].decode().splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


HOSTILE: dict[str, Callable[[int, random.Random], str]] = {
    "bad": bad,
    "leave": leave,
    "leave_early": leave_early,
    "read_slowly": read_slowly,
    "oversized": oversized,
    "visit": visit,
}
