"""Run a script or module in this process exactly as `python SCRIPT` or `python -m MODULE` would.

`sys.argv`, `sys.path[0]`, `sys.modules["__main__"]` and its attributes are set as Python sets them. Tracebacks
are shown without the launcher's frames.
"""

import builtins
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from importlib.util import find_spec
from os import getcwd, path
from pkgutil import get_importer
from types import CodeType, ModuleType, TracebackType
from typing import NoReturn

_FINDING = (__name__, "importlib.util", "importlib._bootstrap", "importlib._bootstrap_external")

# Called with an uncaught exception of the script, without the launcher's frames in its traceback.
OnError = Callable[[BaseException], None]


def show_error(error: BaseException) -> None:
    """Show an uncaught exception as Python does, through `sys.excepthook`."""
    sys.excepthook(type(error), error, error.__traceback__)


def run_as_main(
    name: str, arguments: Sequence[str], *, is_module: bool = False, on_error: OnError = show_error
) -> None:
    """Run a script, a folder or zip file with a `__main__.py`, or a module as the main program.

    `on_error` is called with an uncaught exception of the program.

    Raises:
        SystemExit: If the program exits, cannot be started (code 1 or 2), or ends with an exception (code 1).
        KeyboardInterrupt: If the program is interrupted; leave it uncaught to end the process as Python does.
    """
    sys.argv = [name, *arguments]
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    try:
        if is_module:
            _put_first_on_path(getcwd())
            spec = _find_module(name)
            if spec.submodule_search_locations is not None:  # a package
                spec = _find_module(f"{name}.__main__")
            code = _code_of(main, spec)
            sys.argv[0] = spec.origin or name
        else:
            code = _load_script(main, name)
        exec(code, main.__dict__)
    except (SystemExit, KeyboardInterrupt) as error:
        stop, frames, hook = error, _frames_of(main, error), sys.excepthook

        def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            # Python shows `stop` at its very end, after the launcher's frames were added again.
            taken = frames if error is stop else traceback
            hook(kind, error.with_traceback(taken), taken)

        sys.excepthook = show
        raise
    except BaseException as error:  # noqa: BLE001 - on_error shows every error of the program
        on_error(error.with_traceback(_frames_of(main, error)))
        raise SystemExit(1) from None


def _load_script(main: ModuleType, name: str) -> CodeType:
    """Load the code of a script, and prepare `main` and `sys.path` for it."""
    absolute = path.join(getcwd(), name)  # not normalised, as in Python
    importer = get_importer(name)
    if importer is not None:
        _put_first_on_path(absolute)
        spec = importer.find_spec("__main__")
        if spec is None:
            _end(f"can't find '__main__' module in {absolute!r}", 1)
        return _code_of(main, spec)
    _put_first_on_path(path.dirname(path.realpath(name)))
    kind = SourcelessFileLoader if name.endswith(".pyc") else SourceFileLoader
    loader = kind("__main__", absolute)
    main.__dict__.update(
        __file__=absolute, __cached__=None, __loader__=loader, __package__=None, __spec__=None
    )
    if isinstance(loader, SourcelessFileLoader):
        code = loader.get_code("__main__")
        assert code is not None
        return code
    try:
        source = loader.get_data(absolute)
    except OSError as error:
        _end(f"can't open file {absolute!r}: [Errno {error.errno}] {error.strerror}", 2)
    return loader.source_to_code(source, absolute)


def _find_module(name: str) -> ModuleSpec:
    try:
        spec = find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise  # a parent package exists, but one of its own imports is missing
        spec = None
    if spec is None:
        _end(f"No module named {name}", 1)
    return spec


def _code_of(main: ModuleType, spec: ModuleSpec) -> CodeType:
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(spec.name) if get_code is not None else None
    if code is None:
        _end(f"No code object available for {spec.name}", 1)
    main.__dict__.update(
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=spec.loader,
        __package__=spec.parent,
        __spec__=spec,
    )
    return code


def _put_first_on_path(folder: str) -> None:
    """Replace the first entry of sys.path, which Python set for the launcher, by `folder`."""
    if not sys.flags.safe_path:  # python -P adds no such entry, for the launcher or the program
        sys.path[0] = folder


def _frames_of(main: ModuleType, error: BaseException) -> TracebackType | None:
    """Return the traceback from the program's first frame on; None without such a frame, as for a syntax error.

    A package around a module runs before the module does: its frames follow the frames that find the module.
    """
    found = error.__traceback__
    while found is not None and found.tb_frame.f_globals is not main.__dict__:
        found = found.tb_next
    if found is not None:
        return found
    found = error.__traceback__
    while found is not None and found.tb_frame.f_globals.get("__name__") in _FINDING:
        found = found.tb_next
    return found


def _end(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"{sys.executable}: {message}\n")
    raise SystemExit(code)
