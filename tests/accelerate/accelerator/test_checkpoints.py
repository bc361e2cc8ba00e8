"""save_state and load_state, beside the installed Accelerate's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_checkpoint_runs import run_of
from drivetrain_accelerate.accelerator.accelerator import Accelerator
from drivetrain_accelerate.accelerator.checkpoint_folders import numbered_folders, stage
from drivetrain_accelerate.plugins.run_configuration import ProjectConfiguration

accelerate: Any = pytest.importorskip("accelerate")
RealAccelerator: Any = accelerate.Accelerator
RealConfiguration: Any = accelerate.utils.ProjectConfiguration
BOTH = [(Accelerator, ProjectConfiguration), (RealAccelerator, RealConfiguration)]


def test_automatic_folders_have_the_names_and_the_limit_of_the_real_one(tmp_path: Path) -> None:
    found: list[Any] = []
    for place, (kind, configuration) in enumerate(BOTH):
        folder = tmp_path / str(place)
        project = configuration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2)
        with run_of(kind, project_config=project) as run:
            saved: list[str] = []
            expected: Any = None
            for _ in range(11):
                run.train(1)
                saved.append(str(run.accelerator.save_state().relative_to(folder)))
                expected = run.values()
            run.train(1)
            run.accelerator.load_state()
            assert run.values() == expected
            left = sorted(path.name for path in (folder / "checkpoints").iterdir())
            found.append((saved, left, run.accelerator.save_iteration))
            project.iteration = 10
            with pytest.raises(ValueError, match="checkpoint_10"):
                run.accelerator.save_state()
    assert found[0] == found[1]
    assert found[0][1] == ["checkpoint_10", "checkpoint_9"]


def test_without_a_limit_every_folder_stays_as_with_the_real_one(tmp_path: Path) -> None:
    found: list[Any] = []
    for place, (kind, configuration) in enumerate(BOTH):
        folder = tmp_path / str(place)
        project = configuration(project_dir=str(folder), automatic_checkpoint_naming=True)
        with run_of(kind, project_config=project) as run:
            for _ in range(3):
                run.train(1)
                run.accelerator.save_state()
        with run_of(kind) as run:
            for name in ("first", "second", "second"):
                run.train(1)
                for given in (folder / "own" / name, str(folder / "own" / name)):
                    assert run.accelerator.save_state(given) == folder / "own" / name
            saved = run.values()
            run.train(1)
            run.accelerator.load_state(str(folder / "own" / "second"))
            assert run.values() == saved
            run.accelerator.load_state(str(folder / "own" / "first"))
        found.append(sorted(path.name for path in [*folder.glob("checkpoints/*"), *folder.glob("own/*")]))
    assert found[0] == found[1]
    assert found[0] == ["checkpoint_0", "checkpoint_1", "checkpoint_2", "first", "second"]


def test_hooks_get_what_the_real_one_gives_them(tmp_path: Path) -> None:
    found: list[Any] = []
    for place, (kind, _) in enumerate(BOTH):
        folder = tmp_path / str(place)
        calls: list[Any] = []

        def before_save(models: Any, weights: Any, output_dir: str, calls: list[Any] = calls) -> None:
            calls.append(("save", len(models), [sorted(each) for each in weights], Path(output_dir).name))
            for model in models:  # as the training scripts of Diffusers do
                torch.save(model.state_dict(), Path(output_dir) / f"own_{len(weights)}.pt")
                weights.pop()

        def before_load(models: Any, input_dir: str, calls: list[Any] = calls) -> None:
            calls.append(("load", len(models), Path(input_dir).name))
            for number in range(len(models)):
                model = models.pop()
                model.load_state_dict(torch.load(Path(input_dir) / f"own_{number + 1}.pt"))

        with run_of(kind) as run:
            saving = run.accelerator.register_save_state_pre_hook(before_save)
            run.accelerator.register_load_state_pre_hook(before_load)
            run.train(3)
            run.accelerator.save_state(str(folder))
            expected = run.values()["weights"]
            run.train(3)
            run.accelerator.load_state(str(folder))
            calls.append(sorted(run.values()["weights"]) == sorted(expected))
            saving.remove()
            run.accelerator.save_state(str(tmp_path / f"other {place}"))
        found.append([call if isinstance(call, bool) else (*call[:-1],) for call in calls])
    assert found[0] == found[1]


def test_a_run_goes_on_in_the_middle_of_an_epoch_as_if_it_had_not_ended(tmp_path: Path) -> None:
    with run_of(Accelerator) as run:
        run.train(4)
        run.accelerator.save_state(str(tmp_path))
    with run_of(Accelerator) as run:
        run.train(4)
        rest = run.train(99, loader=run.accelerator.skip_first_batches(run.loader, 4))
    del rest
    with run_of(Accelerator) as run:
        whole = run.train(99)
        expected = run.values()
    with run_of(Accelerator, seed=3) as run:
        run.accelerator.load_state(str(tmp_path))
        rest = run.train(99, loader=run.accelerator.skip_first_batches(run.loader, 4))  # as programs call it
        assert rest == whole[4:]
        assert run.values() == expected


def trained_in_part(folder: str) -> list[list[int]]:
    with run_of(Accelerator) as run:
        seen = run.train(4)
        run.accelerator.save_state(folder)
        return seen


def trained_to_the_end(folder: str, skipped: int) -> tuple[list[list[int]], list[float]]:
    with run_of(Accelerator, seed=5) as run:
        run.accelerator.load_state(folder)
        seen = run.train(99, loader=run.accelerator.skip_first_batches(run.loader, skipped))
        return seen, run.values()["weights"]


def trained_whole() -> tuple[list[list[int]], list[float]]:
    with run_of(Accelerator) as run:
        return run.train(99), run.values()["weights"]


@pytest.mark.slow
def test_two_processes_go_on_too_and_one_process_goes_on_with_their_rest(
    tmp_path: Path, run_ranks: Any
) -> None:
    folder = str(tmp_path / "state")
    begun = run_ranks(trained_in_part, folder)
    whole = run_ranks(trained_whole)
    rest = run_ranks(trained_to_the_end, folder, 4)
    for before, after, expected in zip(begun, rest, whole, strict=True):
        assert before + after[0] == expected[0]
        assert after[1] == pytest.approx(expected[1], rel=1e-6)
    alone, _ = trained_to_the_end(folder, 8)
    read = [index for batches in [*begun, alone] for batch in batches for index in batch]
    assert sorted(read) == list(range(24))


def test_what_cannot_be_saved_is_refused_as_by_the_real_one() -> None:
    for kind, _ in BOTH:
        with run_of(kind) as run:
            with pytest.raises(ValueError, match="int"):
                run.accelerator.register_for_checkpointing(3)
            with pytest.raises((ValueError, OSError)):
                run.accelerator.load_state("/there/is/no/such/folder")


class Full:
    """An object that cannot be saved, as on a disk that is full."""

    def state_dict(self) -> dict[str, int]:
        raise OSError("no space left")

    def load_state_dict(self, state: dict[str, int]) -> None:
        del state


def write_name(models: Any, weights: Any, output_dir: str) -> None:
    del models, weights
    (Path(output_dir) / "own").mkdir()
    (Path(output_dir) / "own" / "name.txt").write_text(output_dir)


def written_by_hook(folder: Path) -> str | None:
    file = folder / "own" / "name.txt"
    return file.read_text() if file.exists() else None


def test_a_hook_that_fails_leaves_the_checkpoints_as_they_were(tmp_path: Path) -> None:
    def fails(models: Any, weights: Any, output_dir: str) -> None:
        write_name(models, weights, output_dir)
        raise OSError("no space left")

    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    with run_of(Accelerator, project_config=project) as run:
        run.train(1)
        run.accelerator.save_state()
        expected = run.values()
        hook = run.accelerator.register_save_state_pre_hook(fails)
        run.train(1)
        with pytest.raises(OSError, match="no space left"):
            run.accelerator.save_state()
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_0"]
        run.accelerator.load_state()
        assert run.values() == expected
        hook.remove()
        assert run.accelerator.save_state().name == "checkpoint_1"


def test_what_hooks_write_is_there_when_the_checkpoint_is_committed_and_not_before(tmp_path: Path) -> None:
    with run_of(Accelerator) as run:
        run.accelerator.register_save_state_pre_hook(write_name)
        run.accelerator.save_state(str(tmp_path))
        first = written_by_hook(tmp_path)
        assert first is not None
        (tmp_path / "own" / "name.txt").write_text("of the first")
        expected = run.values()
        run.train(1)
        run.accelerator.register_for_checkpointing(Full())
        with pytest.raises(OSError, match="no space left"):
            run.accelerator.save_state(str(tmp_path))
        assert written_by_hook(tmp_path) == "of the first"
        assert not (tmp_path / ".staged").exists()
    with run_of(Accelerator) as run:
        run.accelerator.load_state(str(tmp_path))
        assert run.values() == expected


@pytest.mark.parametrize("is_committed", [False, True])
def test_a_kill_around_the_commit_leaves_files_of_one_checkpoint(tmp_path: Path, is_committed: bool) -> None:
    with run_of(Accelerator) as run:
        run.accelerator.save_state(str(tmp_path))
        (tmp_path / "own").mkdir()
        (tmp_path / "own" / "name.txt").write_text("of the first")
        write_name([], [], str(stage(tmp_path)))  # a killed process leaves this
        if is_committed:
            run.accelerator.inner.save_state(tmp_path)  # without the hook that settles
        run.accelerator.load_state(str(tmp_path))
    assert (written_by_hook(tmp_path) == "of the first") is not is_committed
    assert not (tmp_path / ".staged").exists()


def test_a_folder_that_a_killed_save_left_is_no_checkpoint(tmp_path: Path) -> None:
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    with run_of(Accelerator, project_config=project) as run:
        run.accelerator.save_state()
        stage(tmp_path / "checkpoints" / "checkpoint_1")
        run.accelerator.load_state()
        project.iteration = 1
        assert run.accelerator.save_state().name == "checkpoint_1"
        assert len(numbered_folders(tmp_path / "checkpoints")) == 2


def test_options_that_would_be_dropped_are_refused_or_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with run_of(Accelerator) as run:
        run.accelerator.save_state(str(tmp_path), safe_serialization=False)
        assert "safe_serialization=False" in caplog.text
        caplog.clear()
        run.accelerator.load_state(str(tmp_path), load_kwargs={"weights_only": True}, strict=True)
        assert not caplog.text
        run.accelerator.load_state(str(tmp_path), map_location="on_device", load_kwargs={"mmap": True})
        assert "load_kwargs['mmap'], map_location: changes nothing" in caplog.text
        with pytest.raises(ValueError, match="loaded whole"):
            run.accelerator.load_state(str(tmp_path), strict=False)
        with pytest.raises(ValueError, match="say cpu"):
            run.accelerator.load_state(str(tmp_path), map_location="cuda")
        with pytest.raises(TypeError, match="unknown arguments other"):
            run.accelerator.load_state(str(tmp_path), other=1)


def test_what_hooks_write_is_there_after_a_save_in_an_open_window(tmp_path: Path) -> None:
    with run_of(Accelerator, gradient_accumulation_steps=2) as run:
        run.accelerator.register_save_state_pre_hook(write_name)
        run.train(1)
        run.accelerator.save_state(str(tmp_path))
        assert written_by_hook(tmp_path) is not None
        assert not (tmp_path / ".staged").exists()


def saved_with_hook(folder: str) -> tuple[str | None, str]:
    """Save with a hook that writes on the main process; then with one that fails there, and return its error."""
    with run_of(Accelerator) as run:

        def write(models: Any, weights: Any, output_dir: str) -> None:
            if run.accelerator.is_main_process:
                write_name(models, weights, output_dir)

        hook = run.accelerator.register_save_state_pre_hook(write)
        run.accelerator.save_state(folder)
        run.accelerator.wait_for_everyone()
        found = written_by_hook(Path(folder))
        hook.remove()

        def fail(models: Any, weights: Any, output_dir: str) -> None:
            del models, weights
            if run.accelerator.is_main_process:
                raise OSError(f"no space left for {Path(output_dir).name}")

        run.accelerator.register_save_state_pre_hook(fail)
        try:
            run.accelerator.save_state(folder)
        except (OSError, RuntimeError) as error:
            return found, str(error)
        return found, ""


@pytest.mark.slow
def test_all_processes_see_what_hooks_wrote_and_which_failed(tmp_path: Path, run_ranks: Any) -> None:
    for found, error in run_ranks(saved_with_hook, str(tmp_path / "state")):
        assert found is not None
        assert "no space left for state" in error
