from typing import Any

import pytest

from drivetrain_launcher import LaunchSettings


def test_what_agrees_is_allowed() -> None:
    assert (LaunchSettings().num_processes, LaunchSettings().num_nodes) == (None, 1)
    assert LaunchSettings(num_processes=4, num_nodes=2, processes_per_node=2).num_processes == 4
    assert LaunchSettings(num_nodes=4, min_nodes=4).min_nodes == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_processes", 0),
        ("processes_per_node", 0),
        ("num_nodes", 0),
        ("node_rank", 1),
        ("node_rank", -1),
        ("master_port", 65536),
        ("rdzv_backend", "etcd"),
        ("rdzv_timeout_seconds", 0.0),
        ("monitor_interval_seconds", float("nan")),
        ("shutdown_timeout_seconds", float("inf")),
        ("max_restarts", -1),
        ("max_requeues", -1),
        ("threads_per_process", 0),
        ("tail", -1),
        ("prefix", "some"),
    ],
)
def test_a_wrong_value_is_named_first(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field}={value!r}: "):
        LaunchSettings(**{field: value})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"node_silence_seconds": 0}, "node_silence_seconds=0: a finite number of seconds above 0"),
        ({"show_ranks": (0, -1)}, r"show_ranks=\(0, -1\): ranks count from 0"),
        ({"num_processes": 5, "num_nodes": 2}, "num_processes=5: .*evenly over num_nodes=2"),
        (
            {"num_processes": 4, "num_nodes": 2, "processes_per_node": 4},
            "num_processes=4: .*makes 8; say one of the two",
        ),
        ({"module": True, "program": True}, "module=True: "),
        ({"num_nodes": 4, "min_nodes": 5}, "min_nodes=5: num_nodes=4 is the most that take part"),
    ],
)
def test_what_contradicts_is_refused_with_both(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        LaunchSettings(**values)
