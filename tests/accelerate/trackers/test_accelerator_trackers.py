"""The trackers of an Accelerator, beside the installed Accelerate's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain_accelerate.accelerator.accelerator import Accelerator
from drivetrain_accelerate.states.accelerator_state import AcceleratorState
from drivetrain_accelerate.trackers import general_tracker, platforms, tracker_choice

real: Any = pytest.importorskip("accelerate.tracking")
RealAccelerator: Any = pytest.importorskip("accelerate").Accelerator
RealState: Any = pytest.importorskip("accelerate.state").AcceleratorState


@pytest.fixture(autouse=True)
def states() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)  # pyright: ignore[reportPrivateUsage]
    RealState._reset_state(reset_partial_state=True)


def noting(module: Any) -> Any:
    """Return a class of trackers that notes its calls."""

    class Noting(module.GeneralTracker):
        name = "noting"
        requires_logging_directory = False

        def __init__(self) -> None:
            super().__init__()
            self.calls: list[Any] = []

        @property
        def tracker(self) -> Any:
            return self.calls

        def start(self) -> None:
            self.calls.append("start")

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            self.calls.append(("config", values))

        @module.on_main_process
        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            self.calls.append(("log", values, step, kwargs))

        def finish(self) -> None:
            self.calls.append("finish")

    return Noting


def logged(accelerator_class: Any, module: Any, *, config: Any) -> list[Any]:
    tracker = noting(module)()
    accelerator = accelerator_class(cpu=True, log_with=tracker)
    assert accelerator.log_with == [tracker]
    assert accelerator.trackers == []
    assert type(accelerator.get_tracker("noting")) is module.GeneralTracker
    accelerator.log({"too": "early"})
    accelerator.init_trackers("run", config, init_kwargs={"noting": {"not": "taken"}})
    assert accelerator.trackers == [tracker]
    assert accelerator.get_tracker("noting") is tracker
    with pytest.raises(ValueError, match="nope"):
        accelerator.get_tracker("nope")
    accelerator.log({"a": {"any": [1]}}, step=3, log_kwargs={"noting": {"k": 1}, "other": {}})
    calls = accelerator.get_tracker("noting", unwrap=True)
    for _ in range(2):  # a tracker of ours finishes once
        accelerator.end_training()
        assert accelerator.trackers == [tracker]
        assert accelerator.get_tracker("noting", unwrap=True) is calls
    return calls if accelerator_class is Accelerator else calls[:-1]


@pytest.mark.parametrize("config", [None, {"lr": 0.1, "layers": [1, 2]}])
def test_a_tracker_of_a_program_gets_the_calls_of_the_real_one(config: Any) -> None:
    assert logged(Accelerator, general_tracker, config=config) == logged(RealAccelerator, real, config=config)


def test_trackers_of_drivetrains_form_stay_and_take_nothing_after_the_end(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("run")
    accelerator.end_training()
    assert [each.name for each in accelerator.trackers] == ["jsonl"]
    with pytest.raises(RuntimeError, match=r"log\(\) after end_training\(\).*call init_trackers\(\)"):
        accelerator.log({"loss": 1.0})


def tensorboard(accelerator_class: Any, folder: Path) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator = accelerator_class(cpu=True, log_with="tensorboard", project_dir=folder)
    config = {"lr": 0.1, "name": "x: y", "none": None, "true": True, "n": 3}
    accelerator.init_trackers("project/run", config, init_kwargs={"tensorboard": {"flush_secs": 5}})
    accelerator.log({"loss": torch.tensor(1.5), "n": 2, "told": "words", "many": {"a": 1, "b": 2.0}}, step=1)
    accelerator.log({"loss": 0.5, "left out": [1], "none": None}, step=2)
    accelerator.log({"kept": 1.0}, step=7, log_kwargs={"tensorboard": {"walltime": 5.0}})
    (tracker,) = accelerator.trackers
    assert tracker.name == "tensorboard"
    tracker.writer.add_scalar("own", 1.0, 2)
    tracker.log_images({"pictures": torch.zeros(2, 3, 4, 4).numpy()}, step=1)
    accelerator.end_training()
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        # A part of a path that is a time, and the name of a file of events, differ between any two runs.
        name = "/".join(part for part in path.relative_to(folder).parts if not part[:1].isdigit())
        if path.name == "hparams.yml":
            import yaml

            found[f"{name} content"] = yaml.safe_load(path.read_text())
        if path.name.startswith("events"):
            events = EventAccumulator(str(path)).Reload()
            tags: Any = events.Tags()
            scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags["scalars"]}
            content: dict[str, Any] = found.setdefault(str(Path(name).parent), {})
            content |= {**scalars, "tensors": sorted(tags["tensors"]), "images": sorted(tags["images"])}
    return found


def test_tensorboard_has_the_content_of_the_real_one(tmp_path: Path) -> None:
    mine = tensorboard(Accelerator, tmp_path / "ours")
    assert mine == tensorboard(RealAccelerator, tmp_path / "real")
    assert mine["project/run"]["loss"] == [(1, 1.5), (2, 0.5)]


def test_a_tracker_that_lacks_something_says_what() -> None:
    class Lacking(general_tracker.GeneralTracker):
        name = "lacking"

    with pytest.raises(NotImplementedError, match="lacks requires_logging_directory, tracker"):
        Lacking()


def test_a_failing_tracker_does_not_keep_the_others_from_values() -> None:
    kind = noting(general_tracker)

    class Failing(kind):  # pyright: ignore[reportUntypedBaseClass]
        name = "failing"

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            raise KeyError("no")

    last = kind()
    accelerator = Accelerator(cpu=True, log_with=[Failing(), last])
    accelerator.init_trackers("run")
    with pytest.raises(KeyError, match="no") as caught:
        accelerator.log({"a": 1})
    assert caught.value.__notes__ == ["of the tracker 'failing'"]
    assert last.calls == ["start", ("log", {"a": 1}, None, {})]


def chosen(module: Any, log_with: Any, folder: str | None) -> Any:
    try:
        return [str(each) for each in module.filter_trackers(log_with, folder)]
    except ValueError:
        return ValueError


@pytest.mark.parametrize("folder", [None, "/logs"])
@pytest.mark.parametrize(
    "log_with", [None, [], ["tensorboard"], ["wandb", "aim"], ["nope"], "all", ["wandb", "wandb"], [int]]
)
def test_names_are_chosen_as_the_real_one_chooses_them(log_with: Any, folder: str | None) -> None:
    expected = chosen(real, log_with, folder)
    if log_with == "all" and folder is None:  # theirs chooses what fails later, without a folder to write to
        expected = [name for name in expected if name not in ("tensorboard", "aim")]
    assert chosen(tracker_choice, log_with, folder) == expected


def test_the_installed_platforms_and_the_table_are_the_real_ones() -> None:
    mine, theirs = tracker_choice.get_available_trackers(), real.get_available_trackers()
    assert list(map(str, mine)) == list(map(str, theirs))
    assert tracker_choice.LOGGER_TYPE_TO_CLASS.keys() == real.LOGGER_TYPE_TO_CLASS.keys()


def test_a_registered_class_is_found_by_its_name() -> None:
    kind = noting(general_tracker)

    class Named(kind):  # pyright: ignore[reportUntypedBaseClass]
        def __init__(self, run_name: str) -> None:
            super().__init__()
            self.calls = [run_name]

    try:
        tracker_choice.register_tracker_class(Named)
        accelerator = Accelerator(cpu=True, log_with="noting")
        accelerator.init_trackers("run")
        assert accelerator.get_tracker("noting", unwrap=True) == ["run", "start"]
        with pytest.raises(ValueError, match="give a subclass"):
            tracker_choice.register_tracker_class(int)  # pyright: ignore[reportArgumentType]
    finally:
        del tracker_choice.LOGGER_TYPE_TO_CLASS["noting"]


def test_drivetrains_own_log_goes_beside_them(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with=["tensorboard", "jsonl"], project_dir=tmp_path)
    accelerator.init_trackers("run", {"lr": 1})
    assert [each.name for each in accelerator.trackers] == ["tensorboard", "jsonl"]
    assert isinstance(accelerator.trackers[0], platforms.TensorBoardTracker)
    accelerator.log({"loss": 1.0}, step=1)
    accelerator.end_training()
    assert any('"loss"' in path.read_text() for path in tmp_path.rglob("*.jsonl"))


def on_two_ranks() -> tuple[int, str, list[Any]]:
    tracker = noting(general_tracker)()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("run")
    accelerator.log({"a": 1})
    found = type(accelerator.get_tracker("noting")).__name__
    number = len(accelerator.trackers)
    accelerator.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)  # pyright: ignore[reportPrivateUsage]
    return number, found, tracker.calls


def test_the_main_process_alone_logs(run_ranks: Any) -> None:
    first, second = run_ranks(on_two_ranks)
    assert first == (1, "Noting", ["start", ("log", {"a": 1}, None, {}), "finish"])
    assert second == (0, "GeneralTracker", [])
