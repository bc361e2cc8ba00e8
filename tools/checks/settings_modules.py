"""A settings module needs Python alone, so that the launcher reads every section without torch."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from checks.findings import Finding
from checks.sources import Source
from checks.workspace import Package

# Runs in a process of its own: imports each module with everything blocked that is neither Python's nor ours.
_PROBE = """
import importlib, json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and not top.startswith(("drivetrain", "_")):
            raise ImportError(f"needs {name}, which is not of Python's standard library")

sys.meta_path.insert(0, Blocked())
sys.path[:0] = sys.argv[1].split(",")
failures = {}
for module in sys.argv[2].split(","):
    try:
        importlib.import_module(module)
    except Exception as error:
        failures[module] = f"{type(error).__name__}: {error}"
print(json.dumps(failures))
"""


def foreign_imports(source: Source) -> list[Finding]:
    """Imports in a `settings.py` of anything but the standard library."""
    if not source.path.endswith("/settings.py"):
        return []
    return [
        source.finding(node, f"imports {module}; a settings module imports the standard library alone")
        for node in ast.walk(source.tree)
        for module in _imported(node)
        if module.partition(".")[0] not in sys.stdlib_module_names
    ]


def unimportable_settings(root: Path, packages: Iterable[Package]) -> list[Finding]:
    """Settings modules that cannot be imported while torch and every other third party is blocked."""
    sources = {package.module: root / "packages" / package.name / "src" for package in packages}
    files = {f"{name}.settings": source / name / "settings.py" for name, source in sources.items()}
    modules = [module for module, file in files.items() if file.exists()]
    if not modules:
        return []
    command = [sys.executable, "-c", _PROBE, ",".join(map(str, sources.values())), ",".join(modules)]
    finished = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    failures: dict[str, str] = json.loads(finished.stdout)
    return [
        Finding(where=files[module].relative_to(root).as_posix(), message=f"without third parties: {reason}")
        for module, reason in failures.items()
    ]


def _imported(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=module, level=level):
            yield module or "." * level
        case _:
            return
