"""Read interface.toml: the names in each of Accelerate's modules, and where this package defines each name."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType

from drivetrain_messages import suggest

PROVIDED_VERSIONS = ("1.15.0",)

_PACKAGE = "drivetrain_accelerate"


@dataclass(frozen=True, slots=True)
class Home:
    """The module that defines a name, and its name there."""

    module: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTable:
    """The table of the modules and names of the interface."""

    names: Mapping[str, Mapping[str, Home]]  # by module of Accelerate's, then by name
    not_provided: Mapping[str, str]  # what to do instead, by the full name without a counterpart
    modules_not_provided: Mapping[str, str]
    holders: Mapping[str, tuple[str, ...]]  # by name: a module for each object that some module defines by it

    def submodules(self, module: str) -> tuple[str, ...]:
        """Return the names of the modules directly inside a module."""
        prefix = f"{module}."
        inside = (name.removeprefix(prefix) for name in self.names if name.startswith(prefix))
        return tuple(name for name in inside if "." not in name)

    def holder(self, module: str, name: str) -> str | None:
        """Return the module that a module's name comes from, often the module itself; None without such a name."""
        if name in self.names[module] or f"{module}.{name}" in self.not_provided:
            return module
        others = () if name in self.submodules(module) else self.holders.get(name, ())
        return others[0] if len(others) == 1 else None

    def names_in(self, module: str) -> set[str]:
        """Return all names of a module: its own, the names that are not provided, and its submodules."""
        refused = (full.rpartition(".") for full in self.not_provided)
        return {
            *self.names[module],
            *self.submodules(module),
            *(name for owner, _, name in refused if owner == module),
        }

    def hint(self, module: str, name: str) -> str:
        """Return a hint about a name that a module lacks: the module that has it, or a similar name."""
        if name.startswith("__"):  # what Python and libraries look for
            return ""
        if places := self.holders.get(name):
            return f": it means several things; import that of {' or '.join(places)}"
        if found := next((each for each in self.names if each.endswith(f".{name}")), None):
            return f": the module is {found}"
        return suggest(name, self.names_in(module)) or suggest(name, self.holders)

    def is_package(self, module: str) -> bool:
        """Return whether a module has submodules."""
        return bool(self.submodules(module))


@cache
def module_table() -> ModuleTable:
    """Return the table that interface.toml holds."""
    text = files(_PACKAGE).joinpath("interface", "interface.toml").read_text(encoding="utf-8")
    return parse_table(text)


def parse_table(text: str) -> ModuleTable:
    """Parse a text in the format of interface.toml; raise a ValueError for a name that no module defines."""
    read = tomllib.loads(text)
    not_provided = _instead(read.pop("not_provided", []))
    refused_modules = _instead(read.pop("module_not_provided", []))
    own: dict[str, dict[str, Home]] = {module: {} for module in read}
    handed_on: list[tuple[str, str, str]] = []
    for module, holders in read.items():
        for holder, listed in holders.items():
            for word in listed.split():
                name, _, here = word.partition("=")
                if holder.partition(".")[0] == "accelerate":  # another module of the interface
                    handed_on.append((module, holder, name))
                else:
                    own[module][name] = Home(f"{_PACKAGE}.{holder}", here or name)
    names = {module: dict(homes) for module, homes in own.items()}
    refused = dict(not_provided)
    for module, holder, name in handed_on:
        if (home := own.get(holder, {}).get(name)) is not None:
            names[module][name] = home
        elif (reason := not_provided.get(f"{holder}.{name}")) is not None:
            refused[f"{module}.{name}"] = reason
        else:
            raise ValueError(f"interface.toml: {module} takes {name} from {holder}, which lacks it")
    return ModuleTable(
        names=MappingProxyType({module: MappingProxyType(homes) for module, homes in names.items()}),
        not_provided=MappingProxyType(refused),
        modules_not_provided=MappingProxyType(refused_modules),
        holders=MappingProxyType(_find_holders(own, not_provided)),
    )


def _find_holders(
    own: Mapping[str, Mapping[str, Home]], not_provided: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Return the modules that define each name; if no module does, the modules that refuse it."""
    provided: dict[str, dict[Home, str]] = {}
    for module, homes in own.items():
        for name, home in homes.items():
            provided.setdefault(name, {}).setdefault(home, module)
    found = {name: tuple(modules.values()) for name, modules in provided.items()}
    refused: dict[str, dict[str, str]] = {}
    for full, reason in not_provided.items():
        module, _, name = full.rpartition(".")
        refused.setdefault(name, {}).setdefault(reason, module)
    return {name: tuple(modules.values()) for name, modules in refused.items()} | found


def _instead(refused: list[dict[str, str]]) -> dict[str, str]:
    """Return the advice for each name that tables of refused names list."""
    return {name: each["instead"] for each in refused for name in each["names"].split()}
