"""LoRA adapters: which of them a request means; listing, loading and unloading them.

The routes have the names and bodies of vLLM and mistral.rs; `/lora-adapters` is llama.cpp's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from starquill.adapters.store import AdapterInfo, AdapterStore
from starquill.checkpoint.hub import ADAPTER_FILES
from starquill.errors import AdapterError, CheckpointError, listing
from starquill.server.errors import ApiError
from starquill.server.llamacpp_schema import Options
from starquill.server.models import require_model
from starquill.server.schema import Body

router = APIRouter()
MOST_ALIAS = 128
Adapter = str | Mapping[str, float] | None


class LoadBody(Body):
    lora_name: str = Field(min_length=1, max_length=MOST_ALIAS)
    lora_path: str = Field(description="A folder below --lora-root, relative to it or absolute.")
    load_inplace: bool = Field(False, description="Replace one that has this name.")


class UnloadBody(Body):
    lora_name: str


def adapter_of(http: Request, adapter: Adapter, model: str | None) -> Adapter:
    """What a request picks by its `adapter`, or by naming one as its `model`.

    Raises ApiError: 404 for what is not there, 400 for two that contradict each other.
    """
    named = alias_of(http, model)
    if named is None:
        require_model(http.app.state.options, model)
    elif adapter is not None and adapter != named:
        told = f"model names the adapter {named!r:.80}, and adapter says otherwise; give one"
        raise ApiError(400, told, "adapter")
    else:
        return named
    _require(http, [adapter] if isinstance(adapter, str) else list(adapter or ()))
    return adapter


def adapter_of_llamacpp(http: Request, body: Options) -> Adapter:
    """The same for llama.cpp's routes: by `lora` too, and a model of another name is ignored."""
    if body.lora is not None:
        known = aliases(http)
        for one in body.lora:
            if not 0 <= one.id < len(known):
                told = f"no adapter has the id {one.id} (GET /lora-adapters lists {len(known)})"
                raise ApiError(404, told, "lora")
        return {known[one.id]: one.scale for one in body.lora}
    return adapter_of(http, body.adapter, alias_of(http, body.model))


def name_of(http: Request, adapter: Adapter) -> str:
    """What an answer calls the model."""
    name: str = http.app.state.options.name
    return adapter if isinstance(adapter, str) else name


def aliases(http: Request) -> list[str]:
    return [info.alias for info in _store(http).list()]


def alias_of(http: Request, model: str | None) -> str | None:
    """`model` if it is an adapter's name."""
    return model if model is not None and model in aliases(http) else None


def _store(http: Request) -> AdapterStore:
    store: AdapterStore = http.app.state.engine.model.adapters
    return store


def _require(http: Request, named: list[str]) -> None:
    known = aliases(http)
    for alias in named:
        if alias not in known:
            told = f"no adapter {alias!r:.80} here (loaded: {listing(known) or 'none'})"
            raise ApiError(404, told, "adapter")


@router.get("/lora-adapters", tags=["llama.cpp"])
async def lora_adapters(http: Request) -> list[dict[str, Any]]:
    """The adapters as llama.cpp has them: none acts on a request that does not ask for it."""
    found = _store(http).list()
    return [{"id": n, "path": str(one.folder), "scale": 0.0} for n, one in enumerate(found)]


@router.get("/v1/lora_adapters")
async def listed(http: Request) -> dict[str, Any]:
    """The adapters that are loaded, and how many more may be."""
    store = _store(http)
    infos, limits = store.list(), store.limits
    return {
        "object": "list",
        "data": [_facts(info) for info in infos],
        "resident_bytes": sum(info.nbytes for info in infos),
        "max_adapters": limits.count,
        "max_rank": limits.rank,
        "max_bytes": limits.bytes,
    }


@router.post("/v1/load_lora_adapter")
async def load(body: LoadBody, http: Request) -> dict[str, Any]:
    """Load the adapter in a folder of this machine. Requests that run are not disturbed."""
    root, options = _root(http), http.app.state.options
    if body.lora_name in (options.name, *options.aliases):
        raise ApiError(400, f"{body.lora_name!r:.80} is the model's own name", "lora_name")
    async with _one_at_a_time(http):
        if not body.load_inplace and body.lora_name in aliases(http):
            told = f"an adapter {body.lora_name!r:.80} is loaded (load_inplace: true replaces it)"
            raise ApiError(400, told, "lora_name")
        # Reading may take long; neither the event loop nor the engine waits for it.
        return _facts(await run_in_threadpool(_load, _store(http), body, root))


@router.post("/v1/unload_lora_adapter")
async def unload(body: UnloadBody, http: Request) -> dict[str, Any]:
    """Take an adapter's name away. Requests that use it go on."""
    _root(http)
    store = _store(http)
    async with _one_at_a_time(http):
        found = [info for info in store.list() if info.alias == body.lora_name]
        _require(http, [body.lora_name])
        await run_in_threadpool(store.unload, body.lora_name)
        return _facts(found[0])


def _facts(info: AdapterInfo) -> dict[str, Any]:
    return {
        "id": info.alias,
        "object": "lora_adapter",
        "source": str(info.folder),
        "generation": str(info.generation),
        "rank": info.rank,
        "bytes": info.nbytes,
    }


def _root(http: Request) -> Path:
    root: Path | None = http.app.state.options.lora_root
    if root is None:
        raise ApiError(
            403,
            "this server loads and unloads no adapters by request; start it with "
            "--allow-lora-updates and --lora-root DIR",
        )
    return root


def _one_at_a_time(http: Request) -> asyncio.Lock:
    """What is looked up before something is loaded must still hold when it is."""
    state = http.app.state
    if not hasattr(state, "loading_adapters"):
        state.loading_adapters = asyncio.Lock()
    lock: asyncio.Lock = state.loading_adapters
    return lock


def _load(store: AdapterStore, body: LoadBody, root: Path) -> AdapterInfo:
    try:
        return store.load(body.lora_name, folder_below(root, body.lora_path))
    except (AdapterError, CheckpointError) as error:
        raise ApiError(400, str(error), "lora_path") from None
    except OSError as error:
        told = f"{body.lora_path!r:.80} cannot be read: {error.strerror or error}"
        raise ApiError(400, told, "lora_path") from None


def folder_below(root: Path, text: str) -> Path:
    """The folder that `text` names, by its real path. Nothing outside of `root` is opened.

    Links are followed first, those of the files in it too: what counts is where they lead.
    """
    try:
        root = root.resolve(strict=True)
        folder = (root / text).resolve()
        files = [path for name in ADAPTER_FILES if (path := (folder / name).resolve()).exists()]
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links; a name with a zero
        raise ApiError(400, f"{text!r:.80} is no folder: {error}", "lora_path") from None
    for path in (folder, *files):
        if not path.is_relative_to(root):
            told = f"{text!r:.80} leads outside of --lora-root, where nothing is opened"
            raise ApiError(403, told, "lora_path")
    if not folder.is_dir():
        raise ApiError(404, f"no folder {text!r:.80} below --lora-root", "lora_path")
    for path in files:
        if not path.is_file():
            raise ApiError(400, f"{path.name} of {text!r:.80} is no regular file", "lora_path")
    return folder
