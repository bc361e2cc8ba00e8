import pytest

from drivetrain_launcher import LaunchError
from drivetrain_launcher.run.notebook.accelerate_arguments import read_port


def test_what_accelerate_does_by_default_is_accepted() -> None:
    arguments = {
        "use_port": "29500",
        "master_addr": "127.0.0.1",
        "node_rank": 0,
        "num_nodes": 1,
        "rdzv_backend": "static",
        "rdzv_endpoint": "",
        "rdzv_conf": None,
        "rdzv_id": "none",
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "log_line_prefix_template": None,
    }
    assert read_port(arguments, master_port=0) == 29500
    assert read_port({}, master_port=29501) == 29501
    assert read_port({}, master_port=0) == 0


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("master_addr", "node7", "drivetrain launch --num-nodes N"),
        ("node_rank", 1, "drivetrain launch --num-nodes N"),
        ("num_nodes", 2, "drivetrain launch --num-nodes N"),
        ("rdzv_backend", "c10d", "leave it out"),
        ("rdzv_endpoint", "node7:1", "leave it out"),
        ("rdzv_conf", {"timeout": 1}, "leave it out"),
        ("rdzv_id", "run", "leave it out"),
        ("max_restarts", 3, "call again"),
        ("monitor_interval", 5, "leave it out"),
        ("log_line_prefix_template", "[${rank}]", r"each line begins with `\[rank N\]`"),
    ],
)
def test_what_is_not_supported_is_refused_by_name_with_a_remedy(
    name: str, value: object, remedy: str
) -> None:
    with pytest.raises(LaunchError, match=f"{name}=.*{remedy}"):
        read_port({name: value}, master_port=0)


def test_an_unknown_argument_is_refused_with_the_closest_one() -> None:
    with pytest.raises(TypeError, match="no argument 'num_proceses'; did you mean num_processes"):
        read_port({"num_proceses": 2}, master_port=0)


@pytest.mark.parametrize("port", ["many", -1, 65536, 1.5, True])
def test_a_port_that_is_none_is_refused(port: object) -> None:
    with pytest.raises(LaunchError, match="must be a port, 1 to 65535, or 0 for any free one"):
        read_port({"use_port": port}, master_port=0)


def test_two_ports_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(LaunchError, match="use_port='1' and master_port=2: they are the same setting"):
        read_port({"use_port": "1"}, master_port=2)
