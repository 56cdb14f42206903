"""`/v1/models`, and which model a request means."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from starquill.server.errors import ApiError
from starquill.server.options import ServerOptions

router = APIRouter()


def require_model(options: ServerOptions, name: str | None) -> None:
    """Refuse a request for a model that is not served; None means the one that is."""
    names = (options.name, *options.aliases)
    if name is not None and name not in names:
        raise ApiError(404, f"no model {name!r:.80} here (this server has {names[0]!r})", "model")


def _facts(http: Request) -> dict[str, Any]:
    name, since = http.app.state.options.name, http.app.state.started
    return {"id": name, "object": "model", "created": since, "owned_by": "starquill"}


@router.get("/v1/models")
async def models(http: Request) -> dict[str, Any]:
    """The model that is served, as a list."""
    return {"object": "list", "data": [_facts(http)]}


@router.get("/v1/models/{name:path}")
async def model(name: str, http: Request) -> dict[str, Any]:
    """The model that is served, by its name or an alias."""
    require_model(http.app.state.options, name)
    return _facts(http)
