"""Imported first in a program, set stand-ins for the names of missing_names.txt, which libraries import by name.

With all names provided it does nothing, and can go.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from drivetrain_accelerate.interface.interface_module import InterfaceModule
from drivetrain_accelerate.interface.not_provided import not_provided

NAMES = Path(__file__).with_name("missing_names.txt").read_text(encoding="utf-8").split()


def _module(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        outer, _, leaf = name.rpartition(".")
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []
        vars(_module(outer))[leaf] = module
        return module


def _no(*_: object, **__: object) -> bool:
    return False


def _itself(model: object, *_: object, **__: object) -> object:
    """Return a model that no wrapper is around."""
    return model


def _stand_in(full_name: str) -> object:
    """Return what libraries need to be imported, and what some call on the way."""
    leaf = full_name.rpartition(".")[2]
    if leaf.startswith("is_") and leaf.endswith("_available"):
        return _no
    if leaf == "extract_model_from_parallel":
        return _itself
    return not_provided(full_name, "a stand-in: its room is not written yet")


for _full_name in NAMES:
    _outer, _, _leaf = _full_name.rpartition(".")
    vars(_module(_outer))[_leaf] = _stand_in(_full_name)
assert isinstance(import_module("accelerate"), InterfaceModule)
