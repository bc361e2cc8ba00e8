"""Find the modules named `accelerate` and the distribution that tells their version."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import cast

from drivetrain_accelerate import interface
from drivetrain_accelerate.interface.interface_module import InterfaceLoader
from drivetrain_accelerate.interface.module_table import ModuleTable, module_table
from drivetrain_messages import suggest

_NAME = "accelerate"
# What the installed package has for tests runs on the interface as it is.
TEST_UTILS = f"{_NAME}.test_utils"
_ANY = DistributionFinder.Context()


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceFinder(MetaPathFinder):
    """The finder that stands first in `sys.meta_path` while the interface of a version is installed.

    `variables_before` has the values of environment variables from before the installation changed them.
    """

    version: str
    variables_before: Mapping[str, str | None] = field(default_factory=dict[str, str | None])

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # the names alone decide
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the spec of a module of the interface, None for other modules, or raise ModuleNotFoundError."""
        if fullname.partition(".")[0] != _NAME:
            return None
        # The Accelerate that is installed, in front of which the interface stands; a folder of this name is none.
        found = _spec_of_others(_NAME, None) if fullname in (_NAME, TEST_UTILS) else None
        installed = None if found is None or found.origin is None else found
        if fullname == TEST_UTILS and installed is not None:
            spec = _spec_of_others(TEST_UTILS, installed.submodule_search_locations)
            if spec is not None:
                return spec
        if fullname.startswith(f"{TEST_UTILS}."):
            return None  # of the package that holds it
        table = module_table()
        if fullname not in table.names:
            raise _describe_unknown(fullname, table)
        # Beside the installed package's file, programs look for what that package holds.
        file = interface.__file__ if installed is None else installed.origin
        return ModuleSpec(
            fullname,
            InterfaceLoader(self.version, str(file)),
            origin="drivetrain_accelerate",
            is_package=table.is_package(fullname),
        )

    def find_distributions(self, context: DistributionFinder.Context = _ANY) -> Iterable[Distribution]:
        """Return the distribution of the interface if the context asks for its name.

        Libraries ask `importlib.metadata` for Accelerate's version before they import it.
        """
        if context.name is None or context.name.lower() == _NAME:
            yield InterfaceDistribution(self.version)


class InterfaceDistribution(Distribution):
    """The distribution `accelerate` in the version whose interface is provided."""

    def __init__(self, version: str) -> None:
        self._texts = {
            "METADATA": (
                f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: {version}\n"
                "Summary: The interface of Accelerate, provided by drivetrain-accelerate\n"
                # Where the interface comes from: sentence-transformers takes no accelerate of another owner's page.
                "Home-page: https://github.com/huggingface/accelerate\n"
            ),
            "top_level.txt": f"{_NAME}\n",
        }

    def read_text(self, filename: str | PathLike[str]) -> str | None:
        """Return the text of a metadata file; None if the distribution has no such file."""
        return self._texts.get(str(filename))

    def locate_file(self, path: str | PathLike[str]) -> Path:
        """Raise a FileNotFoundError: the distribution has no files."""
        raise FileNotFoundError(f"{path}: drivetrain_accelerate provides accelerate without files")


def _describe_unknown(fullname: str, table: ModuleTable) -> ModuleNotFoundError:
    """Return the error for a missing module, or for a name that an existing module lacks.

    If `accelerate` lacks a name, `from accelerate import name` looks for a submodule. Python hides an error whose
    `name` is that submodule, but shows an error whose `name` is the module around it.
    """
    around, _, name = fullname.rpartition(".")
    if (instead := table.modules_not_provided.get(fullname)) is not None:
        return ModuleNotFoundError(
            f"{fullname} is not provided by drivetrain_accelerate: {instead}", name=around
        )
    text = f"No module named {fullname!r} in the interface that drivetrain_accelerate provides"
    if around not in table.names:
        return ModuleNotFoundError(f"{text}; it has {', '.join(table.names)}", name=fullname)
    hint = table.hint(around, name)
    if not hint:
        return ModuleNotFoundError(f"{text}, and {around} has no such name", name=around)
    if hint != suggest(name, table.submodules(around)):
        text = f"cannot import name {name!r} from {around!r}"
    return ModuleNotFoundError(f"{text}{hint}", name=around)


def installed_finder() -> InterfaceFinder | None:
    """Return the finder that answers for `accelerate`; None if the interface is not installed."""
    return next((each for each in sys.meta_path if isinstance(each, InterfaceFinder)), None)


def _spec_of_others(name: str, path: list[str] | None) -> ModuleSpec | None:
    """Return the spec that the other finders give for a module."""
    others = cast(
        "list[MetaPathFinder]", [each for each in sys.meta_path if not isinstance(each, InterfaceFinder)]
    )
    return next((spec for each in others if (spec := each.find_spec(name, path)) is not None), None)
