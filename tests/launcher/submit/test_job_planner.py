from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_clusters.errors import ClusterError
from drivetrain_config import Layers, environ, sections
from drivetrain_launcher import LaunchError
from drivetrain_launcher.plan.resolved_launch import resolve_launch
from drivetrain_launcher.submit.job_planner import PlannedJob, duration_seconds, plan_job
from drivetrain_launcher.submit.submit_arguments import SubmitArguments

FOLDER = Path("/workspace")
needs_umbrella = pytest.mark.skipif(not sections(only={"run"}), reason="the section run is not installed")


def planned(
    *, said: dict[str, dict[str, Any]] | None = None, variables: dict[str, str] | None = None, **changes: Any
) -> PlannedJob:
    layers = Layers.read(command_line=said or {})
    arguments = SubmitArguments(**{"script": "train.py", "on": "slurm", "layers": layers, **changes})
    return plan_job(arguments, resolve_launch(layers), variables or {}, folder=FOLDER)


def test_a_request_holds_what_was_said() -> None:
    request = planned(
        said={"launch": {"num_nodes": "2", "num_processes": "16", "log_dir": "out"}},
        cpus_per_node=96,
        memory_per_node="900GB",
        time="12h",
        save_seconds=300,
        max_requeues=5,
        option=("partition=gpu",),
        variables={"A": "b"},
        arguments=("--lr", "1e-3"),
    ).request
    assert (request.name, request.folder, request.log_dir) == ("train", FOLDER, Path("out").absolute())
    assert (request.num_nodes, request.processes_per_node, request.accelerators_per_node) == (2, 8, 8)
    assert (request.cpus_per_node, request.memory_per_node, request.time_limit_seconds) == (
        96,
        "900GB",
        43200,
    )
    assert (request.save_seconds, request.max_requeues) == (300, 5)
    assert (request.environment, request.options) == ({"A": "b"}, {"partition": "gpu"})
    # The cluster says the number of nodes.
    line = (
        "drivetrain launch --config=none --log-dir=out --processes-per-node=8 --shutdown-timeout-seconds=300"
    )
    assert request.command == (*line.split(), "train.py", "--lr", "1e-3")


@needs_umbrella
def test_a_request_holds_the_device_and_the_precision_of_the_run() -> None:
    request = planned(said={"run": {"mixed_precision": "fp16"}, "state": {"device": "tpu"}}).request
    assert (request.device, request.mixed_precision) == ("tpu", "fp16")
    assert (planned().request.device, planned().request.mixed_precision) == ("auto", "no")


@pytest.mark.parametrize(
    ("said", "accelerators", "expected"),
    [
        ({}, None, (None, 0)),
        ({}, 4, (None, 4)),
        ({"launch": {"processes_per_node": "2"}}, None, (2, 2)),
        ({"launch": {"processes_per_node": "2"}}, 4, (2, 4)),
        ({"launch": {"processes_per_node": "2"}}, 0, (2, 0)),
        ({"launch": {"processes_per_node": "2"}, "state": {"device": "cpu"}}, None, (2, 0)),
        pytest.param(
            {"launch": {"processes_per_node": "2"}, "run": {"cpu": True}}, None, (2, 0), marks=needs_umbrella
        ),
    ],
)
def test_accelerators_are_one_for_each_process_unless_said(
    said: dict[str, dict[str, Any]], accelerators: int | None, expected: tuple[int | None, int]
) -> None:
    request = planned(said=said, accelerators_per_node=accelerators).request
    assert (request.processes_per_node, request.accelerators_per_node) == expected


def test_what_was_decided_is_told() -> None:
    assert "no accelerator is requested; --accelerators-per-node N" in planned().notes[0]
    assert "8 accelerators on each node" in planned(said={"launch": {"processes_per_node": "8"}}).notes[0]


@pytest.mark.parametrize(
    ("said", "changes", "message"),
    [
        (
            {"state": {"device": "cpu"}},
            {"accelerators_per_node": 4},
            "--accelerators-per-node 4: the run is for the CPU",
        ),
        (
            {"state": {"device": "cuda"}},
            {"accelerators_per_node": 0},
            "--accelerators-per-node 0: the run is for cuda",
        ),
        (
            {"launch": {"processes_per_node": "8"}},
            {"accelerators_per_node": 4},
            "8 processes on each node, but --accelerators-per-node 4",
        ),
        ({}, {"accelerators_per_node": -1}, "--accelerators-per-node -1: say 0 for none"),
        ({}, {"cpus_per_node": 0}, "--cpus-per-node 0: must be at least 1"),
        ({}, {"save_seconds": 0}, "--save-seconds 0: must be at least 1"),
        ({}, {"max_requeues": -1}, "--max-requeues -1: must be at least 0"),
        ({}, {"memory_per_node": "64"}, "memory '64': say a number and a unit"),
        ({}, {"time": "12"}, "time '12': say hours"),
        ({}, {"time": "2m"}, "--time 2m: leaves no time to train before the last --save-seconds 120"),
        ({}, {"name": " "}, "--name ' ': is empty"),
        ({}, {"option": ("a",)}, "--option a: say NAME=VALUE"),
        (
            {"launch": {"shutdown_timeout_seconds": "600"}},
            {},
            "shutdown_timeout_seconds=600 from --shutdown-timeout-seconds on the command line: the cluster kills",
        ),
        (
            {"launch": {"num_nodes": "2", "max_restarts": "3"}},
            {},
            "the launch would fail on every node of the job: --max-restarts 3",
        ),
        ({"launch": {"devices": "0,0"}}, {"accelerators_per_node": 2}, "--devices 0,0: names a device twice"),
        ({"launch": {"devices": "0,5"}}, {"accelerators_per_node": 2}, "counted from 0; there is no 5"),
        ({"launch": {"master_addr": "node0"}}, {}, "the cluster decides the address"),
    ],
)
def test_what_contradicts_or_would_fail_on_a_node_is_refused(
    said: dict[str, dict[str, Any]], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((LaunchError, ClusterError), match=message):
        planned(said=said, **changes)


def test_a_variable_that_contradicts_a_setting_is_refused() -> None:
    message = "--env DRIVETRAIN_STATE__DEBUG=false: contradicts DRIVETRAIN_STATE__DEBUG=true"
    with environ.exported(DRIVETRAIN_STATE__DEBUG="true"), pytest.raises(LaunchError, match=message):
        planned(variables={"DRIVETRAIN_STATE__DEBUG": "false"})


@pytest.mark.parametrize("text", ["a\0b", "\udc80"])
def test_text_that_no_process_can_be_given_is_refused(text: str) -> None:
    for changes in ({"arguments": (text,)}, {"name": text}, {"option": (f"a={text}",)}):
        with pytest.raises(LaunchError, match="has a NUL character or is not UTF-8"):
            planned(**changes)
    with pytest.raises(LaunchError, match="has a NUL character or is not UTF-8"):
        planned(variables={"A": text})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("12:00:00", 43200),
        ("1-12:00:00", 129600),
        ("12h", 43200),
        ("90m", 5400),
        ("1d12h", 129600),
        ("45S", 45),
        ("100:00:00", 360000),
    ],
)
def test_a_time_is_a_clock_or_numbers_with_units(text: str, seconds: int) -> None:
    assert duration_seconds(text) == seconds


@pytest.mark.parametrize("text", ["12", "", "12:00", "1:60:00", "0h", "12h1d", "-1h", "1.5h", "1h; id", "١h"])
def test_another_form_is_refused_with_the_allowed_ones(text: str) -> None:
    with pytest.raises(LaunchError, match="say hours, minutes and seconds, 12:00:00, or units"):
        duration_seconds(text)


@given(st.integers(0, 30), st.integers(0, 99), st.integers(0, 59), st.integers(0, 59))
def test_both_forms_state_the_same_time(days: int, hours: int, minutes: int, seconds: int) -> None:
    whole = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if whole:
        assert duration_seconds(f"{days}-{hours}:{minutes:02}:{seconds:02}") == whole
        assert duration_seconds(f"{days}d{hours}h{minutes}m{seconds}s") == whole
