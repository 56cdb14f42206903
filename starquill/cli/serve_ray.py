"""`starquill serve --ray`: the front, in this process, of replicas on a cluster."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starquill.cli import serve
from starquill.cli.model_file import changed, read_models
from starquill.cli.options import ModelOptions
from starquill.cli.ray_options import RayOptions, stages_of
from starquill.cli.run import load_model
from starquill.engine.stages import joined
from starquill.errors import BadRequestError
from starquill.placement.stages import StageOf
from starquill.server.by_model import ByModel
from starquill.server.front import Front, FrontMetrics, create_front
from starquill.server.on_ray import Begin, ClusterOptions, Service, deployed
from starquill.server.options import ServerOptions

if TYPE_CHECKING:
    from starquill.cli.serve import ListenOptions, LoadingOptions, WorkOptions
    from starquill.engine.engine import Engine
    from starquill.engine.loaded import LoadedModel


@dataclass(frozen=True)
class Serving:
    """All that was asked for one model."""

    listen: ListenOptions
    work: WorkOptions
    loading: LoadingOptions
    ray: RayOptions
    stages: str | None

    def service(self) -> Service:
        """What a cluster needs to know of it; BadRequestError for options that make no sense."""
        cluster, split = self.ray.chosen(), stages_of(self.stages, self.ray)
        assert cluster is not None
        loading = self.loading
        loading.xlora.check()
        loading.lora.chosen()
        if loading.lora.allow_lora_updates and cluster.most > 1:
            raise BadRequestError(
                "--allow-lora-updates needs a single replica: others would not have what one loads"
            )
        if split is not None:
            cluster = replace(cluster, stages=split.count)
        # Whom to let in is the front's business, and so is the file that has the key.
        own = replace(self, listen=replace(self.listen, api_key=None, api_key_file=None, cors=None))
        return Service(partial(make_replica, own), self.work.chosen(), cluster)

    def with_options(self, name: str, own: Mapping[str, Any]) -> Serving:
        """For a model of this name, with options of its `own` in place of these."""
        loading = self.loading
        return Serving(
            changed(replace(self.listen, name=[name]), own),
            changed(self.work, own),
            replace(
                loading,
                model=changed(loading.model, own),
                quantize=changed(loading.quantize, own),
                xlora=changed(loading.xlora, own),
                lora=changed(loading.lora, own),
            ),
            changed(self.ray, own),
            own.get("stages", self.stages),
        )

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self.loading.lora.chosen())


def servings(path: Path | None, asked: Serving, which: str | None) -> dict[str, Serving]:
    """The models to be served, by name: `asked`, or those of a file with `asked` for the rest.

    Raises BadRequestError with all that is wrong with any of them.
    """
    if path is None:
        asked.service()
        return {asked.loading.model.model: asked}
    if which is not None or asked.loading.model != ModelOptions():
        raise BadRequestError("--models has the models and how to load them; name none beside it")
    if asked.listen.name or asked.loading.lora.allow_lora_updates:
        raise BadRequestError(
            "--name and --allow-lora-updates cannot be had with --models: names and adapters are "
            "those of the file"
        )
    found = {name: asked.with_options(name, own) for name, own in read_models(path).items()}
    problems = []
    for name, one in found.items():
        try:
            one.service()
        except BadRequestError as error:
            problems.append(f"{name}: {error}")
    if not problems:
        counts = Counter([*found, *(a for one in found.values() for a in one.adapters)])
        problems = [f"{name} is the name of {n}" for name, n in counts.items() if n > 1]
    if problems:
        raise BadRequestError(f"{path}: {'; '.join(problems)}")
    return found


def make_replica(serving: Serving, begin: Begin | None) -> tuple[Engine, ServerOptions]:
    """What a replica answers with; `begin` starts its other stages, where it has any."""
    loaded = None
    if begin is not None:
        rest = begin(partial(load_stage, serving))
        own = load_stage(serving, 0)
        loaded = joined(own, rest())
    return serve.prepared(serving.listen, serving.work, serving.loading, None, loaded)


def load_stage(serving: Serving, number: int) -> LoadedModel:
    stages, loading = stages_of(serving.stages, serving.ray), serving.loading
    assert stages is not None
    stage = StageOf(stages, number)
    return load_model(loading.model, loading.quantize, loading.xlora, stage)


def serve_on_ray(
    listen: ListenOptions,
    models: Mapping[str, Serving],
    cluster: ClusterOptions,
    hosts: tuple[str, ...] | None,
) -> int:
    """Serve until a signal ends it, and then take the replicas away; 0."""
    front = ServerOptions(
        name="front",
        api_key=listen.key(),
        cors=tuple(listen.cors or ()),
        most_body_bytes=listen.max_body_bytes(),
        hosts=hosts,
    )
    services = {name: one.service() for name, one in models.items()}
    with serve.bound(listen.host, listen.port) as listener:
        # Whoever has this address now has followed on whoever had it.
        name = f"starquill-{socket.gethostname()}-{listener.getsockname()[1]}"
        with deployed(services, name) as replicas:
            metrics = FrontMetrics()
            forward = next(iter(replicas.forwards.values()))
            if len(services) > 1:
                adapters = {model: one.adapters for model, one in models.items()}
                forward = ByModel(replicas.forwards, adapters).forward
            front_app = Front(forward, replicas.lost, replicas.replicas, metrics)
            rows = {
                "address": serve.address_of(listener),
                "model": ", ".join(models),
                "replicas": "; ".join(_counted(one.cluster) for one in services.values()),
                "cluster": cluster.address or "this machine's",
            }
            app = create_front(front_app, front, metrics)
            serve.listen_until_signal(app, listener, listen, partial(serve.print_rows, rows))
    return 0


def _counted(cluster: ClusterOptions) -> str:
    told = str(cluster.least)
    if cluster.most > cluster.least:
        told = f"{cluster.least} to {cluster.most}, as requests wait"
    return told if cluster.stages == 1 else f"{told}, of {cluster.stages} stages each"
