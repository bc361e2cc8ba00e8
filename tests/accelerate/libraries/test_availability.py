"""Which libraries and devices there are: all functions, beside the installed Accelerate."""

from typing import Any

import pytest

from drivetrain_accelerate.interface.module_table import module_table
from drivetrain_accelerate.libraries import availability
from drivetrain_accelerate.libraries import device_availability as devices

real: Any = pytest.importorskip("accelerate.utils.imports")
real_versions: Any = pytest.importorskip("accelerate.utils.versions")

ASKED = sorted(
    name
    for name in module_table().names["accelerate.utils.imports"]
    if name.startswith("is_") and name != "is_torch_version"
)


@pytest.mark.parametrize("name", ASKED)
def test_the_answer_is_that_of_accelerate_as_a_bool(name: str) -> None:
    function = getattr(availability, name, None) or getattr(devices, name)
    assert function() is bool(getattr(real, name)())
    assert function.__name__ == name


def test_versions_are_compared() -> None:
    assert not availability.is_numpy_available("99")
    assert not availability.is_bnb_available("9999")
    assert availability.is_installed("torch", minimum="2.0")
    assert not availability.is_installed("no_such_module")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    @availability.deepspeed_required
    def function() -> int:
        """Say one."""
        return 1

    assert (function(), function.__name__, function.__doc__) == (1, "function", "Say one.")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ImportError, match="function needs deepspeed: pip install deepspeed"):
        function()


def test_a_megatron_that_nobody_chose_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    assert not availability.is_megatron_lm_available()
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    assert availability.is_megatron_lm_available()


def test_a_device_cannot_be_both() -> None:
    with pytest.raises(ValueError, match="cannot be both"):
        devices.is_torch_xla_available(True, True)


@pytest.mark.parametrize("operation", [">", ">=", "==", "!=", "<=", "<"])
def test_comparisons_are_those_of_accelerate(operation: str) -> None:
    for version in ("2.0", "99.0", real_versions.parse("1.0").public):
        for library in ("torch", real_versions.parse("1.0.dev1")):
            mine = availability.compare_versions(library, operation, version)
            assert mine == real_versions.compare_versions(library, operation, version)
        assert availability.is_torch_version(operation, version) == real_versions.is_torch_version(
            operation, version
        )


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ValueError, match="operation='=>': say one of"):
        availability.compare_versions("torch", "=>", "1")
