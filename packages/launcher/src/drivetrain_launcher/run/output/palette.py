"""The colours of ranks on a terminal.

Each has a contrast of at least 3.9 with black and with white, so that it can be read on a dark and on a light
background. Red is left to errors.
"""

# Numbers of the 256 colours that terminals share: blue, orange, green, purple, brown-red, violet.
COLOURS = (31, 130, 28, 133, 131, 98)


def prefix_of(rank: int, *, host: str = "", is_coloured: bool = False) -> str:
    """Return what stands before each line of a rank, with the host if there are several."""
    text = f"[rank {rank}{f' {host}' if host else ''}]"
    return f"\x1b[38;5;{COLOURS[rank % len(COLOURS)]}m{text}\x1b[0m " if is_coloured else f"{text} "


def is_coloured(*, no_color: str | None, force_color: str | None, is_terminal: bool) -> bool:
    """Return whether to colour: NO_COLOR and FORCE_COLOR decide if they are not empty, else the terminal.

    Args:
        no_color: The variable NO_COLOR, which wins; None if unset.
        force_color: The variable FORCE_COLOR, where 0 stands for no; None if unset.
        is_terminal: Whether the output is a terminal that knows colours.
    """
    if no_color:
        return False
    if force_color:
        return force_color != "0"
    return is_terminal
