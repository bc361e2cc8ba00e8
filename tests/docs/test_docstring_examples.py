"""The examples in the docstrings of public names run, and print what they say."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[2] / "packages"
MODULES = sorted(
    ".".join(path.relative_to(package / "src").with_suffix("").parts)
    for package in PACKAGES.iterdir()
    for path in package.rglob("src/**/*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_print_what_they_say(name: str) -> None:
    failed, tried = doctest.testmod(import_module(name))
    assert tried
    assert not failed
