"""Every public name of the installed Accelerate is there with a compatible signature, or listed with the reason."""

import inspect
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from drivetrain_accelerate.errors import NotProvidedError
from drivetrain_accelerate.interface.finder import TEST_UTILS, InterfaceFinder
from drivetrain_accelerate.interface.interface_module import InterfaceModule
from drivetrain_accelerate.interface.module_table import module_table

pytest.importorskip("accelerate", reason="the interface is held against the real one")

from accelerate_inventory import members, modules, names, parameters

_ANY_NUMBER = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)

MISSING = Path(__file__).with_name("missing_names.txt")


def ours(full_name: str) -> Any:
    module, _, name = full_name.rpartition(".")
    home = module_table().names[module][name]
    return getattr(import_module(home.module), home.name)


def test_every_public_name_is_provided_or_listed() -> None:
    table = module_table()
    held = {f"{module}.{name}" for module, names in table.names.items() for name in names}
    missing = names().keys() - held - table.not_provided.keys()
    assert sorted(missing) == MISSING.read_text(encoding="utf-8").splitlines()


def test_every_name_has_the_signature_and_members_of_the_real_one() -> None:
    table = module_table().names
    held = {f"{module}.{name}" for module, homes in table.items() for name in homes}
    both = sorted(names().keys() & held)
    assert len(both) > 500
    assert [each for name in both for each in wrong(name, names()[name], ours(name))] == []


def wrong(full_name: str, real: Any, mine: Any) -> list[str]:
    """Return what a program that was written for the real name would miss in ours."""
    if isinstance(real, dict) and all(map(inspect.isclass, real.values())):  # classes by name
        return [] if mine.keys() == real.keys() else [f"{full_name} has other keys"]
    if not callable(real):
        same = mine == real or repr(mine) == repr(real)  # members of an enum of ours show as those of theirs
        return [] if same else [f"{full_name} is {mine!r}, and really {real!r}"]
    found = differing_parameters(full_name, real, mine)
    if isinstance(real, type):
        for name, member in members(real).items():
            inner = f"{full_name}.{name}"
            if not hasattr(mine, name):
                found.append(f"{inner} is missing")
            elif callable(member) or isinstance(member, (staticmethod, classmethod)):
                found += differing_parameters(inner, getattr(real, name), getattr(mine, name))
            elif isinstance(member, property) and member.fset is not None:
                own = inspect.getattr_static(mine, name)
                if isinstance(own, property) and own.fset is None:
                    found.append(f"{inner} cannot be set")
    return found


def differing_parameters(full_name: str, real: Any, mine: Any) -> list[str]:
    """Return the parameters that a call in the real form would not find."""
    theirs, own = parameters(real), parameters(mine)
    if theirs is None or own is None:
        return []
    if all(each.kind in _ANY_NUMBER for each in theirs if each.name != "self"):
        return []  # a decorator hides what it takes
    known = {each.name: each for each in own}
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in own)
    found: list[str] = []
    for place, each in enumerate(theirs):
        if each.kind in _ANY_NUMBER:
            if all(one.kind is not each.kind for one in own):
                found.append(f"{full_name} takes no {each}")
            continue
        if each.name not in known:
            found += [] if takes_any else [f"{full_name}({each.name}=) is missing"]
        elif each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and own.index(known[each.name]) != place:
            found.append(f"{full_name}: parameter {each.name} stands elsewhere")
        elif not same_default(each.default, known[each.name].default):
            found.append(f"{full_name}({each.name}={known[each.name].default!r}), really {each.default!r}")
    asked = {each.name for each in theirs}
    for each in own:
        if each.name not in asked and each.kind not in _ANY_NUMBER and each.default is each.empty:
            found.append(f"{full_name} asks for {each.name}")
    return found


def same_default(real: Any, mine: Any) -> bool:
    """Tell whether defaults mean the same; those that are objects of their own are compared by what they show."""
    if inspect.isfunction(real) and inspect.isfunction(mine):
        return real.__name__ == mine.__name__
    return real is mine or real == mine or str(real) == str(mine) or type(real) is object


@pytest.mark.parametrize("full_name", sorted(module_table().not_provided))
def test_what_is_not_provided_says_so_when_it_is_used(full_name: str) -> None:
    reason, (module, _, name) = module_table().not_provided[full_name], full_name.rpartition(".")
    stand_in: Any = getattr(InterfaceModule(module), name)
    with pytest.raises(NotProvidedError, match=f"{full_name} is not provided by drivetrain_accelerate: "):
        stand_in()
    assert len(reason) > 20
    assert name in vars(import_module(module)) or full_name not in names()


def test_a_module_has_the_names_that_the_real_one_imports_from_its_others() -> None:
    table = module_table()
    provided = {name: homes for homes in table.names.values() for name in homes}
    looked_up: list[str] = []
    for module in modules():
        if module.__name__ not in table.names:
            continue
        for name, value in vars(module).items():
            is_own = str(getattr(value, "__module__", "accelerate")).startswith("accelerate")
            if (
                name not in provided
                or not is_own
                or table.holder(module.__name__, name) == module.__name__
                or inspect.ismodule(value)
            ):
                continue
            if len(table.holders[name]) == 1:
                looked_up.append(name)
                home = provided[name][name]
                found = getattr(InterfaceModule(module.__name__), name)
                assert found is getattr(import_module(home.module), home.name), (module.__name__, name)
    assert len(looked_up) > 300


@pytest.mark.parametrize(
    "name", ["_PYTORCH_DATALOADER_KWARGS", "_gpu_gather", "_is_package_available", "_split_batches"]
)
def test_private_names_that_public_programs_import_are_there(name: str) -> None:
    (holder,) = module_table().holders[name]
    real, mine = getattr(import_module(holder), name), getattr(InterfaceModule(holder), name)
    assert callable(real) == callable(mine)
    if isinstance(real, dict):
        assert mine == real


@pytest.mark.parametrize("module", sorted({*module_table().modules_not_provided} - {TEST_UTILS}))
def test_a_module_that_is_not_provided_says_so_when_it_is_imported(module: str) -> None:
    assert find_spec(module) is not None
    with pytest.raises(ModuleNotFoundError, match=f"{module} is not provided by drivetrain_accelerate: "):
        InterfaceFinder(version="1.15.0").find_spec(module)


def test_a_constructed_accelerator_has_the_attributes_of_the_real_one() -> None:
    accelerate = import_module("accelerate")
    state, mine = ours("accelerate.state.AcceleratorState"), ours("accelerate.Accelerator")(cpu=True)
    try:
        real = accelerate.Accelerator(cpu=True)
        assert [name for name in vars(real) if not name.startswith("_") and not hasattr(mine, name)] == []
    finally:
        for kind in (state, accelerate.state.AcceleratorState):
            kind._reset_state(reset_partial_state=True)
