"""A Ray cluster of two nodes on this machine, for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NO_RAY = "needs Ray: pip install 'starquill[ray]'"
STORE_BYTES = 80_000_000  # Ray takes no less
# Ray's processes hand their environment on to those they start.
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def two_nodes(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """The cluster's address. Each node has one CPU, so two replicas are on two nodes."""
    pytest.importorskip("ray", reason=NO_RAY)
    from ray.cluster_utils import Cluster

    for name, value in SETTINGS.items():
        patch.setenv(name, value)
    path = os.environ.get("PYTHONPATH")
    patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{path}" if path else str(ROOT))
    node = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        yield cluster.address
    finally:
        cluster.shutdown()


def processes(title: str) -> list[int]:
    """Those that this process, or one that it started, has started under such a title.

    Ray writes into its processes' titles what they are.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        pid = int(path.parent.name)
        try:
            if path.read_bytes().startswith(title.encode()) and os.getpid() in _parents(pid):
                found.append(pid)
        except OSError:  # it has ended meanwhile
            continue
    return found


def _parents(pid: int) -> list[int]:
    found = []
    while pid > 1:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        pid = int(stat.rpartition(")")[2].split()[1])
        found.append(pid)
    return found
