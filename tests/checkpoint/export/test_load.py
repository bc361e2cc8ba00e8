from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from safetensors.torch import save_model as library_save
from torch import Tensor, nn

from drivetrain_checkpoint import CorruptCheckpointError, load_model, save_model


class Language(nn.Module):
    """A tied weight, a buffer of another dtype, and views into one memory."""

    def __init__(self, *, seed: int, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.norm.running_mean = torch.randn(4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("max_shard_size", ["5GB", 100, 1])
def test_a_model_comes_back_with_its_ties_into_the_same_parameters(
    tmp_path: Path, max_shard_size: int | str
) -> None:
    saved, model = Language(seed=0), Language(seed=1)
    save_model(saved, tmp_path, max_shard_size=max_shard_size)
    before = list(model.parameters())
    assert load_model(model, tmp_path) == ([], [])
    assert same(values(model), values(saved))
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("max_shard_size", ["5GB", 1])
def test_what_was_one_tensor_goes_to_each_of_a_models_parameters(
    tmp_path: Path, max_shard_size: int | str
) -> None:
    saved, model = Language(seed=0), Language(seed=1, tied=False)
    save_model(saved, tmp_path, max_shard_size=max_shard_size)
    load_model(model, tmp_path)
    assert same(values(model), values(saved))
    assert model.head.weight is not model.embed.weight


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_a_tied_weight_is_loaded_under_whichever_name_a_file_has(tmp_path: Path, kept: str) -> None:
    saved, model = Language(seed=0), Language(seed=1)
    dropped = {"embed.weight", "head.weight"} - {kept}
    tensors = {name: value for name, value in saved.state_dict().items() if name not in dropped}
    save_file(tensors, tmp_path / "model.safetensors")
    load_model(model, tmp_path)
    assert same(values(model), values(saved))


def test_what_safetensors_own_function_wrote_is_read(tmp_path: Path) -> None:
    saved, model = Language(seed=0), Language(seed=1)
    library_save(saved, str(tmp_path / "model.safetensors"))
    load_model(model, tmp_path)
    assert same(values(model), values(saved))


def test_two_values_for_a_tied_weight_are_refused_and_two_equal_ones_loaded(tmp_path: Path) -> None:
    untied, model = Language(seed=0, tied=False), Language(seed=1)
    before = values(model)
    save_model(untied, tmp_path)
    with pytest.raises(
        ValueError, match=r"embed\.weight and head\.weight are one tensor, and the export has two"
    ):
        load_model(model, tmp_path)
    assert same(values(model), before)
    untied.head.load_state_dict({"weight": untied.embed.weight})
    save_model(untied, tmp_path)
    load_model(model, tmp_path)
    assert same(values(model), values(untied))


def test_values_are_converted_to_the_models_dtypes(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    weight = torch.randn(2, 3, dtype=torch.bfloat16)
    save_model({"weight": weight, "bias": torch.tensor([1, 2])}, tmp_path)
    load_model(model, tmp_path)
    assert torch.equal(model.weight, weight.float())
    assert model.bias.tolist() == [1.0, 2.0]


def test_other_names_are_an_error_and_nothing_is_loaded(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    before = values(model)
    save_model({"weight": torch.zeros(1, 2), "other": torch.zeros(1)}, tmp_path, max_shard_size=8)
    with pytest.raises(ValueError, match=r"not of this Linear: missing bias, unexpected other"):
        load_model(model, tmp_path)
    assert same(values(model), before)


def test_other_names_are_told_where_that_is_allowed(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    bias = model.bias.item()
    save_model({"weight": torch.zeros(1, 2), "other": torch.zeros(1)}, tmp_path, max_shard_size=8)
    missing, unexpected = load_model(model, tmp_path, strict=False)
    assert (missing, unexpected) == (["bias"], ["other"])
    assert model.weight.tolist() == [[0.0, 0.0]]
    assert model.bias.item() == bias


@pytest.mark.parametrize("strict", [True, False])
def test_other_shapes_are_an_error_and_nothing_is_loaded(tmp_path: Path, strict: bool) -> None:
    model = nn.Linear(2, 1)
    before = values(model)
    save_model({"weight": torch.zeros(1, 2), "bias": torch.zeros(2)}, tmp_path, max_shard_size=8)
    with pytest.raises(ValueError, match=r"Linear: bias is of shape \(1,\), in the export \(2,\)"):
        load_model(model, tmp_path, strict=strict)
    assert same(values(model), before)


def test_a_damaged_file_is_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    before = values(model)
    save_model({"weight": torch.zeros(1, 2), "bias": torch.zeros(1)}, tmp_path, max_shard_size=8)
    second = tmp_path / "model-00002-of-00002.safetensors"
    second.write_bytes(second.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match=second.name):
        load_model(model, tmp_path)
    assert same(values(model), before)


def test_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    save_model(nn.Linear(2, 1), tmp_path)
    with pytest.raises(ValueError, match=r"Linear: weight is on the meta device, .* call model\.to_empty"):
        load_model(nn.Linear(2, 1, device="meta"), tmp_path)
