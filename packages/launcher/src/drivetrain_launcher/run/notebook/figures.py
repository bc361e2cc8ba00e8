"""Figures of rank 0 in the cell: the matplotlib backend of ranks that a notebook with inline figures has started.

matplotlib imports this module by the name in `MPLBACKEND`. `plt.show()` sends each open figure to the notebook as a
PNG, and closes it, as the inline backend does. Ranks other than 0 only close theirs.
"""

import os
import socket
from typing import IO, Any

from drivetrain_config import environ
from drivetrain_launcher.run.notebook.channel import Channel, Message, new_content

# What matplotlib is to import.
BACKEND = f"module://{__name__}"
# The variable that tells a rank the number of its channel's socket.
CHANNEL_VARIABLE = "NOTEBOOK_CHANNEL"


def show(*_: object, **__: object) -> None:
    """Send all open figures to the notebook, in the order of their numbers."""
    from matplotlib import pyplot

    number = environ.read(CHANNEL_VARIABLE)
    for figure in pyplot.get_fignums():
        if number is not None and environ.read("RANK") == "0":
            _send(pyplot.figure(figure), int(number))
    pyplot.close("all")


def _send(figure: Any, number: int) -> None:
    channel = Channel(socket.socket(fileno=os.dup(number)))
    with new_content() as content:
        figure.savefig(content, format="png", bbox_inches="tight")
        channel.send(Message.FIGURE, content)
    channel.close()


def show_png(content: IO[bytes]) -> None:
    """Show a figure in the cell that runs."""
    from IPython.display import Image, display

    content.seek(0)
    display(Image(data=content.read(), format="png"))


def __getattr__(name: str) -> object:
    """Return the canvas, for which matplotlib asks a backend by name; the notebook does not have to import it."""
    if name == "FigureCanvas":
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        return FigureCanvasAgg
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
