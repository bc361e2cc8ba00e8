import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / ".ci" / "run"
TEST_COMMAND = "uv run pytest"


def test_ci_calls_the_test_command_of_the_readme() -> None:
    assert TEST_COMMAND in (ROOT / "README.md").read_text()
    assert f"stage tests {TEST_COMMAND}\n" in SCRIPT.read_text()


def test_the_slow_tests_come_last() -> None:
    stages = [line.split()[1] for line in SCRIPT.read_text().splitlines() if line.startswith("stage ")]
    assert stages == ["tests", "checks", "alone", "versions", "xla", "slow"]


def test_the_script_is_valid_bash() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    assert SCRIPT.stat().st_mode & 0o100
