"""Clusters as plug-ins: a process's place in a job of Slurm, MPI, Kubernetes or Ray, and how a job is submitted.

`protocol.py` defines a cluster, `registry.py` finds the installed ones, and each has a folder. `jobs/` submits,
follows and cancels.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_clusters.errors import ClusterError as ClusterError
    from drivetrain_clusters.protocol import Cluster as Cluster
    from drivetrain_clusters.protocol import JobPlacement as JobPlacement
    from drivetrain_clusters.protocol import JobRequest as JobRequest
    from drivetrain_clusters.protocol import Submission as Submission
    from drivetrain_clusters.registry import cluster_names as cluster_names
    from drivetrain_clusters.registry import find_placement as find_placement
    from drivetrain_clusters.registry import make_cluster as make_cluster

# Module -> its public names.
_NAMES = {
    "errors": "ClusterError",
    "protocol": "Cluster JobPlacement JobRequest Submission",
    "registry": "cluster_names find_placement make_cluster",
}

if not TYPE_CHECKING:  # else a type checker would accept any name
    from drivetrain_messages.lazy_names import lazy_names as _lazy_names

    __all__, __getattr__, __dir__ = _lazy_names(__name__, _NAMES)
