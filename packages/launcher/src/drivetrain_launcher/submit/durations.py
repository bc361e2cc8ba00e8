"""Durations as text, such as "12:00:00" and "1d12h"."""

import re

from drivetrain_launcher.errors import LaunchError

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_PARTS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII | re.IGNORECASE)
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", re.ASCII)


def duration_seconds(text: str) -> int:
    """Return the number of seconds that a text states.

    Args:
        text: Hours, minutes and seconds ("12:00:00"), with days in front ("1-12:00:00"), or numbers with units
            ("90m", "1d12h").

    Raises:
        LaunchError: The text has another form, or states no time at all. A number alone is refused, since clusters
            differ on its unit.
    """
    stripped = text.strip()
    form = _CLOCK.fullmatch(stripped) or _PARTS.fullmatch(stripped)
    seconds = 0
    if form is not None:
        seconds = sum(
            int(count or 0) * unit for count, unit in zip(form.groups(), _SECONDS.values(), strict=True)
        )
    if seconds < 1:
        raise LaunchError(
            f"time {text!r}: say hours, minutes and seconds, 12:00:00, or units, 90m, 12h or 1d12h"
        )
    return seconds
