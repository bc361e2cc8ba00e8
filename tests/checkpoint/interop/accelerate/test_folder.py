from pathlib import Path

import pytest

from drivetrain_checkpoint import CorruptCheckpointError, ForeignStateError, find_accelerate_state
from drivetrain_checkpoint.interop.accelerate.folder import list_accelerate_state


def filled(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def test_a_state_is_found_by_its_files(tmp_path: Path) -> None:
    folder = filled(tmp_path / "x", "model.safetensors", "random_states_0.pkl")
    assert find_accelerate_state(folder) == folder


def test_the_last_numbered_one_stands_for_all(tmp_path: Path) -> None:
    for number in (0, 9, 10):
        filled(tmp_path / f"checkpoint_{number}", "optimizer.bin")
    assert find_accelerate_state(tmp_path) == tmp_path / "checkpoint_10"


@pytest.mark.parametrize(
    "names",
    [
        ("model.safetensors",),  # an export
        ("optimizer.bin", "manifest.json"),
        ("checkpoint_0/model.safetensors",),
        ("checkpoint_0/optimizer.bin", "step-3/manifest.json"),  # a run that went on here
        (),
    ],
)
def test_other_folders_are_none(tmp_path: Path, names: tuple[str, ...]) -> None:
    assert find_accelerate_state(filled(tmp_path / "x", *names)) is None
    assert find_accelerate_state(tmp_path / "nowhere") is None


def test_files_are_sorted_by_number_and_what_is_not_known_is_told(tmp_path: Path) -> None:
    models = ["model.safetensors", *(f"model_{i}.safetensors" for i in range(1, 11))]
    others = ["sampler.bin", "config.json", "notes/x"]
    found = list_accelerate_state(filled(tmp_path, *models, *others, "random_states_3.pkl", "scaler.pt"))
    assert [path.name for path in found.models] == models
    assert [path.name for path in found.others] == ["config.json", "notes", "sampler.bin"]
    assert {rank: path.name for rank, path in found.generators.items()} == {3: "random_states_3.pkl"}
    assert found.scaler == tmp_path / "scaler.pt"


def test_a_gap_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match="optimizers up to number 2, and number 1 is missing"):
        list_accelerate_state(filled(tmp_path, "optimizer.bin", "optimizer_2.bin"))


def test_a_model_in_two_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ForeignStateError, match=r"model\.safetensors and pytorch_model\.bin"):
        list_accelerate_state(filled(tmp_path, "model.safetensors", "pytorch_model.bin"))


@pytest.mark.parametrize("name", ["pytorch_model_fsdp_0", "pytorch_model_0", "optimizer_0"])
def test_a_state_in_parts_is_refused_with_a_way_out(tmp_path: Path, name: str) -> None:
    filled(tmp_path, "random_states_0.pkl", f"{name}/__0_0.distcp")
    with pytest.raises(ForeignStateError, match=rf"{name} is a state in parts.*FULL_STATE_DICT"):
        list_accelerate_state(tmp_path)


def test_an_engines_checkpoint_is_refused_with_a_way_out(tmp_path: Path) -> None:
    filled(tmp_path, "random_states_0.pkl", "pytorch_model/mp_rank_00_model_states.pt")
    with pytest.raises(ForeignStateError, match=r"DeepSpeed engine's own checkpoint.*zero_to_fp32\.py"):
        list_accelerate_state(tmp_path)
