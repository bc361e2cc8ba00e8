import ast

import pytest

from drivetrain_config import Layers
from drivetrain_launcher import Host
from drivetrain_launcher.plan.resolved_launch import resolve_launch
from drivetrain_migration.script_check import check_script

THEIRS = "import os\nfrom accelerate import Accelerator\nAccelerator()\n"
BF16 = {"run": {"mixed_precision": "bf16"}}
TWO = {"launch": {"num_processes": "2"}}


def check(source: str, said: dict[str, dict[str, str]]) -> str | None:
    return check_script(ast.parse(source), resolve_launch(Layers.read(command_line=said)))


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    def detect(device: str) -> Host:
        return Host(accelerator="cuda" if device == "cuda" else None)

    monkeypatch.setattr("drivetrain_migration.script_check.detect_host", detect)


def test_a_script_that_would_train_on_the_real_accelerate_is_refused_with_all_reasons() -> None:
    assert check(THEIRS, BF16 | TWO) == (
        "2: this imports Hugging Face's accelerate, not drivetrain: run.mixed_precision (--mixed-precision on the "
        "command line) has no effect, each of 2 processes trains alone on the CPU. Say --as-accelerate, or use "
        "accelerate launch"
    )


@pytest.mark.parametrize(
    ("source", "said", "start"),
    [
        (THEIRS, TWO, "2: "),
        (THEIRS, {"launch": {"processes_per_node": "2"}}, "2: "),
        (THEIRS, BF16, "2: "),
        (THEIRS, {**BF16, "state": {"device": "cuda"}}, "2: "),
        ("import accelerate as hf\nhf.Accelerator()", TWO, "1: "),
        ("def main():\n    from accelerate.state import PartialState\n    PartialState()", TWO, "2: "),
    ],
)
def test_each_reason_and_form_of_import_suffices(
    source: str, said: dict[str, dict[str, str]], start: str
) -> None:
    assert (check(source, said) or "").startswith(start)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        pytest.param(THEIRS, {**TWO, "state": {"device": "cuda"}}, id="on GPUs, as under torchrun"),
        pytest.param(THEIRS, {}, id="one process"),
        pytest.param(THEIRS.replace("()", "(cpu=True)"), TWO, id="it connects ranks on CPUs"),
        pytest.param(
            f"import drivetrain_accelerate.auto\n{THEIRS}", BF16, id="the interface is installed in code"
        ),
        pytest.param(
            "from drivetrain import Accelerator\nfrom accelerate.utils import tqdm\nAccelerator()",
            BF16,
            id="ours",
        ),
        pytest.param("from accelerate import init_empty_weights", BF16, id="a function without ranks"),
    ],
)
def test_a_script_that_trains_as_launched_passes(source: str, said: dict[str, dict[str, str]]) -> None:
    assert check(source, said) is None
