import subprocess
import sys

import pytest

from drivetrain_launcher import LaunchSettings


def test_defaults_are_allowed() -> None:
    settings = LaunchSettings()
    assert settings.num_processes is None
    assert settings.num_nodes == 1


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


def test_ranks_to_show_count_from_0() -> None:
    with pytest.raises(ValueError, match=r"^show_ranks=\(0, -1\): ranks count from 0"):
        LaunchSettings(show_ranks=(0, -1))


def test_processes_of_all_nodes_must_split_evenly() -> None:
    with pytest.raises(ValueError, match=r"^num_processes=5: .*evenly over num_nodes=2"):
        LaunchSettings(num_processes=5, num_nodes=2)


def test_the_two_ways_to_count_processes_must_agree() -> None:
    assert LaunchSettings(num_processes=4, num_nodes=2, processes_per_node=2).num_processes == 4
    with pytest.raises(ValueError, match=r"^num_processes=4: .*makes 8; say one of the two"):
        LaunchSettings(num_processes=4, num_nodes=2, processes_per_node=4)


def test_a_script_is_a_module_or_a_program_not_both() -> None:
    with pytest.raises(ValueError, match=r"^module=True: "):
        LaunchSettings(module=True, program=True)


def test_settings_are_read_without_torch() -> None:
    source = (
        "import sys; sys.modules['torch'] = None\n"
        "from drivetrain_launcher import LaunchSettings; print(LaunchSettings().num_nodes)"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "1\n", done.stderr


def test_the_fewest_nodes_are_at_most_the_most() -> None:
    assert LaunchSettings(num_nodes=4, min_nodes=4).min_nodes == 4
    with pytest.raises(ValueError, match=r"^min_nodes=5: num_nodes=4 is the most that take part"):
        LaunchSettings(num_nodes=4, min_nodes=5)


def test_a_silence_of_no_seconds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^node_silence_seconds=0: a finite number of seconds above 0"):
        LaunchSettings(node_silence_seconds=0)
