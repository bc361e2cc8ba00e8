"""Which tests a change can reach: those that import what changed, or name it in the programs that they start.

A package's `__init__` imports what it exports only where a name is asked for, so that `from drivetrain_data import
trim` reaches the module that defines `trim`, and no other. Entry points reach what they name from every file that
names their group.
"""

import ast
import re
import subprocess
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_SOURCES = ("packages/*/src", "tests", "tools")  # folders that modules are imported from
_PROGRAMS = ("examples", "benchmarks")  # whose files tests start by their names
_SKETCHES = ("docs/design.md", "docs/design/platforms.md")  # their blocks do not run: see conftest.py
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def changed_files(root: Path, base: str) -> list[Path]:
    """Return the files that differ from a commit, and those that git does not know yet.

    Raises:
        ValueError: Git knows no such commit.
    """
    commands = (
        ["diff", "--no-renames", "--name-only", base, "--"],
        ["ls-files", "--others", "--exclude-standard"],
    )
    found: list[Path] = []
    for command in commands:
        done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"git cannot compare with {base!r}: {done.stderr.strip()}")
        found += [root / name for name in done.stdout.splitlines()]
    return found


def reached_tests(root: Path, changed: Sequence[Path]) -> list[Path] | None:
    """Return the test files and pages that a change can reach, or None for all.

    All are reached by a file that is gone, or is neither Python nor a page: a build's settings, a lock, C++.
    """
    files = _Files(root)
    if any(file not in files.texts and file.suffix != ".svg" for file in changed):
        return None
    users: dict[Path, set[Path]] = {}
    for file in files.texts:
        for other in files.used_by(file):
            users.setdefault(other, set()).add(file)
    reached, pending = set(changed), list(changed)
    while pending:
        new = users.get(pending.pop(), set()) - reached
        reached |= new
        pending += new
    return sorted(file for file in reached if _is_test(root, file, files.texts.get(file, "")))


def _is_test(root: Path, file: Path, text: str) -> bool:
    if file.suffix == ".md":
        return _BLOCK.search(text) is not None and str(file.relative_to(root)) not in _SKETCHES
    return file.is_relative_to(root / "tests") and file.name.startswith("test_")


class _Files:
    """The Python files and pages of a workspace, and what each uses.

    Args:
        root: The repository.

    Attributes:
        texts: The text of every file.
    """

    def __init__(self, root: Path) -> None:
        sources = [folder for pattern in _SOURCES for folder in sorted(root.glob(pattern))]
        programs = [file for folder in _PROGRAMS for file in (root / folder).glob("*.py")]
        python = [file for folder in sources for file in folder.rglob("*.py")]
        pages = [root / "README.md", *root.glob("docs/**/*.md"), *root.glob("packages/*/*.md")]
        self.texts = {
            file: file.read_text()
            for file in (*python, *programs, *pages, root / "conftest.py")
            if file.exists()
        }
        self._modules = {
            _module_name(file.relative_to(folder)): file
            for folder in sources
            for file in folder.rglob("*.py")
        }
        self._by_name = {file.name: file for file in (*programs, *(f for f in python if "tests" in f.parts))}
        self._exports = {
            name: dict(self._exported(file)) for name, file in self._modules.items() if "." not in name
        }
        self._entry_points = dict(self._read_entry_points(root))

    def used_by(self, file: Path) -> Iterator[Path]:
        """Yield the files that a file imports, starts, or is collected with."""
        for tree in self._trees(file):
            for node in ast.walk(tree):
                yield from self._used_in(node)
        for folder in file.parents:
            if (folder / "conftest.py") in self.texts and (
                file.suffix == ".md" or file.name.startswith("test_")
            ):
                yield folder / "conftest.py"

    def _trees(self, file: Path) -> Iterator[ast.AST]:
        """Yield the syntax of a file, of a page's blocks, and of the programs that stand in its strings."""
        text = self.texts[file]
        for source in [text] if file.suffix == ".py" else _BLOCK.findall(text):
            if (tree := _parsed(source)) is None:
                continue
            if file.name == "__init__.py" and "tests" not in file.parts:
                return  # what it exports is used where it is asked for
            yield tree
            for node in ast.walk(tree):
                match node:
                    case ast.Constant(value=str(text)) if "import " in text:
                        yield _parsed(textwrap.dedent(text)) or node
                    case _:
                        pass

    def _used_in(self, node: ast.AST) -> Iterator[Path]:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield from self._files_of(alias.name)
            case ast.Assign(targets=[ast.Name(id="pytest_plugins")], value=ast.List(elts=plugins)):
                for plugin in plugins:
                    if isinstance(plugin, ast.Constant):
                        yield from self._files_of(str(plugin.value))
            case ast.ImportFrom(module=str(module), names=names):
                for alias in names:
                    defined = self._exports.get(module, {}).get(alias.name, module)
                    yield from self._files_of(f"{defined}.{alias.name}")
                    yield from self._files_of(defined)
            case ast.Constant(value=str(text)):
                yield from self._entry_points.get(text, ())
                if text.endswith(".py") and (file := self._by_name.get(text.rpartition("/")[2])):
                    yield file
                yield from self._files_of(f"{text}.__main__")
            case _:
                pass

    def _files_of(self, module: str) -> Iterator[Path]:
        if module in self._modules:
            yield self._modules[module]

    def _exported(self, file: Path) -> Iterator[tuple[str, str]]:
        """Yield the names that a package's `__init__` imports for type checkers, and their modules."""
        for node in ast.walk(_parsed(self.texts[file]) or ast.Module(body=[], type_ignores=[])):
            if isinstance(node, ast.ImportFrom) and node.module:
                yield from ((alias.name, node.module) for alias in node.names)

    def _read_entry_points(self, root: Path) -> Iterator[tuple[str, list[Path]]]:
        found: dict[str, list[Path]] = {}
        for file in root.glob("packages/*/pyproject.toml"):
            project: Mapping[str, Mapping[str, Mapping[str, str]]] = tomllib.loads(file.read_text())[
                "project"
            ]
            for group, points in project.get("entry-points", {}).items():
                for target in points.values():
                    found.setdefault(group, []).extend(self._files_of(str(target).partition(":")[0]))
        yield from found.items()


def _module_name(file: Path) -> str:
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


def _parsed(text: str) -> ast.AST | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None
