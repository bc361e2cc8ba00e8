"""The real Accelerate, the interface, and the interface with `strict=False`, under the same names in one process."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from drivetrain_accelerate.interface.module_table import module_table
from drivetrain_config import environ


@dataclass(frozen=True)
class Side:
    """One of the three; `side("accelerate.utils.reduce")` is what it has under that name."""

    name: str

    def __call__(self, full_name: str) -> Any:
        module, _, name = full_name.rpartition(".")
        if self.name == "theirs":
            return getattr(import_module(module), name)
        home = module_table().names[module][name]
        return getattr(import_module(home.module), home.name)

    @contextmanager
    def entered(self) -> Generator[None]:
        """Run the block with the strictness of this side."""
        strict = "false" if self.name == "restored" else None
        with environ.exported(DRIVETRAIN_ACCELERATE__STRICT=strict):
            yield

    @contextmanager
    def accelerator(self, **options: Any) -> Generator[Any]:
        """Make an Accelerator on the CPU, and forget what Accelerators share, before and afterwards."""
        with self.entered():
            self._forget()  # a library's test may have left the state of its own Accelerator in this process
            try:
                yield self("accelerate.Accelerator")(cpu=True, **options)
            finally:
                self._forget()

    def _forget(self) -> None:
        self("accelerate.state.GradientState")._reset_state()
        self("accelerate.state.AcceleratorState")._reset_state(reset_partial_state=True)


SIDES = (Side("theirs"), Side("ours"), Side("restored"))
THEIRS, OURS, RESTORED = SIDES


def on_sides(call: Callable[..., Any], sides: Sequence[Side] = (THEIRS, OURS), **options: Any) -> list[Any]:
    """Return what a function of an Accelerator returns on each side."""
    found: list[Any] = []
    for side in sides:
        with side.accelerator(**options) as accelerator:
            found.append(call(accelerator))
    return found


def said(call: Callable[[], Any]) -> Any:
    """Return what a call returns; of an error its kind, first line and class by name."""
    try:
        return call()
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"


def assert_alike(real: Callable[..., Any], mine: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Check that two functions return what shows the same, or raise an error of the same class."""
    shown: list[str] = []
    for function in (real, mine):
        try:
            value = function(*deepcopy(args), **kwargs)  # transformers' encodings move themselves in place
            shown.append(f"{type(value).__name__} {value!r}")
        except (TypeError, ValueError, AttributeError) as error:
            shown.append(type(error).__name__)
    assert shown[0] == shown[1]
