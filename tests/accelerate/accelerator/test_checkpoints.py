"""save_state and load_state, beside the installed Accelerate's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_checkpoint_runs import run_of
from drivetrain_accelerate.accelerator.accelerator import Accelerator
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
                saved.append(str(Path(run.accelerator.save_state()).relative_to(folder)))
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
