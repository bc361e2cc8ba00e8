import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain_tracking.run.run_info import collect_info, git_info


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main")
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_the_commit_and_its_changes(tmp_path: Path) -> None:
    assert git_info(tmp_path) is None
    git(tmp_path, "init", "-q")
    git(tmp_path, "remote", "add", "origin", "https://me:secret1@example.com/x.git")
    (tmp_path / "train.py").write_text("lr = 0.1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    (tmp_path / "train.py").write_text("lr = 0.2\napi_key = 'abcdef'\n")
    (tmp_path / "new.py").write_text("")
    info = git_info(tmp_path)
    assert info is not None
    assert (info["commit"], info["branch"]) == (git(tmp_path, "rev-parse", "HEAD"), "main")
    assert info["remote"] == "https://***@example.com/x.git"
    assert info["untracked"] == ["new.py"]
    assert "+lr = 0.2\n+api_key = '***'" in str(info["diff"])


@pytest.mark.slow
def test_versions_hardware_and_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--hub-token", "abc", "--lr", "1"])
    info = collect_info()
    assert info["command"] == [sys.executable, "train.py", "--hub-token", "***", "--lr", "1"]
    assert info["packages"]["pytest"] == pytest.__version__
    pytest.importorskip("yaml")
    assert collect_info()["packages"]["PyYAML"]  # whose module has another name
    assert info["hardware"]["num_cpus"] >= 1
    assert info["hardware"]["memory_bytes"] > 1e8
