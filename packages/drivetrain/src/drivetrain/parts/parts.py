"""The parts that an Accelerator is made of, and the base class through which its methods reach them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Never, TypeVar, cast

from drivetrain.parts.checkpointers import Checkpointers
from drivetrain.parts.loop_words import LoopWords
from drivetrain.parts.open_backend import OpenBackend
from drivetrain.parts.prepared import PreparedObjects
from drivetrain.settings import RunSettings
from drivetrain_backends import Backend
from drivetrain_backends.modules.block_changes import BlockChanges
from drivetrain_config import Resolved
from drivetrain_data import LoaderTracker, Shard
from drivetrain_precision import Policy
from drivetrain_state import Context
from drivetrain_tracking import TrackerGroup

if TYPE_CHECKING:  # imported where a run needs them: most neither train in fp8 nor measure steps
    from drivetrain.fp8.fp8_training import Fp8Training
    from drivetrain_throughput.step_watch import StepWatch

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(slots=True, kw_only=True)
class Parts:
    """The parts of an Accelerator; `compose.py` builds them.

    None is exchanged later, but for a backend that is chosen, with the changes, when the first model is prepared.

    Attributes:
        resolved: The resolved sections with their sources, by name.
        context: The ranks, device and process group.
        shard: The shard of the data that this rank reads.
        policy: The precision policy of the run.
        backend: The backend that trains the models.
        changes: The changes that the run makes in every model before its backend prepares it.
        prepared: The models, optimizers, schedulers and loaders prepared so far.
        reading: The loaders being read; the current one knows its epoch's tail.
        checkpointers: The checkpointers used so far.
        trackers: The trackers that the run logs to.
        words: The words about the loop; None on all ranks but the first.
        watch: The stopwatch of steps; None if no setting has the throughput measured.
        fp8: The conversion of models to fp8; None in other precisions.
        facts: Further facts for the plan, added as they become known.
        chosen: The reasons for settings that the planner has chosen, as "section.field".
        open_backend: The backend that the settings leave to the planner; None once it is chosen, or if they name it.
    """

    resolved: Mapping[str, Resolved[Any]]
    context: Context
    shard: Shard
    policy: Policy
    backend: Backend
    changes: BlockChanges
    prepared: PreparedObjects
    reading: LoaderTracker
    checkpointers: Checkpointers
    trackers: TrackerGroup
    words: LoopWords | None = None
    watch: "StepWatch | None" = None
    fp8: "Fp8Training | None" = None
    facts: dict[str, str] = field(default_factory=dict[str, str])
    chosen: dict[str, str] = field(default_factory=dict[str, str])
    open_backend: OpenBackend | None = None

    @property
    def settings(self) -> RunSettings:
        """The run section."""
        return self.resolved["run"].value


def needs_run(method: Method) -> Method:
    """Make a method raise a RuntimeError after `end_training`, on any number of ranks."""

    @wraps(method)
    def checked(self: "HasParts", *args: Any, **kwargs: Any) -> Any:
        if self._has_ended:  # pyright: ignore[reportPrivateUsage] of the class below
            refuse_after_end(method.__name__)
        return method(self, *args, **kwargs)

    return cast("Method", checked)


def refuse_after_end(name: str, /, *_: object, **__: object) -> Never:
    """Refuse a call of a method after `end_training`."""
    raise RuntimeError(
        f"{name}() after end_training(), which has finished saves and trackers, released the models and left the "
        "process group: call it before, or make a new Accelerator"
    )


class HasParts:
    """A base class of the classes from which an Accelerator inherits its methods.

    Each subclass reads the parts, and sets further state in its constructor.

    Args:
        parts: The parts of the Accelerator.

    Attributes:
        context: The ranks, device and process group.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.context = parts.context
        self._has_ended = False

    def _refuse_calls(self) -> None:
        """Refuse what needs the run. The methods of a step are replaced: a check in each call would cost more."""
        self._has_ended = True
        for name in ("accumulate", "backward", "train_step"):
            self.__dict__[name] = partial(refuse_after_end, name)
