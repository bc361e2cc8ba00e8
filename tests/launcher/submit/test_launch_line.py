"""The line, as the launcher inside the job will read it: parsed by the launcher's own parser."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain_config import Layers, environ, sections
from drivetrain_config.source import Entry, Source
from drivetrain_config.values.conversion import convert
from drivetrain_config.values.kinds import field_types
from drivetrain_launcher import LaunchError
from drivetrain_launcher.cli.commands.launch import LaunchArguments
from drivetrain_launcher.cli.parser import build_parser
from drivetrain_launcher.plan.resolved_launch import resolve_launch
from drivetrain_launcher.submit.launch_line import LaunchLine, as_text, plan_launch_line
from requests_of_jobs import hostile

needs_umbrella = pytest.mark.skipif(not sections(only={"run"}), reason="the section run is not installed")

PARSER = build_parser("launch", LaunchArguments, "")


def line_of(layers: Layers, *target: str, **changes: Any) -> LaunchLine:
    given = {"processes_per_node": 2, "shutdown_timeout_seconds": 120, **changes}
    return plan_launch_line(layers, target or ("train.py",), **given)


def read_in_the_job(line: LaunchLine) -> LaunchArguments:
    """What the launcher of a node reads."""
    assert line.command[:2] == ("drivetrain", "launch")
    with environ.exported(**line.environment):
        return PARSER.parse(line.command[2:])


@needs_umbrella
def test_flags_files_and_variables_reach_the_job_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "run: {seed: 1, mixed_precision: bf16}\nddp: {static_graph: true}\nlaunch: {max_restarts: 2}\n"
    )
    with environ.exported(DRIVETRAIN_RUN__SEED="2", DRIVETRAIN_STATE__DEBUG="true"):
        layers = Layers.read(file=file, command_line={"run": {"cpu": True, "mixed_precision": "fp16"}})
        line = line_of(layers)
    assert "--cpu" in line.command
    assert "--mixed-precision=fp16" in line.command
    assert line.environment["DRIVETRAIN_RUN__SEED"] == "2"
    assert str(file) not in " ".join(line.command)
    resolved = resolve_launch(read_in_the_job(line).layers)
    found = {name: section.value for name, section in resolved.sections.items()}
    assert (found["run"].seed, found["run"].mixed_precision, found["run"].cpu) == (2, "fp16", True)
    assert (found["ddp"].static_graph, found["state"].debug) == (True, True)
    assert (found["launch"].processes_per_node, found["launch"].max_restarts) == (2, 2)
    assert found["launch"].shutdown_timeout_seconds == 120


@needs_umbrella
def test_a_negated_switch_stays_negated() -> None:
    line = line_of(Layers.read(command_line={"run": {"cpu": False}}))
    assert "--no-cpu" in line.command


@settings(max_examples=50, deadline=None)
@given(st.lists(hostile, max_size=5))
def test_hostile_arguments_reach_the_script_as_they_are(words: list[str]) -> None:
    found = read_in_the_job(line_of(Layers({}), "train.py", *words))
    assert (found.script, found.arguments) == ("train.py", tuple(words))


@settings(max_examples=50, deadline=None)
@given(hostile)
def test_a_script_with_any_name_is_no_flag(name: str) -> None:
    assert read_in_the_job(line_of(Layers({}), name or "x")).script == (name or "x")


@settings(max_examples=50, deadline=None)
@given(hostile)
def test_a_hostile_setting_stays_one_value(text: str) -> None:
    line = line_of(Layers.read(command_line={"launch": {"rdzv_id": text}}))
    (entry, *_) = read_in_the_job(line).layers.of_section("launch")["rdzv_id"]
    assert entry.value == text


def test_every_setting_has_a_text_that_is_read_as_the_same_value() -> None:
    for name, section in sections().items():
        for field, kind in field_types(section).items():
            default = getattr(section(), field) if _has_defaults(section) else None
            if default is not None:
                assert convert(as_text(default), kind, text=True) == default, (name, field)


def _has_defaults(section: type[Any]) -> bool:
    try:
        section()
    except TypeError:
        return False
    return True


def test_a_secret_is_not_handed_to_the_job() -> None:
    entry = Entry("hunter2", Source("environment", "DRIVETRAIN_TRACKING__API_KEY"), secret=True)
    line = line_of(Layers({("tracking", "api_key"): (entry,)}))
    assert "hunter2" not in repr(line)
    assert line.withheld == ("DRIVETRAIN_TRACKING__API_KEY",)


@pytest.mark.parametrize(("field", "value"), [("node_rank", "0"), ("master_addr", "node0")])
def test_what_the_cluster_decides_is_refused_with_its_source(field: str, value: str) -> None:
    flag = f"--{field.replace('_', '-')}"
    with pytest.raises(
        LaunchError, match=f"{field}='{value}' from {flag} on the command line: the cluster decides"
    ):
        line_of(Layers.read(command_line={"launch": {field: value}}))
