"""The application: routes, and what holds for all of them."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from starquill import __version__
from starquill.engine.engine import Engine
from starquill.server.errors import as_api_error
from starquill.server.options import ServerOptions


def create_app(engine: Engine, options: ServerOptions) -> FastAPI:
    """An application that answers from `engine`, which an `EngineLoop` must run."""
    app = FastAPI(title="starquill", version=__version__)
    app.state.engine = engine
    app.state.options = options

    @app.exception_handler(Exception)
    async def explain(_: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    return app
