from pathlib import Path

import pytest

from drivetrain_precision.conversion.library_check import NeededLibrary, check_library


def needs(version: str = "2.0") -> NeededLibrary:
    return NeededLibrary(library="eight-bits", version=version, extra="torchao")


def install(folder: Path, version: str) -> None:
    """Write what tells importlib that a version of a library is installed."""
    info = folder / f"eight_bits-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: eight-bits\nVersion: {version}\n")


def test_a_missing_library_is_named_with_its_extra() -> None:
    assert check_library(needs()) == (
        "eight-bits is not installed: pip install 'drivetrain-precision[torchao]'"
    )


@pytest.mark.parametrize(
    ("version", "is_old"), [("1.9", True), ("1.10.0.dev1", True), ("1.10", False), ("2.0+cu132", False)]
)
def test_a_library_that_is_too_old_is_told_with_both_versions(
    version: str, is_old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, version)
    monkeypatch.syspath_prepend(tmp_path)
    missing = check_library(needs("1.10"))
    told = (
        f"eight-bits {version} is too old, 1.10 has it: pip install 'drivetrain-precision[torchao]' --upgrade"
    )
    assert missing == (told if is_old else None)
