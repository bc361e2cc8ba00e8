"""The known name that is nearest to a misspelled name."""

from collections.abc import Callable, Iterable


def find_near(name: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """Return the nearest known name; None if none is near.

    Args:
        name: The name as given.
        known: The names that exist.
        likeness: The minimum likeness of two names, 0 to 1 (equal); see `difflib.get_close_matches`.
    """
    from difflib import get_close_matches  # only an error needs it

    return next(iter(get_close_matches(name, list(known), n=1, cutoff=likeness)), None)


def suggest(
    name: str, known: Iterable[str], *, likeness: float = 0.6, show: Callable[[str], object] = str
) -> str:
    """Return the end of an error about an unknown name: "; did you mean NEAREST", or "" if no known name is near.

    Args:
        name: The name as given.
        known: The names that exist.
        likeness: The minimum likeness of two names; see `find_near`.
        show: A function that returns the text to show for the nearest name, such as its path.

    Example:
        >>> suggest("steps", ["step", "loss"])
        '; did you mean step'
    """
    near = find_near(name, known, likeness=likeness)
    return "" if near is None else f"; did you mean {show(near)}"
