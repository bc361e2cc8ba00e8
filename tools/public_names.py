"""Every public name of every package, one a line; run as a script it writes tests/public_names.txt."""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from checks.workspace import Package, read_packages

ROOT = Path(__file__).resolve().parent.parent
SNAPSHOT = ROOT / "tests" / "public_names.txt"


def public_names(packages: Iterable[Package]) -> list[str]:
    """`module.name` for each name in the packages' `__all__`, sorted."""
    found = [
        f"{package.module}.{name}"
        for package in packages
        for name in getattr(import_module(package.module), "__all__", ())
    ]
    return sorted(found)


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(public_names(read_packages(ROOT).values())) + "\n")
