"""A new public name is a decision, and so is one that goes: tests/public_names.txt lists them all."""

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest

from checks.workspace import Package, read_packages
from public_names import SNAPSHOT, public_names

PACKAGES = read_packages(Path(__file__).resolve().parents[1])
MODULES = [package.module for package in PACKAGES.values()]


def test_the_public_names_are_those_decided_on() -> None:
    decided = SNAPSHOT.read_text().split()
    found = public_names(PACKAGES.values())
    new, gone = sorted(set(found) - set(decided)), sorted(set(decided) - set(found))
    assert (new, gone) == ([], []), "if this is meant: uv run python tools/public_names.py"


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_there_and_listed_once(name: str) -> None:
    module = import_module(name)
    assert len(module.__all__) == len(set(module.__all__))
    assert dir(module) == sorted(module.__all__)
    for public in module.__all__:
        assert getattr(module, public) is not None
        assert not inspect.ismodule(getattr(module, public)), f"{public} is hidden by the module of its name"


@pytest.mark.parametrize("name", MODULES)
def test_an_unknown_name_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'no_such_name'"):
        _ = import_module(name).no_such_name


@pytest.mark.parametrize("package", PACKAGES.values(), ids=MODULES)
def test_a_type_checker_finds_every_public_name_where_it_is_at_run_time(package: Package) -> None:
    module = import_module(package.module)
    tree = ast.parse(Path(str(module.__file__)).read_text())
    (block,) = (
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imported = {
        alias.asname: getattr(import_module(str(node.module)), alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == {name: getattr(module, name) for name in module.__all__}
