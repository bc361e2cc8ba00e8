"""The messages from the launcher to its keeper. Standard library only: the keeper runs without site-packages."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperOptions:
    """The facts that the keeper knows from its start.

    Attributes:
        launcher: The process id of the launcher.
        grace_seconds: The time that ranks have to save after their launcher has died.
        are_same: Whether stdout and stderr are the same terminal, pipe or file.
        terminals: Whether stdout and stderr are terminals with a movable cursor.
    """

    launcher: int
    grace_seconds: float
    are_same: bool
    terminals: tuple[bool, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """An output of a rank; its file descriptor is sent along with the message.

    Attributes:
        rank: The global rank.
        shown_on: The file descriptor where it is shown: 1 or 2; 0 if it is not shown.
        prefix: The text before each line.
        is_leading: Whether its bytes are shown unchanged, with the lines of other ranks between them.
        file: The path of the file to write as well; empty for none.
    """

    rank: int
    shown_on: int
    prefix: str = ""
    is_leading: bool = False
    file: str = ""
