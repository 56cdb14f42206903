"""`starquill serve`: answer over HTTP."""

from __future__ import annotations

import importlib.util
import logging
import re
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from starquill.cli.options import ModelOptions, QuantizeOptions, XLoraOptions, expand_options
from starquill.cli.ray_options import RayOptions, SplitOptions
from starquill.errors import BadRequestError, StarquillError, printable
from starquill.types import EngineOptions, GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from starquill.adapters.store import AdapterLimits
    from starquill.engine.engine import Engine
    from starquill.engine.loaded import LoadedModel
    from starquill.server.options import ServerOptions

NEEDED = ("fastapi", "uvicorn", "prometheus_client")
MOST_PORT = 65535
OUR_ERROR = 1
_SIZE = re.compile(r"([0-9]{1,15})\s*(|[kmgt]i?)b?", re.IGNORECASE)


def _option(help: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, **settings)


@dataclass(frozen=True)
class ListenOptions:
    """Where to listen, and to whom."""

    host: Annotated[str, _option("Address to listen on; 0.0.0.0 for every network.")] = "127.0.0.1"
    port: Annotated[int, _option("Port; 0 takes a free one.")] = 8080
    api_key: Annotated[str | None, _option("Ask for this Bearer token.", metavar="KEY")] = None
    api_key_file: Annotated[Path | None, _option("A file that has the key.")] = None
    cors: Annotated[
        list[str] | None,
        _option("An origin whose pages may call, or *; may be repeated.", metavar="ORIGIN"),
    ] = None
    name: Annotated[
        list[str] | None,
        _option("The model's name in answers; repeated, others that mean it too."),
    ] = None
    max_body: Annotated[str, _option("Largest body of a request.", metavar="SIZE")] = "16MiB"
    fim_order: Annotated[
        Literal["psm", "spm"], _option("Order of fills: prefix first (psm), or suffix (spm).")
    ] = "psm"
    drain_seconds: Annotated[int, _option("At the end, wait this long for running requests.")] = 30

    def check(self) -> None:
        """Refuse what makes no sense, before a model is loaded."""
        if not 0 <= self.port <= MOST_PORT:
            raise BadRequestError(f"--port is {self.port} (expected 0 to {MOST_PORT})")
        if self.drain_seconds < 0:
            raise BadRequestError(f"--drain-seconds is {self.drain_seconds} (expected 0 or more)")
        if self.max_body_bytes() < 1:
            raise BadRequestError(f"--max-body is {self.max_body!r} (expected 1 or more)")

    def max_body_bytes(self) -> int:
        return size_of("--max-body", self.max_body)

    def key(self) -> str | None:
        if self.api_key_file is None:
            key = self.api_key
        elif self.api_key is not None:
            raise BadRequestError("--api-key and --api-key-file are both given; give one")
        else:
            key = self.api_key_file.read_text(encoding="utf-8").strip()
        if key is not None and not (key and key.isascii() and key.isprintable()):
            raise BadRequestError("the API key is empty or has characters that no header can carry")
        return key


@dataclass(frozen=True)
class WorkOptions:
    """How many requests are served, and with what."""

    slots: Annotated[int, _option("Requests that run at once.")] = EngineOptions.slots
    queue: Annotated[int, _option("Requests that may wait; more are answered with 503.")] = (
        EngineOptions.queue
    )
    context: Annotated[
        int | None, _option("Tokens that prompt and output may have; the model's, if not given.")
    ] = None
    cache_memory: Annotated[
        str | None, _option("Memory for keys and values, as 2GiB.", metavar="SIZE")
    ] = None
    # Shorter than where nobody else waits: other streams stand still for so long.
    prefill_chunk: Annotated[int, _option("Tokens of a prompt computed in one step.")] = 128
    prefix_cache: Annotated[
        bool, _option("Reuse what prompts have in common.", "--prefix-cache/--no-prefix-cache")
    ] = EngineOptions.prefix_cache
    lookup: Annotated[int, _option("Tokens that prompt lookup may guess; 0 is off.")] = (
        EngineOptions.lookup
    )

    def chosen(self) -> EngineOptions:
        least = {"slots": 1, "queue": 0, "context": 2, "prefill_chunk": 1, "lookup": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                option = name.replace("_", "-")
                raise BadRequestError(f"--{option} is {value} (expected {bound} or more)")
        memory = self.cache_memory
        return EngineOptions(
            slots=self.slots,
            queue=self.queue,
            context=self.context,
            cache_bytes=None if memory is None else size_of("--cache-memory", memory),
            prefill_chunk=self.prefill_chunk,
            prefix_cache=self.prefix_cache,
            lookup=self.lookup,
        )


@dataclass(frozen=True)
class LoraOptions:
    """Which adapters requests may pick, and whether they may load others."""

    lora: Annotated[
        list[str] | None,
        _option("An adapter's folder or hub id; may be repeated.", metavar="ALIAS=PATH"),
    ] = None
    allow_lora_updates: Annotated[
        bool, _option("Let requests load and unload adapters.", "--allow-lora-updates")
    ] = False
    lora_root: Annotated[
        Path | None, _option("The folder below which they may name any.", metavar="DIR")
    ] = None
    max_loras: Annotated[int, _option("Adapters that may be loaded.")] = 16
    max_lora_rank: Annotated[int, _option("An adapter's highest rank.")] = 256
    max_lora_memory: Annotated[str, _option("Bytes of all.", metavar="SIZE")] = "8GiB"
    evict_loras: Annotated[
        bool, _option("Let those longest idle make room for others.", "--evict-loras")
    ] = False

    def chosen(self) -> dict[str, str]:
        """Paths by alias; BadRequestError for options that make no sense."""
        for name in ("max_loras", "max_lora_rank"):
            if (value := getattr(self, name)) < 1:
                option = name.replace("_", "-")
                raise BadRequestError(f"--{option} is {value} (expected 1 or more)")
        if self.allow_lora_updates != (self.lora_root is not None):
            raise BadRequestError("--allow-lora-updates and --lora-root go together; give both")
        if self.lora_root is not None and not self.lora_root.is_dir():
            raise BadRequestError(f"--lora-root is {self.lora_root} (expected a folder)")
        found: dict[str, str] = {}
        for text in self.lora or ():
            alias, _, path = text.partition("=")
            if not alias or not path:
                raise BadRequestError(f"--lora is {text!r} (expected ALIAS=PATH)")
            if alias in found:
                raise BadRequestError(f"--lora {alias} is given twice; choose another alias")
            found[alias] = path
        if len(found) > self.max_loras:
            raise BadRequestError(f"{len(found)} adapters are given, --max-loras {self.max_loras}")
        return found

    def limits(self) -> AdapterLimits:
        from starquill.adapters.store import AdapterLimits

        most = size_of("--max-lora-memory", self.max_lora_memory)
        return AdapterLimits(self.max_loras, self.max_lora_rank, most, self.evict_loras)


@expand_options
def serve(
    which: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="The model, here or as --model.", show_default=False),
    ] = None,
    listen: ListenOptions = ListenOptions(),
    work: WorkOptions = WorkOptions(),
    lora: LoraOptions = LoraOptions(),
    model: ModelOptions = ModelOptions(),
    quantize: QuantizeOptions = QuantizeOptions(),
    xlora: XLoraOptions = XLoraOptions(),
    ray: RayOptions = RayOptions(),
    split: SplitOptions = SplitOptions(),
) -> int:
    """Serve a model over HTTP, with OpenAI's routes; ends with Ctrl-C."""
    listen.check()
    xlora.check()
    # Mistakes are told before a model is loaded.
    work.chosen(), listen.key(), lora.chosen()
    split.check(ray)
    if which is not None:
        if model.model not in (ModelOptions().model, which):
            raise BadRequestError(f"two models are named, {which} and {model.model}; name one")
        model = replace(model, model=which)
    require_packages("serving needs")
    cluster, loading = ray.chosen(), LoadingOptions(model, quantize, xlora, lora)
    with bound(listen.host, listen.port) as early:  # rather told now than after minutes of loading
        is_local = ip_address(early.getsockname()[0]).is_loopback
    hosts = (listen.host,) if is_local else None
    if cluster is not None:
        from starquill.cli.serve_ray import Serving, serve_on_ray, servings

        asked = Serving(listen, work, loading, ray, split.stages)
        return serve_on_ray(listen, servings(split.models, asked, which), cluster, hosts)
    return _run(*prepared(listen, work, loading, hosts), listen)


def require_packages(who: str) -> None:
    """Refuse where the `serve` extra is not installed."""
    if any(importlib.util.find_spec(name) is None for name in NEEDED):
        raise BadRequestError(f"{who} more packages; pip install 'starquill[serve]'")


@dataclass(frozen=True)
class LoadingOptions:
    """All that says which model is loaded, and how."""

    model: ModelOptions
    quantize: QuantizeOptions
    xlora: XLoraOptions
    lora: LoraOptions


def prepared(
    listen: ListenOptions,
    work: WorkOptions,
    loading: LoadingOptions,
    hosts: tuple[str, ...] | None = None,
    loaded: LoadedModel | None = None,
) -> tuple[Engine, ServerOptions]:
    """An engine that has shown that it works, and what its application is told.

    `loaded` is the model, if it is there already.
    """
    from starquill.cli.run import load_model
    from starquill.engine.engine import Engine
    from starquill.server.options import ServerOptions

    if loaded is None:
        loaded = load_model(loading.model, loading.quantize, loading.xlora)
    loaded.adapters.limits = loading.lora.limits()
    engine = Engine(loaded, work.chosen())
    warm_up(engine)
    own_name = loaded.folder.name if Path(loaded.name).exists() else loaded.name
    names = [*(listen.name or ()), own_name]
    options = ServerOptions(
        name=names[0],
        api_key=listen.key(),
        cors=tuple(listen.cors or ()),
        most_body_bytes=listen.max_body_bytes(),
        aliases=(*names[1:], loaded.name),
        fim_order=listen.fim_order,
        hosts=hosts,
        lora_root=loading.lora.lora_root,
    )
    for alias, path in loading.lora.chosen().items():
        if alias in (*names, loaded.name):
            raise BadRequestError(f"--lora {alias} is the model's own name; choose another alias")
        loaded.adapters.load(alias, path)
    return engine, options


def size_of(option: str, text: str) -> int:
    """`2GiB`, `500 MB` or `1048576` in bytes."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise BadRequestError(f"{option} is {text!r} (expected a size, as 2GiB or 500MB)")
    unit = found[2].lower()
    factor = 1024 if unit.endswith("i") else 1000
    return int(found[1]) * factor ** (" kmgt".index(unit[0]) if unit else 0)


def bound(host: str, port: int) -> socket.socket:
    """A socket at this address, not listening yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        if sys.platform != "win32":  # where it would let two servers share a port
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind(address)
        except BaseException:
            found.close()
            raise
    except (OSError, UnicodeError) as error:  # a host that is no name at all is a UnicodeError
        reason = getattr(error, "strerror", None) or str(error)
        raise BadRequestError(
            f"cannot listen on {host} port {port}: {reason}; choose another --host or --port"
        ) from None
    return found


def warm_up(engine: Engine) -> None:
    """Compute a prompt and a token after it; a model that cannot must not be served."""
    never_end = dict.fromkeys(engine.model.end_ids, -1e9)
    params = SamplingParams(max_tokens=2, logit_bias=never_end)
    try:
        for _ in engine.generate(GenerateRequest("warm-up", (0,), params)):
            pass
    except Exception as error:
        reason = str(error) if isinstance(error, StarquillError) else repr(error)
        raise StarquillError(f"the model failed at its first step: {reason}") from error


def _run(engine: Engine, options: ServerOptions, listen: ListenOptions) -> int:
    """Serve until a signal ends it; 0 unless the engine's thread ended before."""
    from starquill.engine.loop import EngineLoop
    from starquill.server.app import create_app

    with bound(listen.host, listen.port) as listener, EngineLoop(engine) as loop:
        app = create_app(engine, options, lambda: loop.is_alive)
        announce = partial(_print_block, engine, options, listener)
        listen_until_signal(app, listener, listen, announce, lambda: loop.is_alive)
        return 0 if loop.is_alive else OUR_ERROR


def listen_until_signal(
    app: ASGIApp,
    listener: socket.socket,
    listen: ListenOptions,
    announce: Callable[[], None],
    is_alive: Callable[[], bool] = lambda: True,
) -> None:
    """Serve until a signal comes, or there is nobody any more who would answer."""
    import uvicorn

    _log_accesses()
    announced = False

    async def watch() -> None:
        nonlocal announced
        if not announced:  # the first time is when the server has started
            announced = True
            announce()
        if not is_alive():  # nobody would answer what still waits
            server.should_exit = server.force_exit = True

    def leave(*_: object) -> None:
        server.should_exit = True

    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=listen.drain_seconds,
        callback_notify=watch,
        timeout_notify=1,
    )
    server = uvicorn.Server(config)
    # uvicorn has handlers of its own, and repeats a signal to ours when it has ended.
    before = {kind: signal.signal(kind, leave) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run([listener])
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _log_accesses() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    access = logging.getLogger("starquill.access")
    access.handlers = [handler]
    access.setLevel(logging.INFO)
    access.propagate = False


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def print_rows(rows: Mapping[str, str]) -> None:
    for title, value in rows.items():
        print(f"{title + ':':<9} {printable(value)}", flush=True)


def _print_block(engine: Engine, options: ServerOptions, listener: socket.socket) -> None:
    from starquill.engine.bench import subject

    loaded, settings, about = engine.model, engine.options, subject(engine.model)
    schemes = {scheme for counts in about.schemes.values() for scheme in counts}
    context = settings.context or loaded.config.context_length
    print_rows(
        {
            "address": address_of(listener),
            "model": f"{options.name} ({loaded.folder})",
            "weights": f"{', '.join(sorted(schemes))}; {about.weight_bytes / 1e6:.1f} MB a step",
            "slots": str(settings.slots),
            "queue": str(settings.queue),
            "context": f"{context} tokens",
            "adapters": ", ".join(one.alias for one in loaded.adapters.list()) or "none",
            "cache": f"at most {engine.stats().cache_bytes / 2**20:.1f} MiB",
        }
    )
