"""Planted leaks are found and named; loops without one raise no alarm. Each runs in a process of its own."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from processes import environment_alone

HERE = Path(__file__).parent
# What is planted -> the kind, the name that must be told, and the source of the line.
PLANTED = {
    "list_of_losses": ("objects", "losses", "losses.append(model"),
    "cache_keyed_by_tensor": ("objects", "__main__.CACHE", "torch.randn(1000)"),
    "closure": ("objects", "callbacks", "callbacks.append"),
    "hooks_never_removed": ("objects", "model._forward_hooks", "register_forward_hook"),
    "worker_grows": ("worker", "worker 0 of a DataLoader", None),
    "metric_not_detached": ("objects", "meter.total", "meter.total = meter.total"),
    "native_memory": ("native", "C heap", None),
    "growing_buffer": ("objects", "model.history", "torch.cat"),
    "parameter_groups": ("objects", "optimizer.param_groups", "add_param_group"),
    "running_loss": ("objects", "running", "running = running"),
    "thread_keeps_results": ("objects", "thread collector", "results.append"),
    "cached_function": ("objects", "embed", "torch.full"),
}
IN_DEFAULT_STAGE = ("list_of_losses", "native_memory")


def watched(python: str, script: str, *names: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [python, str(HERE / script), *names],
        env=environment_alone(),
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_named(name: str, found: dict[str, Any]) -> None:
    kind, holder, line = PLANTED[name]
    assert found["leaks"], found
    first = found["leaks"][0]
    assert (first["kind"], holder in first["holder"]) == (kind, True), found["text"]
    assert line is None or line in first["line"], found["text"]
    assert first["rate"] > 200


@pytest.mark.slow
def test_planted_leaks_are_found_and_named(python: str) -> None:
    for name, found in zip(
        IN_DEFAULT_STAGE, watched(python, "planted_leaks.py", *IN_DEFAULT_STAGE), strict=True
    ):
        assert_named(name, found)


@pytest.mark.slow
def test_cycles_that_hold_tensors_are_no_leak_and_are_told(python: str) -> None:
    (found,) = watched(python, "planted_leaks.py", "cycles")
    assert found["leaks"] == []
    assert "12 reference cycles Node -> Node" in found["text"]
    assert "Node()" in found["text"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PLANTED.keys() - set(IN_DEFAULT_STAGE)))
def test_every_planted_leak_is_found_and_named(name: str, python: str) -> None:
    assert_named(name, watched(python, "planted_leaks.py", name)[0])


@pytest.mark.slow
def test_clean_runs_raise_no_alarm(python: str) -> None:
    pytest.importorskip("transformers")  # whose models are among the runs
    assert [one for one in watched(python, "clean_runs.py", "0", "5") if one["leaks"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(5, 100, 5))
def test_a_hundred_clean_runs_raise_no_alarm(first: int, python: str) -> None:
    found = watched(python, "clean_runs.py", str(first), str(first + 5))
    assert [one for one in found if one["leaks"]] == []
