"""What holds for every route: request ids and the access log, the key, the size of a body."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from starquill.errors import printable
from starquill.server import page
from starquill.server.errors import CLIENT_LEFT, ApiError, as_api_error
from starquill.server.metrics import Metrics
from starquill.server.options import ServerOptions
from starquill.server.origins import check_origin
from starquill.server.stream import ClientLeftError

OPEN_PATHS = frozenset({"/health"}) | page.PATHS  # a monitor has no key
REQUEST_ID = "X-Request-Id"
_USABLE_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)

access = logging.getLogger("starquill.access")
log = logging.getLogger("starquill")


class Record:
    """Gives every request an id, and tells the log and the metrics how it ended."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _USABLE_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        status = CLIENT_LEFT  # unless something is sent

        async def numbered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        started = time.perf_counter()
        try:
            await self.app(scope, receive, numbered)
        finally:
            seconds = time.perf_counter() - started
            client = scope["client"][0] if scope.get("client") else "-"
            line = f"{client} {scope['method']} {scope['path']} {status} {seconds:.3f}s"
            access.info("%s %s", request_id, printable(line))
            self.metrics.answered(scope, status)


class Guard:
    """Refuses other servers' pages, requests without the key and bodies too large.

    No fault behind it gets out.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self.app = app
        self.options = options
        self.most = options.most_body_bytes
        self.key = None if options.api_key is None else options.api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        received, started = 0, False

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.most:
                # FastAPI lets this kind of exception through when it reads a body.
                raise HTTPException(413, self._too_large())
            return message

        async def noticing(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            self._check(scope)
            await self.app(scope, limited, noticing)
        except ClientLeftError:
            pass
        except Exception as error:
            if started:
                raise
            answer = as_api_error(error)
            if answer.status == 500:
                log.error("request %s", scope["state"]["request_id"], exc_info=error)
            await answer.response(scope["path"])(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        check_origin(headers, self.options)
        if self.key is not None and scope["path"] not in OPEN_PATHS:
            kind, _, given = headers.get("Authorization", "").partition(" ")
            # latin-1 gives back the header's own bytes.
            fits = hmac.compare_digest(given.strip().encode("latin-1"), self.key)
            if kind.lower() != "bearer" or not fits:
                raise ApiError(401, "the API key is missing or wrong (expected as Bearer token)")
        length = headers.get("Content-Length", "0")
        if length.isdecimal() and int(length) > self.most:
            raise ApiError(413, self._too_large())

    def _too_large(self) -> str:
        return f"the body is larger than this server reads ({self.most} bytes)"
