"""Tables for a terminal or a log."""

from collections.abc import Collection, Sequence


def format_table(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), indent: str = "") -> str:
    """Return rows as lines, with columns as wide as needed and two blanks between columns.

    Args:
        rows: The cells of each row, the same number in all; the first row may be a header.
        right: The columns to align at their right end, such as numbers.
        indent: The text at the beginning of each line.

    Returns:
        One line per row, without blanks at the end, joined by line breaks; "" without a row.

    Example:
        >>> print(format_table([("rank", "loss"), ("0", "0.5")]))
        rank  loss
        0     0.5
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            f"{cell:>{width}}" if at in right else f"{cell:<{width}}"
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(f"{indent}{line}".rstrip() for line in lines)
