"""The base of the classes whose instances all have the same attributes."""

from typing import Any, ClassVar, Self


class SharedState:
    """A view of attributes that all instances of a class share, until they are reset.

    Attributes:
        _shared_state: The attributes; a subclass defines its own dict.
    """

    _shared_state: ClassVar[dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Return a view of the shared attributes."""
        del args, kwargs
        view = super().__new__(cls)
        view.__dict__ = cls._shared_state
        return view

    def __reduce__(self) -> Any:
        # A copy or pickle is a view of the process that reads it: a group and its threads belong to one process, and
        # transformers pickles its arguments with the state that they hold.
        return _view_of, (type(self),)

    @property
    def initialized(self) -> bool:
        """True if an instance was constructed since the start or the last reset."""
        return bool(self._shared_state)

    @classmethod
    def _reset_state(cls) -> None:
        """Forget all attributes, as a test does between its runs."""
        cls._shared_state.clear()


def _view_of(kind: type[SharedState]) -> SharedState:
    """Return a view of the state of this process, for copy and pickle."""
    return kind.__new__(kind)
