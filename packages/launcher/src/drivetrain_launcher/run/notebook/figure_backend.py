"""The matplotlib backend of ranks whose notebook shows figures inline; matplotlib imports it by its name.

`plt.show()`, and the end of the function, send each open figure of rank 0 to the notebook as a PNG. As with the
inline backend, a figure that was shown is closed. Other ranks only close their figures.
"""

import os
import socket

from matplotlib import pyplot
from matplotlib.backends.backend_agg import FigureCanvasAgg

from drivetrain_config import environ
from drivetrain_launcher.run.notebook.rank_channel import CHANNEL_VARIABLE, Message, RankChannel, new_content

# matplotlib takes the canvas by this name.
FigureCanvas = FigureCanvasAgg


def show(*_: object, **__: object) -> None:
    """Send all open figures to the notebook in the order of their numbers, and close them."""
    number = environ.read(CHANNEL_VARIABLE)
    for figure in pyplot.get_fignums():
        if number is not None and environ.read("RANK") == "0":
            channel = RankChannel(socket.socket(fileno=os.dup(int(number))))
            with new_content() as content:
                pyplot.figure(figure).savefig(content, format="png", bbox_inches="tight")
                channel.send(Message.FIGURE, content)
            channel.close()
    pyplot.close("all")
