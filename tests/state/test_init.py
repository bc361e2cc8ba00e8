import subprocess
import sys

import drivetrain_state


def test_every_public_name_resolves() -> None:
    for name in drivetrain_state.__all__:
        assert getattr(drivetrain_state, name).__name__ if name != "ReduceOp" else True


def test_no_public_name_is_hidden_by_the_room_it_stands_in() -> None:
    for name in drivetrain_state.__all__:
        assert type(getattr(drivetrain_state, name)).__name__ != "module", name


def test_importing_the_package_loads_no_torch_and_opens_no_device() -> None:
    source = "import sys, drivetrain_state; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "False\n", done.stderr


def test_the_public_names() -> None:
    assert drivetrain_state.__all__ == sorted(drivetrain_state.__all__)
    assert dir(drivetrain_state) == drivetrain_state.__all__
