"""Public names of a package whose modules are imported when one of their names is first asked for."""

from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_names(
    package: str, names: Mapping[str, str]
) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """Return a package's `__all__`, `__getattr__` and `__dir__`.

    Args:
        package: The name of the package.
        names: The public names of each of its modules, with spaces between them.
    """
    modules = {name: module for module, listed in names.items() for name in listed.split()}
    public = sorted(modules)

    def get(name: str) -> object:
        if name in modules:
            return getattr(import_module(f"{package}.{modules[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return public, get, lambda: public
