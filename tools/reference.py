"""Writes the reference of the documentation: a page a package, from what the package says about itself.

`docs/conf.py` calls `write_reference` at the start of a build. Nothing here is kept under version control.
"""

import inspect
import json
from collections.abc import Collection, Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType

from checks.workspace import Package, read_packages

_KNOWN_BASES = ("BaseException", "Exception", "Module", "Protocol", "object")


def write_reference(root: Path) -> None:
    """Write every page into docs/reference/, leaving those alone that have not changed."""
    packages = list(read_packages(root).values())
    homes = {package.module for package in packages}
    pages = {
        package.module: package_page(package, import_module(package.module), homes) for package in packages
    }
    pages["index"] = index_page(packages)
    pages["settings"] = settings_page()
    pages["changelogs"] = changelogs_page(root, packages)
    folder = root / "docs" / "reference"
    folder.mkdir(exist_ok=True)
    for name, text in pages.items():
        file = folder / f"{name}.md"
        if not file.exists() or file.read_text() != text:
            file.write_text(text)


def package_page(package: Package, module: ModuleType, modules: Collection[str]) -> str:
    """The page of one package: its own names from their docstrings, re-exported ones as links to their home.

    Args:
        package: The package.
        module: The package, imported.
        modules: The import names of all packages, each of which has a page.
    """
    names: list[str] = getattr(module, "__all__", [])
    homes = {name: _home(getattr(module, name)) for name in names}
    lent = [name for name in names if homes[name] in modules and homes[name] != package.module]
    own = [name for name in names if name not in lent]
    text = f"# {package.distribution}\n\n```{{eval-rst}}\n.. automodule:: {package.module}\n   :no-members:\n```\n"
    text += "".join(_entry(package.module, name, getattr(module, name)) for name in own)
    if lent:
        text += "\n## Names from the other packages\n\n| name | documented with |\n|---|---|\n"
        text += "".join(f"| `{name}` | [{homes[name]}]({homes[name]}.md) |\n" for name in lent)
    return text


def settings_page() -> str:
    """A table for each section that any installed package declares."""
    from drivetrain_config import markdown_table, sections

    text = (
        "# Settings\n\nEvery setting, by section. Code wins over the command line, the command line over the\n"
        "environment, the environment over the file, the file over the default.\n"
    )
    for name, section in sorted(sections().items()):
        summary = inspect.cleandoc(section.__doc__ or "").partition("\n\n")[0]
        text += f"\n## {name}\n\n{summary}\n\n{markdown_table(section, name)}\n"
    return text


def changelogs_page(root: Path, packages: Iterable[Package]) -> str:
    """The packages' changelogs, one under the other."""
    text = "# Changelogs\n"
    for package in packages:
        lines = (root / "packages" / package.name / "CHANGELOG.md").read_text().splitlines()
        body = [f"#{line}" if line.startswith("#") else line for line in lines if not line.startswith("# ")]
        text += f"\n## {package.distribution}\n\n" + "\n".join(body).strip() + "\n"
    return text


def index_page(packages: Iterable[Package]) -> str:
    """The list of all reference pages."""
    pages = "\n".join(package.module for package in packages)
    return (
        "# Reference\n\nWritten from the docstrings of every public name, a page a package.\n\n"
        f"```{{toctree}}\n:maxdepth: 1\n\nsettings\n{pages}\n```\n"
    )


def _home(value: object) -> str:
    """The top-level package in which a value was defined; "" for a plain value, which does not tell."""
    return str(getattr(value, "__module__", "") or "").partition(".")[0]


def _entry(module: str, name: str, value: object) -> str:
    """The lines that have autodoc document one name."""
    heading = f"\n## {name}\n\n"
    if inspect.isclass(value):
        # What every exception or module has by itself is not repeated.
        kind, options = "autoclass", f"   :members:\n   :inherited-members: {', '.join(_KNOWN_BASES)}\n"
    elif inspect.isroutine(value):
        kind, options = "autofunction", ""
    elif inspect.ismodule(value):
        kind, options = "automodule", "   :members:\n"
    else:
        # Not autodata, which would show the docstring of the value's type.
        kind, options = "py:data", f"   :value: {json.dumps(repr(value))[1:-1][:80]}\n"
    return f"{heading}```{{eval-rst}}\n.. {kind}:: {module}.{name}\n{options}```\n"
