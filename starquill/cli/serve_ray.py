"""`starquill serve --ray`: the front, in this process, of replicas on a cluster."""

from __future__ import annotations

import socket
from functools import partial
from typing import TYPE_CHECKING

from starquill.cli import serve
from starquill.server.front import Front, FrontMetrics, create_front
from starquill.server.on_ray import ClusterOptions, deployed
from starquill.server.options import ServerOptions

if TYPE_CHECKING:
    from starquill.cli.serve import ListenOptions, LoadingOptions, WorkOptions


def serve_on_ray(
    listen: ListenOptions,
    work: WorkOptions,
    loading: LoadingOptions,
    cluster: ClusterOptions,
    hosts: tuple[str, ...] | None,
) -> int:
    """Serve until a signal ends it, and then take the replicas away; 0."""
    make = partial(serve.prepared, listen, work, loading)
    front = ServerOptions(
        name="front",
        api_key=listen.key(),
        cors=tuple(listen.cors or ()),
        most_body_bytes=listen.max_body_bytes(),
        hosts=hosts,
    )
    with serve.bound(listen.host, listen.port) as listener:
        # Whoever has this address now has followed on whoever had it.
        name = f"starquill-{socket.gethostname()}-{listener.getsockname()[1]}"
        with deployed(make, name, cluster, work.chosen()) as replicas:
            metrics = FrontMetrics()
            front_app = Front(replicas.forward, replicas.lost, replicas.replicas, metrics)
            rows = {
                "address": serve.address_of(listener),
                "model": loading.model.model,
                "replicas": _counted(cluster),
                "cluster": cluster.address or "this machine's",
            }
            app = create_front(front_app, front, metrics)
            serve.listen_until_signal(app, listener, listen, partial(serve.print_rows, rows))
    return 0


def _counted(cluster: ClusterOptions) -> str:
    if cluster.most == cluster.least:
        return str(cluster.least)
    return f"{cluster.least} to {cluster.most}, as requests wait"
