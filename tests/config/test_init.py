import subprocess
import sys

import pytest

import drivetrain_config


def test_importing_the_package_loads_none_of_its_rooms() -> None:
    source = (
        "import sys; old = set(sys.modules); import drivetrain_config; print(sorted(set(sys.modules) - old))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    loaded = finished.stdout
    assert "drivetrain_config'" in loaded
    assert "drivetrain_config." not in loaded
    assert "dataclasses" not in loaded


def test_public_names_are_listed_and_others_are_not_there() -> None:
    assert dir(drivetrain_config) == drivetrain_config.__all__
    for name in drivetrain_config.__all__:
        assert getattr(drivetrain_config, name).__module__.startswith("drivetrain_config.")
    with pytest.raises(AttributeError, match="module 'drivetrain_config' has no attribute 'Settings'"):
        _ = drivetrain_config.Settings
