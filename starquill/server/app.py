"""The application: routes, and what holds for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from starquill import __version__
from starquill.engine.engine import Engine
from starquill.server import (
    adapters,
    chat,
    completions,
    health,
    llamacpp,
    metrics,
    models,
    ollama,
    page,
)
from starquill.server.errors import ApiError, as_api_error
from starquill.server.metrics import MeasuredEngine, Metrics
from starquill.server.middleware import REQUEST_ID, Guard, Record
from starquill.server.options import ServerOptions
from starquill.server.schema import ErrorAnswer

ROUTES = (
    completions.router,
    chat.router,
    models.router,
    adapters.router,
    llamacpp.router,
    ollama.router,
    health.router,
    metrics.router,
    page.router,
)
ANY_ERROR: dict[int | str, dict[str, Any]] = {
    "default": {"model": ErrorAnswer, "description": "An error"}
}


def create_app(
    engine: Engine, options: ServerOptions, alive: Callable[[], bool] = lambda: True
) -> FastAPI:
    """An application that answers from `engine`, which an `EngineLoop` must run.

    `alive` says whether that loop still does.
    """
    app = FastAPI(title="starquill", version=__version__, responses=ANY_ERROR)
    app.state.metrics = Metrics(engine)
    app.state.engine = MeasuredEngine(engine, app.state.metrics)
    app.state.options = options
    app.state.alive = alive
    app.state.started = int(time.time())
    for router in ROUTES:
        app.include_router(router)
    # Every other error reaches Guard.
    app.add_exception_handler(RequestValidationError, explain)
    app.add_exception_handler(HTTPException, explain)
    # The last one added is the outermost.
    app.add_middleware(Guard, options=options)
    if options.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID],
        )
    app.add_middleware(Record, metrics=app.state.metrics)
    return app


async def explain(http: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return as_api_error(error).response(http.url.path)
    missing = error.status_code == 404
    told = f"there is no {http.url.path!r:.80} here" if missing else str(error.detail)
    answer = ApiError(error.status_code, told).response(http.url.path)
    answer.headers.update(error.headers or {})  # 405 says what is allowed
    return answer
