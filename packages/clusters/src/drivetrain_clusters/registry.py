"""Find the clusters of the installed packages, by their entry points, and the place of this process in a job."""

from collections.abc import Callable, Mapping
from typing import cast

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.protocol import Cluster, JobPlacement
from drivetrain_config.plugins.installed import entry_points
from drivetrain_messages import suggest

CLUSTERS_GROUP = "drivetrain.clusters"


def cluster_names() -> tuple[str, ...]:
    """Return the names of the installed clusters, sorted, without importing them."""
    return tuple(point.name for point in entry_points(CLUSTERS_GROUP))


def make_cluster(name: str) -> Cluster:
    """Construct a cluster by its name, importing its module only now; a ClusterError lists the known ones."""
    for point in entry_points(CLUSTERS_GROUP):
        if point.name == name:
            return cast("Callable[[], Cluster]", point.load())()
    known = cluster_names()
    raise ClusterError(
        f"cluster {name}: no installed package provides it{suggest(name, known)}; there are {', '.join(known)}"
    )


def find_placement(environment: Mapping[str, str], *, asked: str = "auto") -> JobPlacement | None:
    """Return this process's place in a job of the `asked` cluster ("auto": of any cluster); None outside any job.

    An MPI launch inside a Slurm job belongs to MPI: the program that started this process counts. Each plug-in
    recognises the variables that only its own task starter sets. ClusterError if two clusters claim the process, or
    the variables of one contradict each other.
    """
    names = cluster_names() if asked == "auto" else (asked,)
    found = [place for name in names if (place := make_cluster(name).placement(environment)) is not None]
    if len(found) > 1:
        claims = " and ".join(f"{place.cluster} (job {place.job_id})" for place in found)
        raise ClusterError(
            f"{claims} each started this process, by its environment: say --cluster NAME for one"
        )
    return found[0] if found else None
