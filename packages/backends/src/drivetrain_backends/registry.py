"""Which backends there are: those that installed packages announce, and those a program adds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from drivetrain_backends.errors import UnknownBackendError

_GROUP = "drivetrain.backends"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendRegistry:
    """Backends by name. A value: adding one gives a new registry and changes nothing elsewhere.

    Attributes:
        added: Backend classes by name, beside the installed ones and before them.
    """

    added: Mapping[str, type[Any]] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Every name that `get` knows, sorted."""
        return sorted({*self.added, *(point.name for point in entry_points(group=_GROUP))})

    def get(self, name: str) -> type[Any]:
        """Find a backend class; its module is imported only now.

        Raises:
            UnknownBackendError: No such backend; the message lists those there are.
        """
        if name in self.added:
            return self.added[name]
        for point in entry_points(group=_GROUP, name=name):
            return point.load()
        raise UnknownBackendError(
            f"backend={name!r}: must be 'auto' or one of {', '.join(map(repr, self.names()))}; a backend of another "
            f"package is found by its entry point {_GROUP!r} once that package is installed"
        )


def register_backend(
    name: str, backend: type[Any], registry: BackendRegistry | None = None
) -> BackendRegistry:
    """Add a backend for one program or notebook, without packaging it.

    Args:
        name: What `backend=` is to call it.
        backend: A class of the shape of `drivetrain_backends.Backend`.
        registry: What to add to; the installed backends by default.

    Returns:
        A registry that knows it. Nothing is changed in place.
    """
    return BackendRegistry(added={**(registry or BackendRegistry()).added, name: backend})
