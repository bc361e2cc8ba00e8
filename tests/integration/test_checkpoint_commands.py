"""`drivetrain checkpoint ...` on checkpoints of a run, by the launcher's parser and in a process of its own."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drivetrain import Accelerator
from drivetrain_launcher.cli.main import main


def checkpoint(*words: str) -> int:
    return main(["checkpoint", *words])


def test_a_run_is_listed_verified_merged_and_pruned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    model = torch.nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state()
    directory = str(tmp_path / "checkpoints")
    capsys.readouterr()

    assert checkpoint("list", directory, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["step"], one["newest"]) for one in found] == [(2, True), (1, False)]
    assert checkpoint("verify", directory) == 0
    assert checkpoint("show", f"{directory}/step-2") == 0
    assert "backend" in capsys.readouterr().out
    assert checkpoint("merge", f"{directory}/step-2", str(tmp_path / "out"), "--max-shard-size", "1MB") == 0
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in exported.items()} == {
        name: tensor.tolist() for name, tensor in accelerator.unwrap_model(model).state_dict().items()
    }
    assert checkpoint("prune", directory, "--keep-last", "1") == 0
    assert [path.name for path in Path(directory).glob("step-*")] == ["step-2"]
    accelerator.end_training()


def test_a_mistake_is_a_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint("prune", str(tmp_path)) == 2
    assert checkpoint("prune", str(tmp_path), "--keep-last", "-1") == 2
    assert checkpoint("merge", "a", "b", "--max-shard-size", "huge") == 2
    assert checkpoint("list") == 2
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[2].split()[1] for line in told] == [
        "--keep-last", "keep_last=-1:", "max_shard_size='huge':", "DIRECTORY",
    ]  # fmt: skip


def test_a_shell_gets_the_exit_code(tmp_path: Path, python: str) -> None:
    command = [python, "-m", "drivetrain_launcher", "checkpoint", "list", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"drivetrain: error: {tmp_path} holds no checkpoints: ")
