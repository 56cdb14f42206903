"""Replicas of the application on Ray Serve, and the way to them.

Ray Serve starts replicas where there is room, starts others for those that die or whose engine has
ended, and more or fewer of them as calls wait. It does not send a call again that a replica had
begun: `front.Front` does.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import Message

from starquill.engine.engine import Engine
from starquill.engine.loop import EngineLoop
from starquill.errors import BusyError, StarquillError
from starquill.server.app import create_app
from starquill.server.calling import Call, EngineEndedError, messages
from starquill.server.options import ServerOptions
from starquill.types import EngineOptions

log = logging.getLogger("starquill")

Make = Callable[[], tuple[Engine, ServerOptions]]
HEALTH_PERIOD_SECONDS = 2.0
UPSCALE_DELAY_SECONDS = 10.0  # for so long requests wait before there are more replicas
DEPLOYMENT = "replica"
RUNNING = "RUNNING"


@dataclass(frozen=True)
class ClusterOptions:
    """Which cluster, and how much of it: `least` to `most` replicas of `cpus` and `gpus` each."""

    address: str | None = None
    least: int = 1
    most: int = 1
    cpus: float = 1.0
    gpus: float = 0.0


class Replica:
    """The application with an engine and its thread, in a process of its own."""

    def __init__(self, make: Make) -> None:
        engine, options = make()
        self._loop = EngineLoop(engine)
        self._loop.__enter__()
        # Whom to let in is asked at the front.
        options = replace(options, api_key=None, cors=())
        self._app = create_app(engine, options, self._alive)

    def _alive(self) -> bool:
        return self._loop.is_alive

    async def answer(self, call: Call) -> AsyncIterator[Message]:
        async for message in messages(self._app, call, self._alive):
            yield message

    def check_health(self) -> None:
        """Ray Serve asks this, and replaces a replica for which it raises."""
        if not self._alive():
            raise EngineEndedError("the engine's thread has ended")


@contextmanager
def connected(cluster: ClusterOptions) -> Iterator[None]:
    """With a connection to the cluster; without an address to the one here, or one of its own."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = cluster.address or "of this machine"
        raise StarquillError(f"cannot reach the Ray cluster {where}: {error}") from None
    try:
        if (room := _room(ray.nodes(), cluster)) < cluster.least:
            log.warning(
                "the cluster has room for %d of %d replicas (each %g CPUs, %g GPUs); the others "
                "start when there is more",
                *(room, cluster.least, cluster.cpus, cluster.gpus),
            )
        yield
    finally:
        ray.shutdown()


def _room(nodes: Sequence[Mapping[str, Any]], cluster: ClusterOptions) -> int:
    """How many replicas the nodes could have if they had nothing else."""
    wanted = {"CPU": cluster.cpus, "GPU": cluster.gpus}
    room = 0
    for node in nodes:
        has = node["Resources"] if node["Alive"] else {}
        fitting = [has.get(kind, 0.0) // much for kind, much in wanted.items() if much]
        room += int(min(fitting, default=cluster.least))
    return room


@dataclass(frozen=True)
class Deployed:
    """Replicas that run. `lost` are the errors by which one tells that it will never answer."""

    forward: Callable[[Call], AsyncIterator[Message]]
    replicas: Callable[[], int]
    lost: tuple[type[Exception], ...]


@contextmanager
def deployed(
    make: Make, name: str, cluster: ClusterOptions, engine: EngineOptions
) -> Iterator[Deployed]:
    """Replicas under a name, in place of those that a server of this name left behind."""
    with connected(cluster):
        from ray import exceptions, serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled")
        try:
            handle = _run(make, name, cluster, engine)
            lost = (
                exceptions.RayActorError,
                exceptions.WorkerCrashedError,
                exceptions.NodeDiedError,
                exceptions.ObjectLostError,
                EngineEndedError,
            )
            yield Deployed(_forwarding(handle), lambda: running_replicas(name), lost)
        finally:
            serve.delete(name)


def _run(make: Make, name: str, cluster: ClusterOptions, engine: EngineOptions) -> Any:
    from ray import serve

    size: dict[str, Any] = {"num_replicas": cluster.least}
    if cluster.most > cluster.least:
        # By queue: more when calls wait although every slot is taken.
        size = {
            "autoscaling_config": {
                "min_replicas": cluster.least,
                "max_replicas": cluster.most,
                "target_ongoing_requests": engine.slots,
                "upscale_delay_s": UPSCALE_DELAY_SECONDS,
            }
        }
    deployment = serve.deployment(
        Replica,
        name=DEPLOYMENT,
        # What waits does so at the front, and goes to whichever replica has a slot first.
        max_ongoing_requests=engine.slots,
        max_queued_requests=max(engine.queue, 1) * cluster.most,
        health_check_period_s=HEALTH_PERIOD_SECONDS,
        ray_actor_options={"num_cpus": cluster.cpus, "num_gpus": cluster.gpus},
        **size,
    )
    try:
        return serve.run(deployment.bind(make), name=name, route_prefix=None)
    except RuntimeError as error:
        raise StarquillError(f"the replicas did not start: {error}") from None


def _forwarding(handle: Any) -> Callable[[Call], AsyncIterator[Message]]:
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


def running_replicas(name: str) -> int:
    from ray import serve

    application = serve.status().applications.get(name)
    if application is None or DEPLOYMENT not in application.deployments:
        return 0
    return application.deployments[DEPLOYMENT].replica_states.get(RUNNING, 0)
