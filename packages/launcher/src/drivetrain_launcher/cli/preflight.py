"""What can be known to be wrong, or surprising, before a process is started, so that it is said once and early."""

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches

from drivetrain_config.source import Source
from drivetrain_launcher.cli.flag_aliases import RENAMED
from drivetrain_launcher.errors import LaunchError


def misplaced_flags(arguments: Iterable[str], known: Collection[str], script: str) -> list[str]:
    """Return the launcher's flags that stand among the script's arguments, as they were written, each once.

    Args:
        arguments: What follows the script on the command line.
        known: The launcher's flags.
        script: The script's text: a flag, argument or field of that name in it is its own.
    """
    found: dict[str, None] = {}
    for token in arguments:
        written = token.partition("=")[0]
        if token == "--":
            break
        hyphened = written.replace("_", "-")
        is_ours = written.startswith("--") and RENAMED.get(hyphened, hyphened) in known
        if is_ours and not _takes(script, hyphened.removeprefix("--")):
            found[written] = None
    return list(found)


def check_backend(name: str, installed: Collection[str], script: str | None, source: Source) -> None:
    """Refuse a backend that nobody announces, unless the script may bring it.

    Args:
        name: The backend that was asked for.
        installed: The names that installed packages announce.
        script: The script's text, which may register a backend of its own; None where it is not at hand.
        source: Where the name was said.

    Raises:
        LaunchError: There is no such backend; the message names the nearest and lists them all.
    """
    known = ["auto", *sorted(installed)]
    if name in known or not installed:
        return
    near = get_close_matches(name, known, n=1, cutoff=0.65)
    if (script is None and not near) or (script is not None and _names(script, name)):
        return
    meant = f", did you mean {near[0]!r}?" if near else ""
    raise LaunchError(
        f"run.backend={name!r}: there is no such backend{meant or ';'} say one of {', '.join(known)}; from {source}. "
        "One that the script registers itself is let through where the script's own file names it"
    )


def _takes(script: str, word: str) -> bool:
    """Return whether a script has a flag, an argument or a field of a name; to read an attribute is none."""
    spelled = _spelled(word)
    taken = (rf"--{spelled}(?!\w)", rf"""["']{spelled}["']""", rf"(?<![\w.]){spelled}\s*[:=]")
    return any(re.search(one, script) for one in taken)


def _names(script: str, word: str) -> bool:
    """Return whether a text names a word."""
    return re.search(rf"(?<!\w){_spelled(word)}(?!\w)", script) is not None


def _spelled(word: str) -> str:
    """Return the pattern of a word, with underscores or hyphens."""
    return "[-_]".join(map(re.escape, re.split("[-_]", word)))
