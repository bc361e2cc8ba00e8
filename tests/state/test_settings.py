import subprocess
import sys

import pytest

from drivetrain_state import StateSettings


def test_defaults_are_allowed() -> None:
    settings = StateSettings()
    assert settings.device == "auto"
    assert settings.watchdog


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "gpu"),
        ("timeout_seconds", 0.0),
        ("timeout_seconds", float("inf")),
        ("hang_timeout_seconds", -1.0),
        ("hang_timeout_seconds", float("nan")),
    ],
)
def test_a_wrong_value_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field}={value!r}: "):
        StateSettings(**{field: value})


def test_settings_are_read_without_torch() -> None:
    source = (
        "import sys; sys.modules['torch'] = None\n"
        "from drivetrain_state import StateSettings; print(StateSettings().timeout_seconds)"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "600.0\n", done.stderr
