"""The Accelerate that is installed, which the interface stands in front of."""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import cast

_NAME = "accelerate"
# What it has for tests runs on the interface as it is.
TEST_UTILS = f"{_NAME}.test_utils"


def installed_package(interface: type[MetaPathFinder]) -> ModuleSpec | None:
    """Return the spec of the package that is installed; None without.

    Args:
        interface: The class of the finder that is not asked.
    """
    found = _found(interface, _NAME, None)
    return None if found is None or found.origin is None else found  # a folder of this name is none


def installed_test_utils(interface: type[MetaPathFinder]) -> ModuleSpec | None:
    """Return the spec of its `test_utils`; None without."""
    package = installed_package(interface)
    return None if package is None else _found(interface, TEST_UTILS, package.submodule_search_locations)


def _found(interface: type[MetaPathFinder], name: str, path: list[str] | None) -> ModuleSpec | None:
    finders = cast(
        "list[MetaPathFinder]", [each for each in sys.meta_path if not isinstance(each, interface)]
    )
    return next((spec for each in finders if (spec := each.find_spec(name, path)) is not None), None)
