"""`/v1/models`, and which model a request means."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from starquill.server.errors import ApiError
from starquill.server.options import ServerOptions

router = APIRouter()
DEFAULT_TAG = ":latest"


def require_model(options: ServerOptions, name: str | None) -> None:
    """Refuse a request for a model that is not served; no name means the one that is."""
    if not is_served(options, name):
        told = f"no model {name!r:.80} here (this server has {options.name!r})"
        raise ApiError(404, told, "model")


def is_served(options: ServerOptions, name: str | None) -> bool:
    """Whether `name` means the model here. Ollama's clients may add a tag."""
    names = {one.removesuffix(DEFAULT_TAG) for one in (options.name, *options.aliases)}
    return not name or name.removesuffix(DEFAULT_TAG) in names


def _facts(http: Request) -> dict[str, dict[str, Any]]:
    """The model and its adapters, by name; an adapter's `parent` is the model."""
    name, since = http.app.state.options.name, http.app.state.started
    one = {"id": name, "object": "model", "created": since, "owned_by": "starquill"}
    adapters = http.app.state.engine.model.adapters.list()
    return {name: one} | {a.alias: {**one, "id": a.alias, "parent": name} for a in adapters}


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models")
async def models(http: Request) -> dict[str, Any]:
    """The model that is served and its adapters, as a list."""
    return {"object": "list", "data": list(_facts(http).values())}


@router.get("/v1/models/{name:path}")
async def model(name: str, http: Request) -> dict[str, Any]:
    """The model that is served, by its name or an alias; or one of its adapters."""
    if (adapter := _facts(http).get(name)) is not None:
        return adapter
    require_model(http.app.state.options, name)
    return _facts(http)[http.app.state.options.name]
