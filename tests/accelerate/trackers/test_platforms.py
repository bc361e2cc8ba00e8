"""What the trackers of platforms call in the platforms' libraries, beside the installed Accelerate's."""

import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

import pytest

from drivetrain_accelerate.states.partial_state import PartialState
from drivetrain_accelerate.trackers import platforms

real: Any = pytest.importorskip("accelerate.tracking")
RealState: Any = pytest.importorskip("accelerate").PartialState

IMAGES = {"a": ["x", "y"]}
CONFIG = {"lr": 0.1, "words": "wwwwwwww", "l": [1], "n": {"a": 1}, "b": True}
VALUES = {"a": 1.5, "s": "text", "d": {"e": 1}, "i": 3, "train_loss": 2.0}


class Case:
    """A tracker's class, its library, how it is made, and its own methods to call."""

    def __init__(
        self, name: str, library: str, *args: Any, calls: tuple[Any, ...] = (), **kwargs: Any
    ) -> None:
        self.name, self.library, self.args, self.kwargs, self.calls = name, library, args, kwargs, calls


TABLE = ("log_table", ("t", ["a"], [[1]]), {"step": 3})
PICTURES = ("log_images", (IMAGES,), {"step": 3})
CASES = [
    Case("WandBTracker", "wandb", "run", group="g", calls=(TABLE, PICTURES)),
    Case("TrackioTracker", "trackio", "run", space_id="n"),
    Case("CometMLTracker", "comet_ml", "run", workspace="w"),
    Case("AimTracker", "aim", "run", "/folder", log_system_params=True, calls=(
        ("log_images", ({"a": "x", "c": ("y", "words")},), {"step": 3, "kwargs": {"track": {"k": 1}}}),
    )),
    Case("MLflowTracker", "mlflow", "exp", "/folder", tags='{"a": "b"}', run_name="n", calls=(
        ("log_figure", ("fig", "f.png"), {"save_kwargs": {}}),
        ("log_artifacts", ("folder",), {"artifact_path": "p"}),
        ("log_artifact", ("file",), {}),
    )),
    Case("ClearMLTracker", "clearml", "run", task_name="x", calls=(TABLE, PICTURES)),
    Case("ClearMLTracker", "clearml", "run"),
    Case("DVCLiveTracker", "dvclive", "run", dir="d"),
]  # fmt: skip


@contextmanager
def played(library: str, version: str) -> Generator[MagicMock]:
    """Put a library in place that notes its calls."""
    module = MagicMock(name=library)
    module.__version__ = version
    module.utils.validation.MAX_PARAM_VAL_LENGTH = 7
    module.utils.validation.MAX_PARAMS_TAGS_PER_BATCH = 2
    module.Task.current_task.return_value = None
    module.search_experiments.return_value = []
    plots = ModuleType("plots")
    vars(plots)["Metric"] = MagicMock(could_log=lambda value: isinstance(value, int | float))  # pyright: ignore[reportUnknownLambdaType]
    others = {f"{library}.plots": plots, f"{library}.plots.metric": plots}
    with patch.dict(sys.modules, {library: module, **others}):
        yield module


def calls_of(kind: Any, case: Case, version: str = "3.50.0") -> list[str]:
    with played(case.library, version) as library:
        tracker = kind(*case.args, **case.kwargs)
        tracker.start()
        tracker.store_init_configuration(dict(CONFIG))
        tracker.log(dict(VALUES), step=4)
        tracker.log({"a": 1.5}, k=3)
        for name, args, kwargs in case.calls:
            getattr(tracker, name)(*args, **kwargs)
        assert tracker.tracker is not None
        tracker.finish()
        noted = [str(call) for call in library.mock_calls if "__bool__" not in str(call)]
    return [call.split(" id=")[0] for call in noted]


@pytest.fixture(autouse=True)
def states() -> Iterator[None]:
    PartialState(cpu=True)
    RealState(cpu=True)
    yield
    PartialState._reset_state()  # pyright: ignore[reportPrivateUsage]


def comparable(calls: list[str]) -> list[str]:
    """Sort the arguments of calls, whose order says nothing."""
    return ["".join(sorted(call)) for call in calls]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.kwargs}")
def test_a_platform_gets_the_calls_of_the_real_one(case: Case) -> None:
    mine, theirs = calls_of(getattr(platforms, case.name), case), calls_of(getattr(real, case.name), case)
    if case.library == "dvclive":  # a property that the real one sets is not among the calls
        mine = [call for call in mine if ".step" not in call]
    assert comparable(mine) == comparable(theirs)


def test_swanlab_gets_them_too_but_for_a_mark_in_its_configuration() -> None:
    case = Case("SwanLabTracker", "swanlab", "run", mode="disabled", calls=(PICTURES,))
    theirs = [call for call in calls_of(real.SwanLabTracker, case) if "FRAMEWORK" not in call]
    assert comparable(calls_of(platforms.SwanLabTracker, case)) == comparable(theirs)


def test_an_old_comet_gets_an_experiment() -> None:
    case = Case("CometMLTracker", "comet_ml", "run")
    mine = calls_of(platforms.CometMLTracker, case, "3.10.0")
    assert comparable(mine) == comparable(calls_of(real.CometMLTracker, case, "3.10.0"))


@pytest.mark.parametrize(("name", "library"), [("MLflowTracker", "mlflow"), ("ClearMLTracker", "clearml")])
def test_a_number_of_torch_is_logged(name: str, library: str, caplog: Any) -> None:
    import torch

    with played(library, "1") as module:
        tracker = getattr(platforms, name)("run")
        tracker.start()
        tracker.log({"loss": torch.tensor(2.0), "many": torch.ones(3)}, step=1)
        assert "2.0" in str(module.mock_calls)
    assert "many of type Tensor is left out: it is no number" in caplog.text


def test_a_given_task_stays_open() -> None:
    with played("clearml", "1") as module:
        task = module.Task.current_task.return_value = MagicMock()
        tracker = platforms.ClearMLTracker("run")
        tracker.start()
        tracker.finish()
        assert tracker.tracker is task
        task.close.assert_not_called()
        with pytest.raises(ValueError, match="give data="):
            tracker.log_table("t")
