"""No branch on a training backend's name or type, or on that of its prepared models, outside its own files.

That is what the protocols are for: `Backend`, `Prepared`, and those of single abilities.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from checks.findings import Finding
from checks.sources import Source
from checks.workspace import Package


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A backend as its entry point tells: its name, its class's name, and the module that is its own.

    A class of prepared models has no name of a backend.
    """

    name: str
    class_name: str
    module_path: str


def registered_backends(packages: Iterable[Package]) -> list[Registered]:
    """Every backend that a package of the workspace registers."""
    points = [(name, *target.split(":")) for package in packages for name, target in package.backends.items()]
    folders = Counter(module.rpartition(".")[0] for _, module, _ in points)
    return [
        Registered(name=name, class_name=class_name, module_path=_path(module, folders))
        for name, module, class_name in points
    ]


def backend_branches(sources: Iterable[Source], packages: Iterable[Package]) -> list[Finding]:
    """Comparisons with a backend's name, and type tests for its class, outside its own file."""
    sources = list(sources)
    backends = [*registered_backends(packages), *_prepared_classes(sources)]
    found: list[Finding] = []
    for source in sources:
        foreign = [backend for backend in backends if not _owns(backend, source)]
        classes = {backend.class_name: backend for backend in foreign}
        names = classes | {backend.name: backend for backend in foreign if backend.name}
        tuples = {
            target.id: value
            for statement in source.tree.body
            if isinstance(statement, ast.Assign) and isinstance(value := statement.value, ast.Tuple)
            for target in statement.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(source.tree):
            for backend in [*_named(node, names), *_typed(node, classes, tuples)]:
                what = f"the backend {backend.name!r}" if backend.name else backend.class_name
                message = f"branches on {what}: let a protocol of the backends carry the difference"
                found.append(source.finding(node, message))
    return found


def _prepared_classes(sources: Iterable[Source]) -> Iterator[Registered]:
    """The classes of prepared models, each of which belongs to the folder that defines it."""
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef) and re.fullmatch(r"\w+Prepared", node.name):
                folder = "/src" + source.path.rpartition("/")[0].partition("/src")[2]
                yield Registered(name="", class_name=node.name, module_path=folder)


def _path(module: str, folders: Mapping[str, int]) -> str:
    """Where a backend may speak of itself: its file, or the package or the folder within it that is its alone."""
    package, *names = module.split(".")
    has_package = sum(number for folder, number in folders.items() if folder.split(".")[0] == package) == 1
    is_alone = has_package or (len(names) > 1 and folders[module.rpartition(".")[0]] == 1)
    return "/".join(["/src", package, *(names[:-1] if is_alone else names)])


def _owns(backend: Registered, source: Source) -> bool:
    inside = source.path.removesuffix(".py").removesuffix("/__init__")
    return inside.endswith(backend.module_path) or f"{backend.module_path}/" in source.path


def _named(node: ast.AST, names: Mapping[str, Registered]) -> Iterator[Registered]:
    match node:
        case ast.Compare(left=left, comparators=comparators):
            sides = [left, *comparators]
        case ast.Call(func=ast.Attribute(value=text, attr="startswith" | "endswith"), args=[part, *_]):
            sides = [text, part]
        case ast.Subscript(value=ast.Dict(keys=keys), slice=key):
            sides = [key, *(each for each in keys if each is not None)]
        case ast.Match(subject=subject, cases=cases):
            patterns = [part for case in cases for part in ast.walk(case.pattern)]
            sides = [subject, *(part.value for part in patterns if isinstance(part, ast.MatchValue))]
        case _:
            return
    # device.type == "xla", or a device's kind, asks what a device is; torch's devices and our backends share a name.
    if any(re.search(r"device|\bkind\b", ast.unparse(side)) for side in sides):
        return
    constants = [part.value for side in sides for part in ast.walk(side) if isinstance(part, ast.Constant)]
    yield from (names[value] for value in constants if isinstance(value, str) and value in names)


def _typed(
    node: ast.AST, classes: Mapping[str, Registered], tuples: Mapping[str, ast.Tuple]
) -> Iterator[Registered]:
    match node:
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, wanted]):
            parts = list(ast.walk(wanted))
        case ast.Compare(ops=[ast.Is() | ast.IsNot() | ast.Eq() | ast.NotEq()], comparators=[wanted]):
            parts = [wanted]
        case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[wanted]):
            parts = list(ast.walk(wanted))
        case ast.match_case(pattern=pattern):
            parts = [part.cls for part in ast.walk(pattern) if isinstance(part, ast.MatchClass)]
        case _:
            return
    inside = [tuples[part.id] for part in parts if isinstance(part, ast.Name) and part.id in tuples]
    for part in [*parts, *(part for several in inside for part in several.elts)]:
        name = part.attr if isinstance(part, ast.Attribute) else part.id if isinstance(part, ast.Name) else ""
        if name in classes:
            yield classes[name]
