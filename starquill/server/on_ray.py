"""Replicas of applications on Ray Serve, and the way to them.

Ray Serve starts replicas where there is room, starts others for those that die, and more or fewer
of them as calls wait. A replica whose engine or one of whose stages has ended ends itself. Ray
Serve does not send a call again that a replica had begun: `front.Front` does.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from starlette.types import Message

from starquill.engine.engine import Engine
from starquill.engine.loaded import Stage
from starquill.engine.loop import EngineLoop
from starquill.errors import BusyError, StarquillError
from starquill.server.app import create_app
from starquill.server.calling import Call, EngineEndedError, messages
from starquill.server.options import ServerOptions
from starquill.server.ray_stages import LoadStage, begin_stages
from starquill.types import EngineOptions

log = logging.getLogger("starquill")

# Lets a model's other stages load, and waits for them.
Begin = Callable[[LoadStage], Callable[[], Sequence[Stage]]]
MakeReplica = Callable[[Begin | None], tuple[Engine, ServerOptions]]
HEALTH_PERIOD_SECONDS = 2.0
UPSCALE_DELAY_SECONDS = 10.0  # for so long requests wait before there are more replicas
DEPLOYMENT = "replica"
RUNNING = "RUNNING"
ENDED = 1  # the exit code of a replica that cannot answer any more


@dataclass(frozen=True)
class ClusterOptions:
    """Which cluster, and how much of it: `least` to `most` replicas.

    A replica is `stages` processes, each of `cpus` and `gpus`.
    """

    address: str | None = None
    least: int = 1
    most: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    stages: int = 1


@dataclass(frozen=True)
class Service:
    """A model that is served: what makes its engine, and how much of the cluster it has."""

    make: MakeReplica
    engine: EngineOptions
    cluster: ClusterOptions


def end_process() -> NoReturn:
    """At once: calls that are here are lost, so that the front has other replicas answer them."""
    log.error("the engine's thread or one of the stages has ended, and so does this replica")
    os._exit(ENDED)


class Replica:
    """The application with an engine and its thread, in a process of its own, which `end` ends."""

    def __init__(
        self,
        make: MakeReplica,
        cluster: ClusterOptions = ClusterOptions(),
        end: Callable[[], NoReturn] = end_process,
    ) -> None:
        self._end = end
        count, cpus = cluster.stages, cluster.cpus
        begin = None if count == 1 else partial(begin_stages, count=count, cpus=cpus)
        engine, options = make(begin)
        self._stages = engine.model.stages
        self._loop = EngineLoop(engine)
        self._loop.__enter__()
        # Whom to let in is asked at the front.
        options = replace(options, api_key=None, cors=())
        self._app = create_app(engine, options, self._alive)

    def _alive(self) -> bool:
        return self._loop.is_alive and all(stage.is_alive for stage in self._stages)

    async def answer(self, call: Call) -> AsyncIterator[Message]:
        try:
            async for message in messages(self._app, call, self._alive):
                if not self._alive():  # what comes now is about that
                    self._end()
                yield message
        except EngineEndedError:
            self._end()

    def check_health(self) -> None:
        """Ray Serve asks this every now and then."""
        if not self._alive():
            self._end()


@contextmanager
def connected(cluster: ClusterOptions, sizes: Sequence[ClusterOptions] = ()) -> Iterator[None]:
    """With a connection to the cluster; without an address to the one here, or one of its own.

    Warns where there is no room for all `sizes` together; for `cluster` alone, if not given.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = cluster.address or "of this machine"
        raise StarquillError(f"cannot reach the Ray cluster {where}: {error}") from None
    try:
        _warn_of_room(ray.nodes(), sizes or (cluster,))
        yield
    finally:
        ray.shutdown()


def _warn_of_room(nodes: Sequence[Mapping[str, Any]], sizes: Sequence[ClusterOptions]) -> None:
    placed, wanted = room(nodes, sizes), sum(size.least for size in sizes)
    if placed < wanted:
        each = {f"{size.stages} x {size.cpus:g} CPUs, {size.gpus:g} GPUs": None for size in sizes}
        log.warning(
            "the cluster has room for %d of %d replicas (each %s); the others start when there is "
            "more",
            *(placed, wanted, " or ".join(each)),
        )


def room(nodes: Sequence[Mapping[str, Any]], sizes: Sequence[ClusterOptions]) -> int:
    """How many of the least replicas the nodes could have together if they had nothing else."""
    free = [dict(node["Resources"]) for node in nodes if node["Alive"]]
    placed = 0
    for size in sizes:
        wanted = {kind: n for kind, n in (("CPU", size.cpus), ("GPU", size.gpus)) if n}
        for _ in range(size.least):
            places = [_taken(free, wanted) for _ in range(size.stages)]
            placed += all(places)
    return placed


def _taken(free: list[dict[str, float]], wanted: Mapping[str, float]) -> bool:
    """Whether a node had `wanted`; it has less of it then."""
    for has in free:
        if all(has.get(kind, 0.0) >= much for kind, much in wanted.items()):
            for kind, much in wanted.items():
                has[kind] -= much
            return True
    return False


Forward = Callable[[Call], AsyncIterator[Message]]


@dataclass(frozen=True)
class Deployed:
    """Replicas that run. `lost` are the errors by which one tells that it will never answer.

    `forwards` and `replicas` go by a model's name.
    """

    forwards: Mapping[str, Forward]
    replicas: Callable[[], dict[str, int]]
    lost: tuple[type[Exception], ...]


@contextmanager
def deployed(services: Mapping[str, Service], name: str) -> Iterator[Deployed]:
    """Replicas of each model, in place of those that a server of this name left behind."""
    clusters = [service.cluster for service in services.values()]
    with connected(clusters[0], clusters):
        from ray import exceptions, serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled")
        applications = {model: f"{name}-{number}" for number, model in enumerate(services)}
        try:
            for left in _applications(name) - set(applications.values()):
                serve.delete(left)
            handles = _run({applications[model]: one for model, one in services.items()})
            lost = (
                exceptions.RayActorError,
                exceptions.WorkerCrashedError,
                exceptions.NodeDiedError,
                exceptions.ObjectLostError,
                EngineEndedError,
            )
            forwards = {
                model: _forwarding(handle) for model, handle in zip(services, handles, strict=True)
            }
            yield Deployed(forwards, partial(running_replicas, applications), lost)
        finally:
            for left in _applications(name):
                serve.delete(left)


def _applications(name: str) -> set[str]:
    """The applications of the server of this name: one for each of its models."""
    from ray import serve

    own = re.compile(re.escape(name) + r"-[0-9]+")
    return {found for found in serve.status().applications if own.fullmatch(found)}


def _run(services: Mapping[str, Service]) -> list[Any]:
    """Handles of the applications that have these names, when all of them run."""
    from ray import serve

    targets = [
        serve.RunTarget(_deployment(service), name=name, route_prefix=None)
        for name, service in services.items()
    ]
    try:
        return list(serve.run_many(targets))
    except RuntimeError as error:
        raise StarquillError(f"the replicas did not start: {error}") from None


def _deployment(service: Service) -> Any:
    from ray import serve

    cluster, engine = service.cluster, service.engine
    more: dict[str, Any] = {"num_replicas": cluster.least}
    if cluster.most > cluster.least:
        # By queue: more when calls wait although every slot is taken.
        more = {
            "autoscaling_config": {
                "min_replicas": cluster.least,
                "max_replicas": cluster.most,
                "target_ongoing_requests": engine.slots,
                "upscale_delay_s": UPSCALE_DELAY_SECONDS,
            }
        }
    if cluster.stages > 1:
        # A place for each stage, on different nodes if there are so many.
        more["placement_group_bundles"] = [{"CPU": cluster.cpus}] * cluster.stages
        more["placement_group_strategy"] = "SPREAD"
    made: Any = serve.deployment(
        Replica,
        name=DEPLOYMENT,
        # What waits does so at the front, and goes to whichever replica has a slot first.
        max_ongoing_requests=engine.slots,
        max_queued_requests=max(engine.queue, 1) * cluster.most,
        health_check_period_s=HEALTH_PERIOD_SECONDS,
        ray_actor_options={"num_cpus": cluster.cpus, "num_gpus": cluster.gpus},
        **more,
    )
    return made.bind(service.make, cluster)


def _forwarding(handle: Any) -> Forward:
    from ray.serve.exceptions import BackPressureError

    streaming = handle.options(stream=True)

    async def forward(call: Call) -> AsyncIterator[Message]:
        response = streaming.answer.remote(call)
        try:
            async for message in response:
                yield message
        except BackPressureError:
            raise BusyError("all replicas are busy and as many requests wait as may") from None
        finally:
            response.cancel()  # nothing, where it has ended

    return forward


def running_replicas(applications: Mapping[str, str]) -> dict[str, int]:
    """How many run of each model, whose application has such a name."""
    from ray import serve

    found = serve.status().applications
    return {model: _running(found.get(name)) for model, name in applications.items()}


def _running(application: Any) -> int:
    if application is None or DEPLOYMENT not in application.deployments:
        return 0
    count: int = application.deployments[DEPLOYMENT].replica_states.get(RUNNING, 0)
    return count
