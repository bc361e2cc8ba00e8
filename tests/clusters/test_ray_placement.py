import pytest

from drivetrain_clusters import ClusterError
from drivetrain_clusters.ray.cluster import Ray
from drivetrain_clusters.ray.placement import ray_variables

PLACE = {
    "job_id": "train-1",
    "num_nodes": 2,
    "node_rank": 1,
    "master_addr": "10.0.0.1",
    "master_port": 41234,
    "restart_count": 3,
}
GIVEN = ray_variables(PLACE, devices=("0", "2"))


def test_a_launcher_reads_what_the_driver_sets() -> None:
    place = Ray().placement({"PATH": "/bin", **GIVEN})
    assert place is not None
    assert (place.cluster, place.job_id, place.restart_count) == ("ray", "train-1", 3)
    assert (place.num_nodes, place.node_rank, place.num_tasks, place.task_rank) == (2, 1, 2, 1)
    assert (place.master_addr, place.master_port, place.devices) == ("10.0.0.1", 41234, ("0", "2"))
    assert not place.is_one_task_per_rank
    assert place.sources["node_rank"] == "DRIVETRAIN_RAY_NODE_RANK"
    assert Ray().requeue(place) is False


def test_without_devices_none_are_bound() -> None:
    place = Ray().placement({name: text for name, text in GIVEN.items() if name != "DRIVETRAIN_RAY_DEVICES"})
    assert place is not None
    assert place.devices is None


def test_another_environment_is_no_place() -> None:
    assert Ray().placement({"RAY_ADDRESS": "127.0.0.1:6379", "RAY_JOB_ID": "1"}) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"DRIVETRAIN_RAY_NODES": None}, "DRIVETRAIN_RAY_NODES: not set, but DRIVETRAIN_RAY_ID is"),
        ({"DRIVETRAIN_RAY_NODE_RANK": "2"}, "DRIVETRAIN_RAY_NODE_RANK=2: contradicts DRIVETRAIN_RAY_NODES=2"),
        ({"DRIVETRAIN_RAY_NODES": "two"}, "DRIVETRAIN_RAY_NODES='two': must be an integer of at least 1"),
        ({"DRIVETRAIN_RAY_PORT": "70000"}, "DRIVETRAIN_RAY_PORT=70000: must be a port"),
    ],
)
def test_variables_that_contradict_are_refused(changes: dict[str, str | None], message: str) -> None:
    merged = {**GIVEN, **changes}
    with pytest.raises(ClusterError, match=message):
        Ray().placement({name: text for name, text in merged.items() if text is not None})
