"""Draw what `drivetrain doctor` shows on a terminal of a host with some faults.

    uv run python tools/draw_doctor.py

It writes docs/images/doctor.svg. The faults are made for this one run: a port that is held, 128 open files, and an
interface that is not there; /dev/shm as Docker gives it too, where root may mount it.
"""

import os
import pty
import re
import select
import shlex
import socket
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

from drivetrain_config.environ import child_environment

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "doctor.svg"
COLUMNS = 104
# What is shown of a folder whose name says nothing.
_FOLDER = re.compile(r"/\S*drivetrain-drawing-[^\s/]+")


def draw() -> str:
    """Run the command on a terminal of its own, and return its last screen as SVG."""
    with (
        socket.create_server(("127.0.0.1", 0)) as held,
        tempfile.TemporaryDirectory(prefix="drivetrain-drawing-") as folder,
    ):
        command = ["drivetrain", "doctor", "--num-processes", "2", "--batch-megabytes", "30", "--master-port"]
        shown = shlex.join([*command, "29500"])
        port = str(held.getsockname()[1])
        program = [sys.executable, "-m", "drivetrain_launcher", *command[1:], port]
        shell = 'ulimit -Sn 128; exec "$@"'
        if os.geteuid() == 0:
            shell = f"mount -t tmpfs -o size=64m tmpfs /dev/shm; {shell}"
            program = ["unshare", "-m", "sh", "-c", shell, "sh", *program]
        else:
            program = ["sh", "-c", shell, "sh", *program]
        output = run_on_terminal(program, folder)
    output = _FOLDER.sub("/home/ada/run", output).replace(port, "29500").replace(str(int(port) + 1), "29501")
    output = re.sub(r"held by process (\d+) \([^)]*\)", r"held by process \1 (python train.py)", output)
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    console.print(Text(f"$ {shown}"))
    console.print(Text.from_ansi(last_screen(output)), no_wrap=True, highlight=False)
    svg = console.export_svg(title="drivetrain doctor")
    # No font from another host: the site asks for nothing outside.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def run_on_terminal(command: list[str], folder: str) -> str:
    """Run a command to its end on a pseudo-terminal of `COLUMNS` columns; return what it wrote."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=child_environment(
            COLUMNS=str(COLUMNS), LINES="60", TERM="xterm", GLOO_SOCKET_IFNAME=None, NO_COLOR=None
        ),
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    output = b""
    while select.select([ours], [], [], 300)[0]:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the last program has closed the terminal
            break
        if not part:
            break
        output += part
    process.wait()
    os.close(ours)
    return output.decode()


def last_screen(output: str) -> str:
    """Return what stays on the terminal once the line of progress has been cleared."""
    return output.rpartition("\r\x1b[K")[2].replace("\r\n", "\n").strip("\n")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    target.write_text(draw())
    print(target)
