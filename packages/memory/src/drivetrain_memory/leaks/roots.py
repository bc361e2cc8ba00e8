"""The names and lines that a user knows: globals of modules, and locals of every running function and thread."""

import linecache
import sys
import sysconfig
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from drivetrain_memory.compat import allocation_frames

_OWN_PACKAGE = __name__.partition(".")[0]
_CONTAINERS = (
    list,
    dict,
    set,
    deque,
    OrderedDict,
    defaultdict,
    WeakKeyDictionary,
    WeakValueDictionary,
    type(cache(len)),
)
_OPTIMIZED = 0x1  # CO_OPTIMIZED of inspect: a function, whose locals are no dict of their own


def library_folders() -> tuple[str, ...]:
    """Return the folders of Python's own modules and of installed packages."""
    paths = sysconfig.get_paths()
    return tuple({paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_users(file: str | None, libraries: tuple[str, ...]) -> bool:
    """Return whether a file belongs to the user: not to Python, an installed package or this package."""
    if file is None or file.startswith("<frozen"):
        return False
    return not file.startswith((*libraries, str(Path(__file__).parent)))


def line_that_made(value: object) -> str | None:
    """Return file, number and text of the user's line that made an object; None if `tracemalloc` did not run then."""
    libraries = library_folders()
    for file, line in allocation_frames(value):
        if is_users(file, libraries):
            return f"{Path(file).name}:{line}: {linecache.getline(file, line).strip()}".rstrip(": ")
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names by which objects are reached; `users` has `losses (local of train)` and `__main__.losses`."""

    users: list[tuple[str, Any]]
    of_libraries: list[tuple[str, Any]]  # of containers and caches in modules of libraries
    users_modules: frozenset[str]


def find_names() -> Names:
    """Find the names of the whole process."""
    libraries = library_folders()
    modules = [one for one in list(sys.modules.values()) if type(one) is ModuleType]
    of_user = [
        one for one in modules if one.__name__ == "__main__" or is_users(vars(one).get("__file__"), libraries)
    ]
    frames = list(_frames())
    users: list[tuple[str, Any]] = []
    # The locals of the user's functions first: their names say more.
    for frame, thread in sorted(frames, key=lambda one: not is_users(one[0].f_code.co_filename, libraries)):
        if frame.f_code.co_flags & _OPTIMIZED:
            where = f"local of {frame.f_code.co_qualname}{thread}"
            users += ((f"{name} ({where})", value) for name, value in locals_of(frame).items())
    for one in of_user:
        users += _items(vars(one), f"{one.__name__}.")
    seen = {id(vars(one)) for one in modules}
    executed: set[str] = set()
    for frame, _ in frames:  # of code that was executed without a module
        if id(frame.f_globals) not in seen:
            seen.add(id(frame.f_globals))
            name = str(frame.f_globals.get("__name__", "?"))
            executed.add(name)
            users += _items(frame.f_globals, f"{name}.")
    of_libraries = [
        (name, value)
        for one in modules
        if one not in of_user and not one.__name__.startswith((_OWN_PACKAGE, "linecache", "tracemalloc"))
        for name, value in _items(vars(one), f"{one.__name__}.")
        if type(value) in _CONTAINERS
    ]
    return Names(
        users=users,
        of_libraries=of_libraries,
        users_modules=frozenset(one.__name__ for one in of_user) | executed,
    )


def _items(namespace: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in list(namespace.items()):
        if not (name.startswith("__") and name.endswith("__")):
            yield prefix + name, value


def _frames() -> Iterator[tuple[FrameType, str]]:
    """Yield the frames of all threads, innermost first, with the thread's name unless it is the main thread."""
    names = {one.ident: one.name for one in threading.enumerate() if one is not threading.main_thread()}
    for ident, top in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage] - documented
        frame: FrameType | None = top
        while frame is not None:
            if not frame.f_globals.get("__name__", "").startswith(_OWN_PACKAGE):
                thread = f", thread {names[ident]}" if ident in names else ""
                yield frame, thread
            frame = frame.f_back


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Return a copy of a running function's locals; dropping the copy releases the locals."""
    live = frame.f_locals
    found = dict(live)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & _OPTIMIZED:
        live.clear()  # until 3.13 a snapshot, which the frame keeps: it would hold what the function lets go
    return found
