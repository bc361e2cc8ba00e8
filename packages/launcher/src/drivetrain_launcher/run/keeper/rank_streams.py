"""Give each rank of this node its stdout and stderr: a pipe, a pseudo-terminal, or the launcher's own."""

import fcntl
import os
import termios
import tty
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from socket import gethostname

from drivetrain_config import environ
from drivetrain_launcher.plan.launch_plan import LaunchPlan
from drivetrain_launcher.run.keeper.keeper import Keeper
from drivetrain_launcher.run.keeper.keeper_messages import Stream
from drivetrain_launcher.run.output.terminals import coloured_outputs, prefix_of

_PIPE_BYTES = 1 << 18


class RankStreams(AbstractContextManager["RankStreams"]):
    """The outputs of the ranks of one attempt after another, until the end of this context manager."""

    def __init__(self, plan: LaunchPlan, keeper: Keeper) -> None:
        self._plan = plan
        self._keeper = keeper
        self._colours = coloured_outputs(environ.child_environment())
        self._host = gethostname().partition(".")[0] if plan.num_nodes > 1 else ""
        self._files: list[int] = []
        # Of a process that leads a session without a terminal, a pseudo-terminal would become its own.
        self._may_open_terminal = os.getsid(0) != os.getpid()
        if not self._may_open_terminal:
            with suppress(OSError):
                os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
                self._may_open_terminal = True

    def __exit__(self, *_: object) -> None:
        """Close the outputs once all output is shown."""
        self._keeper.drain()
        self._close()

    def begin_attempt(self, token: str) -> None:
        """Forget the last attempt's outputs; only the environment of the next ranks will have `token`."""
        self._keeper.begin_attempt(token)
        self._close()

    def open(self, rank: int, log_files: Mapping[int, str]) -> tuple[str, str]:
        """Open the outputs of a rank, and return the paths of its stdout and stderr; empty for the launcher's own.

        `log_files` has the paths of the files to write, by file descriptor, 1 and 2; empty paths for none.
        """
        is_shown = not self._plan.show_ranks or rank in self._plan.show_ranks
        has_files = any(log_files.values())
        if is_shown and self._plan.prefix == "none" and not has_files:
            return "", ""
        stdout = self._open(rank, 1, log_files[1], is_shown=is_shown)
        if self._keeper.options.are_same and not has_files:
            return stdout, stdout
        return stdout, self._open(rank, 2, log_files[2], is_shown=is_shown)

    def _close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files.clear()

    def _open(self, rank: int, shown_on: int, log_file: str, *, is_shown: bool) -> str:
        leads = rank == 0 and is_shown and self._plan.prefix != "all"
        prefix = ""
        if self._plan.prefix == "all" or (self._plan.prefix == "others" and rank != 0):
            prefix = prefix_of(rank, host=self._host, is_coloured=self._colours[shown_on - 1])
        if leads and self._keeper.options.terminals[shown_on - 1] and self._may_open_terminal:
            ours, theirs = os.openpty()
            tty.setraw(theirs)  # it changes no byte
            with suppress(OSError):
                termios.tcsetwinsize(theirs, termios.tcgetwinsize(shown_on))
        else:
            ours, theirs = os.pipe()
            if hasattr(fcntl, "F_SETPIPE_SZ"):  # Linux
                with suppress(OSError):  # the user's pipes hold too much already
                    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        # Both ends stay open here: the rank's does not break if the keeper is killed, nor ours end with the rank.
        self._files += [ours, theirs]
        self._keeper.add_stream(
            Stream(
                rank=rank,
                shown_on=shown_on if is_shown else 0,
                prefix=prefix,
                is_leading=leads,
                file=log_file,
            ),
            ours,
        )
        return f"/dev/fd/{theirs}"
