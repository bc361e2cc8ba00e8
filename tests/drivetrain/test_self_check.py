import subprocess

import pytest


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.default_cases("1")
def test_drivetrain_test_checks_the_installation(num_processes: int, python: str) -> None:
    command = [
        python,
        "-m",
        "drivetrain_launcher",
        "test",
        "--num-processes",
        str(num_processes),
        "--cpu",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("collectives", "data", "training"):
        assert f"  {name:<12} ok" in done.stdout
    assert done.stdout.rstrip().endswith("all checks passed")
