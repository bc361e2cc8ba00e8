"""The registry of backends: those announced by installed packages and those added by a program."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from drivetrain_backends.errors import UnknownBackendError
from drivetrain_messages import suggest

_GROUP = "drivetrain.backends"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendRegistry:
    """The backends by name. An immutable value: adding a backend returns a new registry.

    Attributes:
        added: The added backend classes by name; they take precedence over installed ones.

    Example:
        >>> "ddp" in BackendRegistry().names()
        True
    """

    added: Mapping[str, type[Any]] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Return every name that `get` knows, sorted."""
        return sorted({*self.added, *(point.name for point in entry_points(group=_GROUP))})

    def get(self, name: str) -> type[Any]:
        """Return a backend class, importing its module only now.

        Raises:
            UnknownBackendError: No such backend; the message lists the known ones.
        """
        if name in self.added:
            return self.added[name]
        for point in entry_points(group=_GROUP, name=name):
            return point.load()
        known = self.names()
        meant = suggest(name, known, likeness=0.65)
        raise UnknownBackendError(
            f"backend={name!r}: there is no such backend{meant}; must be 'auto' or one of "
            f"{', '.join(map(repr, known))}; a backend of another package is found by its "
            f"entry point {_GROUP!r} once that package is installed"
        )


def register_backend(
    name: str, backend: type[Any], registry: BackendRegistry | None = None
) -> BackendRegistry:
    """Add a backend for one program or notebook, without packaging it.

    Args:
        name: The value of `backend=` that selects the backend.
        backend: A class that implements `drivetrain_backends.Backend`.
        registry: The registry to extend; the installed backends by default.

    Returns:
        A new registry with the backend added.
    """
    return BackendRegistry(added={**(registry or BackendRegistry()).added, name: backend})
