"""Shortened lists, and counts with their noun."""

from collections.abc import Iterable


def list_some(items: Iterable[object], *, most: int = 5) -> str:
    """Return the first items and the number of others, such as "a, b and 3 more".

    Args:
        items: The items, shown by `str`.
        most: The number of items to show.
    """
    shown = [str(item) for item in items]
    others = f" and {len(shown) - most} more" if len(shown) > most else ""
    return f"{', '.join(shown[:most])}{others}"


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 process" or "2 processes"."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
