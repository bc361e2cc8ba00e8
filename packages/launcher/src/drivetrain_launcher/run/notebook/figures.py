"""Figures of rank 0 in the cell: what the notebook sets and shows. The ranks' part is `figure_backend.py`."""

from typing import IO

# What matplotlib is to import as its backend in the ranks of a notebook that shows figures inline.
BACKEND = "module://drivetrain_launcher.run.notebook.figure_backend"
# The variable that tells a rank the number of its channel's socket.
CHANNEL_VARIABLE = "NOTEBOOK_CHANNEL"


def show_png(content: IO[bytes]) -> None:
    """Show a figure in the cell that runs."""
    from IPython.display import Image, display

    content.seek(0)
    display(Image(data=content.read(), format="png"))
