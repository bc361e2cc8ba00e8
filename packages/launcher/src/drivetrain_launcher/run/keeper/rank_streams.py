"""Give each rank of this node its stdout and stderr: a pipe, a pseudo-terminal, or what the launcher has."""

import fcntl
import os
import termios
import tty
from collections.abc import Mapping
from contextlib import suppress

from drivetrain_launcher.plan.launch_plan import LaunchPlan
from drivetrain_launcher.run.keeper.keeper import Keeper
from drivetrain_launcher.run.keeper.keeper_messages import Stream
from drivetrain_launcher.run.output.terminals import prefix_of

_PIPE_BYTES = 1 << 18
# Where a launcher without a terminal of its own would take a pseudo-terminal that it opens for one.
_OWN_TERMINAL = "/dev/tty"


class RankStreams:
    """The outputs of the ranks of one attempt after another.

    Args:
        plan: The plan of the launch.
        keeper: The keeper that shows them.
        terminals: Whether stdout and stderr are terminals that move their cursor when told.
        are_same: Whether stdout and stderr are the same terminal, pipe or file.
        colours: Whether to colour what is shown on stdout and on stderr.
        host: The name of this node, if there are several; else empty.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        keeper: Keeper,
        *,
        terminals: tuple[bool, bool],
        are_same: bool,
        colours: tuple[bool, bool],
        host: str,
    ) -> None:
        self._plan = plan
        self._keeper = keeper
        self._terminals = terminals
        self._are_same = are_same
        self._colours = colours
        self._host = host
        self._files: list[int] = []

    def begin_attempt(self, token: str) -> None:
        """Forget the outputs of the attempt before.

        Args:
            token: A text in the environment of the ranks to come, and of no other process.
        """
        self._keeper.begin_attempt(token)
        self.close()

    def open(self, rank: int, log_files: Mapping[int, str]) -> tuple[str, str]:
        """Open the outputs of a rank.

        Args:
            rank: The global rank.
            log_files: The paths of the files to write, by file descriptor, 1 and 2; empty paths for none.

        Returns:
            The paths that the rank's stdout and stderr are opened by; empty for the launcher's own.
        """
        is_shown = not self._plan.show_ranks or rank in self._plan.show_ranks
        if is_shown and self._plan.prefix == "none" and not any(log_files.values()):
            return "", ""
        if self._are_same and not any(log_files.values()):
            path = self._open(rank, 1, "", is_shown=is_shown)
            return path, path
        return (
            self._open(rank, 1, log_files[1], is_shown=is_shown),
            self._open(rank, 2, log_files[2], is_shown=is_shown),
        )

    def close(self) -> None:
        """Close the outputs of the last attempt."""
        for file in self._files:
            os.close(file)
        self._files.clear()

    def _open(self, rank: int, shown_on: int, log_file: str, *, is_shown: bool) -> str:
        leads = rank == 0 and is_shown and self._plan.prefix != "all"
        has_prefix = self._plan.prefix == "all" or (self._plan.prefix == "others" and rank != 0)
        stream = Stream(
            rank=rank,
            shown_on=shown_on if is_shown else 0,
            prefix=prefix_of(rank, host=self._host, is_coloured=self._colours[shown_on - 1])
            if has_prefix
            else "",
            is_leading=leads,
            file=log_file,
        )
        ours, theirs = self._terminal(shown_on) if leads and self._terminals[shown_on - 1] else self._pipe()
        # Both ends stay open here: the rank's does not break if the keeper is killed, nor ours end with the rank.
        self._files += [ours, theirs]
        self._keeper.add_stream(stream, ours)
        return f"/dev/fd/{theirs}"

    def _pipe(self) -> tuple[int, int]:
        ours, theirs = os.pipe()
        if hasattr(fcntl, "F_SETPIPE_SZ"):  # Linux
            with suppress(OSError):  # the user's pipes hold too much already
                fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        return ours, theirs

    def _terminal(self, shown_on: int) -> tuple[int, int]:
        """Open a pseudo-terminal that changes no byte; a pipe where it would become the launcher's own terminal."""
        if os.getsid(0) == os.getpid() and not _has_terminal():
            return self._pipe()
        ours, theirs = os.openpty()
        tty.setraw(theirs)
        with suppress(OSError):
            termios.tcsetwinsize(theirs, termios.tcgetwinsize(shown_on))
        return ours, theirs


def _has_terminal() -> bool:
    try:
        os.close(os.open(_OWN_TERMINAL, os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
