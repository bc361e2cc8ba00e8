"""What a module never does: read the environment, write a global, swallow an error, keep state in a module."""

import ast
from collections.abc import Callable, Iterator

from checks.findings import Finding
from checks.sources import Source

ENVIRONMENT_DOOR = "packages/config/src/drivetrain_config/environ.py"

_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"})
_EVERYTHING = frozenset({"Exception", "BaseException"})
_CONTAINERS = frozenset(
    {"list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter"}
)
_MUTATORS = frozenset(
    {"append", "appendleft", "extend", "insert", "add", "update", "setdefault"}
) | frozenset({"pop", "popitem", "remove", "discard", "clear"})


def environment_access(source: Source) -> list[Finding]:
    """`os.environ` and its kin, anywhere but in the one door."""
    if source.path == ENVIRONMENT_DOOR:
        return []
    message = "touches the process's environment; only drivetrain_config/environ.py does"
    return [source.finding(node, message) for node in ast.walk(source.tree) if _reads_environment(node)]


def global_statements(source: Source) -> list[Finding]:
    """`global` statements."""
    message = "a global statement: pass the value, or keep it on an object"
    return [source.finding(node, message) for node in ast.walk(source.tree) if isinstance(node, ast.Global)]


def swallowed_errors(source: Source) -> list[Finding]:
    """`except Exception` whose body does nothing, a bare one, and `contextlib.suppress(Exception)`."""
    message = "swallows every error: catch the one that is expected, or let it through"
    return [source.finding(node, message) for node in ast.walk(source.tree) if _swallows(node)]


def module_state(source: Source) -> list[Finding]:
    """Containers at module level that a function of the module changes."""
    containers = {name for statement in source.tree.body for name in _containers(statement)}
    return [
        source.finding(node, f"changes {name}, which the module holds: state belongs to an object")
        for function in ast.walk(source.tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
        for name in _changed(node)
        if name in containers and name not in _local_names(function)
    ]


def text_marks(source: Source) -> list[Finding]:
    """Labels of progress as texts: observers and reports know the members of `ProgressMark`."""
    message = "a text as a mark of progress: add it to ProgressMark of drivetrain_state, and mark that"
    return [source.finding(node, message) for node in ast.walk(source.tree) if _marks_text(node)]


RULES: tuple[Callable[[Source], list[Finding]], ...] = (
    environment_access,
    global_statements,
    swallowed_errors,
    module_state,
    text_marks,
)


def _reads_environment(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="os" | "posix"), attr=name):
            return name in _ENVIRONMENT
        case ast.ImportFrom(module="os" | "posix", names=names):
            return any(alias.name in _ENVIRONMENT for alias in names)
        case _:
            return False


def _marks_text(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="mark") | ast.Attribute(attr="mark" | "note"), args=[label, *_]):
            return isinstance(label, ast.Constant) and isinstance(label.value, str)
        case _:
            return False


def _swallows(node: ast.AST) -> bool:
    match node:
        case ast.ExceptHandler(type=caught, body=body):
            return _is_everything(caught) and all(_does_nothing(statement) for statement in body)
        case ast.Call(func=ast.Name(id="suppress") | ast.Attribute(attr="suppress"), args=caught):
            return any(_is_everything(each) for each in caught)
        case _:
            return False


def _is_everything(caught: ast.expr | None) -> bool:
    match caught:
        case None:
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in _EVERYTHING
        case ast.Tuple(elts=several):
            return any(_is_everything(each) for each in several)
        case _:
            return False


def _does_nothing(statement: ast.stmt) -> bool:
    match statement:
        case ast.Pass() | ast.Continue() | ast.Expr(value=ast.Constant()):
            return True
        case _:
            return False


def _containers(statement: ast.stmt) -> Iterator[str]:
    match statement:
        case ast.Assign(targets=targets, value=value):
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name), value=value):
            names = [name]
        case _:
            return
    match value:
        case ast.List() | ast.Dict() | ast.Set() | ast.ListComp() | ast.DictComp() | ast.SetComp():
            yield from names
        case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)) if called in _CONTAINERS:
            yield from names
        case _:
            return


def _changed(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
            yield name
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if method in _MUTATORS:
            yield name
        case _:
            return


def _local_names(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    stored = (node for node in ast.walk(function) if isinstance(node, ast.Name | ast.arg))
    return {
        node.arg if isinstance(node, ast.arg) else node.id
        for node in stored
        if isinstance(node, ast.arg) or isinstance(node.ctx, ast.Store)
    }
