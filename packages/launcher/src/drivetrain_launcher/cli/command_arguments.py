"""Find the dataclass of a command's arguments without the imports of the command's module, which may take seconds."""

import ast
from importlib import import_module
from typing import Any, get_type_hints

from drivetrain_config.plugins.installed import EntryPoint
from drivetrain_launcher.module_summary import parse_module


def find_function(module: str, name: str) -> ast.FunctionDef | None:
    """Return the definition of a function of a module; None if the module's source has none."""
    functions = (node for node in parse_module(module).body if isinstance(node, ast.FunctionDef))
    return next((node for node in functions if node.name == name), None)


def find_argument_class(module: str, function: ast.FunctionDef | None) -> tuple[str, ast.ClassDef] | None:
    """Return the module and the definition of a function's first argument's class, imported into `module` or not."""
    if function is None or not function.args.args or function.args.args[0].annotation is None:
        return None
    return _find_class(module, ast.unparse(function.args.args[0].annotation).strip("'\""))


def _find_class(module: str, name: str) -> tuple[str, ast.ClassDef] | None:
    for node in parse_module(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and node.module and name in {each.name for each in node.names}:
            return _find_class(node.module, name)
    return None


def load_arguments(point: EntryPoint) -> tuple[type[Any], str]:
    """Return the dataclass of a command's arguments, and the first line of its function's docstring.

    If the dataclass stands in a module of its own, that module alone is imported: the help of a command, and what is
    wrong with a command line, then wait for none of the command's imports.
    """
    module, _, name = point.value.partition(":")
    function = find_function(module, name)
    found = find_argument_class(module, function)
    if function is not None and found is not None and found[0] != module:
        kind = getattr(import_module(found[0]), found[1].name)
        return kind, (ast.get_docstring(function) or "").partition("\n")[0]
    run: Any = point.load()
    kind = next(hint for argument, hint in get_type_hints(run).items() if argument != "return")
    return kind, (run.__doc__ or "").partition("\n")[0]
