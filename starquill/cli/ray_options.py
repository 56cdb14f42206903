"""Options for work on a Ray cluster."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from starquill.errors import BadRequestError
from starquill.placement.stages import Stages, read_stages

if TYPE_CHECKING:
    from starquill.server.on_ray import ClusterOptions

_RANGE = re.compile(r"([0-9]{1,6})-([0-9]{1,6})")


def _option(help: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, **settings)


@dataclass(frozen=True)
class RayOptions:
    """Whether to work on a Ray cluster, and how much of it to take."""

    ray: Annotated[
        bool, _option("Run replicas of the model on a Ray cluster.", "--ray", show_default=False)
    ] = False
    replicas: Annotated[int | None, _option("Replicas; 1 if not given.")] = None
    autoscale: Annotated[
        str | None,
        _option("As many replicas, by how many requests wait.", metavar="MIN-MAX"),
    ] = None
    ray_address: Annotated[
        str | None,
        _option("The cluster; if not given, this machine's, or one for now.", metavar="ADDRESS"),
    ] = None
    replica_cpus: Annotated[float | None, _option("CPUs of each replica; 1 if not given.")] = None
    replica_gpus: Annotated[float | None, _option("GPUs of each replica; 0 if not given.")] = None

    def chosen(self) -> ClusterOptions | None:
        """As `server.on_ray` takes them; None for no cluster."""
        rest = (
            self.replicas,
            self.autoscale,
            self.ray_address,
            self.replica_cpus,
            self.replica_gpus,
        )
        if not self.ray:
            if any(value is not None for value in rest):
                raise BadRequestError(
                    "--replicas, --autoscale, --ray-address, --replica-cpus and --replica-gpus "
                    "need --ray"
                )
            return None
        least, most = self._size()
        cpus = 1.0 if self.replica_cpus is None else self.replica_cpus
        gpus = self.replica_gpus or 0.0
        for name, value in (("cpus", cpus), ("gpus", gpus)):
            if not 0 <= value < 1e6:
                raise BadRequestError(f"--replica-{name} is {value} (expected 0 or more)")
        if importlib.util.find_spec("ray") is None:
            raise BadRequestError("--ray needs more packages; pip install 'starquill[serve,ray]'")
        from starquill.server.on_ray import ClusterOptions

        return ClusterOptions(self.ray_address, least, most, cpus, gpus)

    def _size(self) -> tuple[int, int]:
        if self.autoscale is None:
            count = 1 if self.replicas is None else self.replicas
            if count < 1:
                raise BadRequestError(f"--replicas is {count} (expected 1 or more)")
            return count, count
        if self.replicas is not None:
            raise BadRequestError("--replicas and --autoscale are both given; give one")
        found = _RANGE.fullmatch(self.autoscale)
        least, most = (int(found[1]), int(found[2])) if found else (0, 0)
        if not 1 <= least <= most:
            raise BadRequestError(
                f"--autoscale is {self.autoscale!r} (expected MIN-MAX, as 1-4, MIN 1 or more)"
            )
        return least, most


@dataclass(frozen=True)
class SplitOptions:
    """What a cluster makes possible besides replicas."""

    stages: Annotated[
        str | None,
        _option(
            "Split the model's layers among so many processes, or as 0-11,12-29.",
            metavar="N|LAYERS",
        ),
    ] = None
    models: Annotated[
        Path | None,
        _option("Serve several models, each with options of its own, from a YAML file."),
    ] = None

    def check(self, ray: RayOptions) -> None:
        """Refuse what makes no sense, before a model is loaded."""
        if not ray.ray and (self.stages is not None or self.models is not None):
            raise BadRequestError("--stages and --models need --ray")


def stages_of(stages: str | None, ray: RayOptions) -> Stages | None:
    """The stages of each replica; None for one, which has the whole model."""
    found = None if stages is None else read_stages(stages)
    if found is None or found.count == 1:
        return None
    if ray.replica_gpus:
        raise BadRequestError("--replica-gpus cannot be had with --stages, which compute on CPUs")
    if ray.replica_cpus == 0:
        raise BadRequestError("--replica-cpus is 0 (expected more than 0 with --stages)")
    return found
