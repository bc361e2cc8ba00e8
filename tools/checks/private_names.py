"""Private names of other libraries stand in `compat.py`, and in the table of docs/design/platforms.md."""

import ast
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import PurePosixPath

from checks.findings import Finding
from checks.sources import Source

TABLE = "docs/design/platforms.md"
# What may stand in other files too, each with the reason.
ALLOWED_NAMES = {
    **dict.fromkeys(
        ("_replace", "_asdict", "_make", "_exit", "_current_frames", "_getframe"), "documented by Python"
    ),
    **dict.fromkeys(("_fetcher", "_drivetrain_dataset"), "drivetrain's own, on objects of others"),
    **dict.fromkeys(("_no_split_modules", "_skip_keys_device_placement"), "declared by transformers' models"),
    **dict.fromkeys(("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected"), "the same"),
    **dict.fromkeys(("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_init_weights"), "the same"),
    "_from_config": "transformers' only way to build a model of a class from its config",
    "_distributed": "where a stream of datasets keeps its division, which no name of torch tells",
    "_rand": "NumPy's global generator, in the one place that must know it",
}
ALLOWED_FILES = {
    "packages/state/src/drivetrain_state/hang/stack.py": "names of frames; read by the launcher without torch"
}
_READERS = frozenset({"getattr", "hasattr", "setattr", "delattr", "attrgetter"})


def private_names(sources: Iterable[Source], table: str) -> list[Finding]:
    """Return private names of other libraries that stand outside `compat.py`, or have no row in the table.

    Not seen: a method that overrides a private one, and a name that the file itself defines, unless a row lists it.

    Args:
        sources: The files of all packages.
        table: The text of docs/design/platforms.md.
    """
    files, listed = list(sources), frozenset(re.findall(r"`(_\w+)`", table))
    owned: dict[str, set[str]] = {}  # by package
    for source in files:
        owned.setdefault(_package(source), set()).update(_defined(source.tree))
    found: list[Finding] = []
    for source in files:
        is_compat = PurePosixPath(source.path).name == "compat.py"
        own = frozenset[str]() if is_compat else _defined(source.tree) - listed
        inherited = {name for package in _packages_of(source) for name in owned.get(package, ())}
        for node in ast.walk(source.tree) if source.path not in ALLOWED_FILES else ():
            for name in sorted({*_private(node, inherited)} - own - ALLOWED_NAMES.keys()):
                if is_compat and not any(name.endswith(row) for row in listed):  # as mangled names end
                    found.append(source.finding(node, f"{name} has no row in the table of {TABLE}"))
                elif not is_compat and (name in listed or not isinstance(node, ast.Constant)):
                    place = f"the package's compat.py, with a test and a row in {TABLE}"
                    found.append(
                        source.finding(node, f"{name} is private to another library: use it in {place}")
                    )
    return found


def _packages_of(source: Source) -> Iterator[str]:
    """Yield the package of a file, and those of the workspace whose classes the file imports and may extend."""
    yield _package(source)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("drivetrain"):
            yield f"packages/{str(node.module).partition('.')[0].removeprefix('drivetrain_')}"


def _private(node: ast.AST, owned: Collection[str]) -> Iterator[str]:
    """Yield the private names in an import, an attribute, a call of `getattr` or its like, or a string."""
    match node:
        case ast.ImportFrom(module=str(module), names=aliases) if _is_foreign(module):
            names = [*module.split("."), *(alias.name for alias in aliases)]
        case ast.Import(names=aliases):
            names = [part for one in aliases if _is_foreign(one.name) for part in one.name.split(".")]
        case ast.Attribute(value=ast.Name(id="self") | ast.Call(func=ast.Name(id="super")), attr=name):
            names = [name] if name not in owned else []
        case ast.Attribute(attr=name):
            names = [name]
        case ast.Call(func=ast.Name(id=called), args=arguments) if called in _READERS:
            names = [one.value for one in arguments if isinstance(one, ast.Constant)]
            names = [name for name in names if name not in owned]
        case ast.Constant(value=str(text)) if re.fullmatch(r"[\w.]+", text):
            names = text.split(".")
        case _:
            return
    yield from (name for name in names if isinstance(name, str) and re.match("_[A-Za-z]", name))


def _defined(tree: ast.Module) -> frozenset[str]:
    """Return the names of the functions, classes, variables and attributes of `self` that a file defines."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    stored = [node for node in ast.walk(tree) if isinstance(getattr(node, "ctx", None), ast.Store)]
    names = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
    names |= {node.id for node in stored if isinstance(node, ast.Name)}
    attributes = [node for node in stored if isinstance(node, ast.Attribute)]
    return frozenset(names | {node.attr for node in attributes if ast.unparse(node.value) == "self"})


def _is_foreign(module: str) -> bool:
    top = module.partition(".")[0]
    return not top.startswith("drivetrain") and top not in sys.stdlib_module_names


def _package(source: Source) -> str:
    return "/".join(PurePosixPath(source.path).parts[:2])
