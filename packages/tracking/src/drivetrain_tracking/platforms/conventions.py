"""The names that each platform takes, and its words for how a run ended, as data.

A name that a platform does not take is replaced by a name that ends in eight digits of the hash of the original. So
different names stay different, and are the same in every process, after a resume and in a replay.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from drivetrain_tracking.run.run_state import RunState
from drivetrain_tracking.values.plain import MARK_DIGITS, Plain, mark_of
from drivetrain_tracking.values.records import flat_leaves

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NameRule:
    """A rule for a platform's names of one kind; `lead` and `trail` apply to each part of a path."""

    unlike: str = r"[\x00-\x1f\x7f\ud800-\udfff]"  # a character that may not stand in a name
    lead: str = ""  # characters that a name may not begin with
    trail: str = ""  # characters that a name may not end with
    is_path: bool = False  # whether `/` divides a name into folders, of which none is empty, `.` or `..`
    longest_bytes: int = 1000
    taken: str = r"(?!)"  # names that the platform or its tracker has for itself

    def name_of(self, given: str) -> str:
        """Return the name itself if the platform takes it, else a name with a mark unique to it. Pure."""
        kept = re.sub(self.unlike, "-", given)
        parts = [part for part in kept.split("/") if part not in ("", ".", "..")] if self.is_path else [kept]
        stripped = (part.lstrip(self.lead or None).rstrip(self.trail or None) for part in parts)
        kept = "/".join(part for part in (stripped if self.lead or self.trail else parts) if part)
        is_free = len(kept.encode()) <= self.longest_bytes and not re.search(self.taken, kept)
        if kept and kept == given and is_free:
            return given
        room = self.longest_bytes - 1 - MARK_DIGITS
        cut = kept.encode()[:room].decode(errors="ignore")
        return f"{cut.rstrip('/' + self.trail) or 'unnamed'}-{mark_of(given)}"


_FILE = NameRule(unlike=r"[^\w\-. ]", lead=" .", trail=" .", longest_bytes=100)
_ASCII_FILE = NameRule(unlike=r"[^A-Za-z0-9_.\-]", longest_bytes=120)
_ATTEMPT = r"^attempt-\d+/"
_DOCUMENTS = r"^(plan|info|state)$"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conventions:
    """The names that a platform takes, and its words for how a run ended."""

    values: NameRule = NameRule()  # of metrics, texts and media
    parameters: NameRule = NameRule()  # the outermost ones, where the platform takes a nested configuration
    separator: str | None = None  # between the names of a configuration made flat; None where it stays nested
    media: NameRule | None = None  # where the platform has another rule for them
    files: NameRule = _FILE  # of artifacts and runs
    # Ours where missing.
    states: Mapping[RunState, str | int] = field(default_factory=dict[RunState, str | int])


_MLFLOW = NameRule(unlike=r"[^\w\-. :/]", is_path=True, longest_bytes=250, taken=r"^(drivetrain/|mlflow\.)")
_MLFLOW_FILE = NameRule(unlike=r"[^A-Za-z0-9_\-./ ]", is_path=True, longest_bytes=120)

CONVENTIONS: Mapping[str, Conventions] = MappingProxyType(
    {
        "aim": Conventions(values=NameRule(taken=r"\.(float|text|image|audio|distribution)$")),
        "clearml": Conventions(
            # "loss" is the series "loss" of the plot "loss"; series of values that are not finite, and of attempts.
            values=NameRule(
                lead="/",
                trail="/",
                taken=r"^drivetrain/|^([^/]*)/\1$| is (NaN|-?Infinity)$| \(attempt \d+\)$",
            ),
            separator="/",
            files=NameRule(),
            states={"finished": "completed", "failed": "failed", "killed": "stopped"},
        ),
        "comet": Conventions(
            values=NameRule(taken=rf"{_ATTEMPT}|^drivetrain/|^Name$"),
            separator="|",
            files=NameRule(),
            states={"finished": "finished", "failed": "crashed", "killed": "crashed"},
        ),
        "dvclive": Conventions(
            values=NameRule(
                unlike=r"[^\w\-. /]", lead=" .", trail=" .", is_path=True, longest_bytes=200, taken=_ATTEMPT
            ),
            parameters=NameRule(taken=_DOCUMENTS),
        ),
        "mlflow": Conventions(
            values=_MLFLOW,
            parameters=_MLFLOW,
            separator="/",
            media=_MLFLOW_FILE,
            files=_MLFLOW_FILE,
            states={"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"},
        ),
        "swanlab": Conventions(
            values=NameRule(
                lead=" ./", trail=" ./", longest_bytes=247, taken=rf"{_ATTEMPT}| \(\d+\)$|^__swanlab__"
            ),
            parameters=NameRule(taken=_DOCUMENTS),
            states={"finished": "success", "failed": "crashed", "killed": "aborted"},
        ),
        "tensorboard": Conventions(
            values=NameRule(taken=r"^(config|plan|info|state|_hparams_/.*)$"), separator="."
        ),
        "trackio": Conventions(
            values=NameRule(lead="_", taken=r"^(project|run|timestamp|step|time|metrics)$"),
            parameters=NameRule(lead="_", taken=_DOCUMENTS),
            files=_ASCII_FILE,
        ),
        "wandb": Conventions(
            values=NameRule(taken=r"^(_step|_timestamp|_runtime|_wandb)$|^drivetrain/"),
            parameters=NameRule(taken=r"^_wandb$"),
            files=_ASCII_FILE,
            states={"finished": 0, "failed": 1, "killed": 255},
        ),
    }
)


class PlatformNames:
    """The names of one run on one platform; warns once of each name that the platform does not take."""

    def __init__(self, tracker: str, rule: NameRule, *, told: set[str], separator: str = "/") -> None:
        self._tracker = tracker
        self._told = told  # names already warned about, shared by the kinds of names of a tracker
        self._rule = rule
        self._separator = separator
        self._known: dict[str | tuple[str, ...], str] = {}  # the name, or the path of a value that has none

    def of(self, given: str) -> str:
        """Return the platform's name for a name that the user gave."""
        found = self._known.get(given)
        if found is None:
            found = self._known[given] = self._rule.name_of(given)
            if found != given:
                self._tell(repr(given), found)
        return found

    def flat(self, values: Mapping[str, Plain]) -> dict[str, str | int | float | bool | None]:
        """Return nested values as one level with the platform's names; see `records.flat_values`."""
        leaves = flat_leaves(values)
        named = {self.of(self._separator.join(path)): value for path, value in leaves}
        if len(named) == len(leaves):
            return named
        # Several values come to one name, as `{"a": {"b": 1}, "a/b": 2}` do: each gets a name of its own.
        named = {}
        for path, value in sorted(leaves, key=lambda leaf: (len(leaf[0]), leaf[0])):
            name = self.of(self._separator.join(path))
            if name in named:
                within = " of ".join(map(repr, reversed(path)))
                if path not in self._known:
                    self._known[path] = self._rule.name_of(f"{name}-{mark_of(within)}")
                    self._tell(within, self._known[path])
                name = self._known[path]
            named[name] = value
        return named

    def _tell(self, shown: str, found: str) -> None:
        if shown in self._told:
            return
        self._told.add(shown)
        logger.warning(
            "tracker %r does not take the name %s, or has it already, and shows it as %r (told once)",
            self._tracker,
            shown,
            found,
        )
