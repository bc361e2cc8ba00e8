"""Commands of a cluster: what is asked again, and what a refusal says."""

import sys

import pytest

from drivetrain_clusters import system_command
from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.system_command import patiently, run_command

SAYS = (sys.executable, "-ISc", "import sys; sys.exit('tool: error: Invalid Partition x')")


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_command, "_ASK_SECONDS", 0.01)
    monkeypatch.setattr(system_command, "_PATIENCE_SECONDS", 0.5)


def test_a_cluster_that_answers_again_is_asked_on_and_said_so_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[int] = []

    def ask() -> str:
        asked.append(1)
        if len(asked) < 4:
            raise ClusterError("squeue failed: no answer")
        return "RUNNING"

    assert patiently(ask) == "RUNNING"
    assert len(asked) == 4
    assert capsys.readouterr().err == "drivetrain: squeue failed: no answer; asking again for 0.5 s\n"


def test_a_cluster_that_stays_silent_is_an_error_in_time() -> None:
    asked: list[int] = []

    def ask() -> str:
        asked.append(1)
        raise ClusterError("squeue failed: no answer")

    with pytest.raises(ClusterError, match=r"^squeue failed: no answer$"):
        patiently(ask)
    assert len(asked) > 1


def test_a_refusal_holds_the_programs_words_and_the_advice_for_them() -> None:
    with pytest.raises(ClusterError, match=r"failed: tool: error: Invalid Partition x; say another$"):
        run_command(*SAYS, hints={"invalid account": "no", "invalid partition": "say another"})
