"""Weights for the host that stay pages of their file until they are written to."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dispatch.models import file_of
from drivetrain_dispatch import init_empty_weights, load_checkpoint_in_model

MAPS = Path("/proc/self/maps")


def saved(path: Path, **others: Tensor) -> dict[str, Tensor]:
    """Write the weights of a model of two layers, and return them."""
    values = {**{f"{layer}.weight": torch.randn(64, 64) for layer in range(2)}, **others}
    if path.suffix == ".safetensors":
        save_file(values, path)
    else:
        torch.save(values, path)
    return values


def loaded(path: Path, *, dtype: torch.dtype = torch.float32, empty: bool = True) -> nn.Sequential:
    def build() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=dtype) for _ in range(2)))

    if not empty:
        model = build()
    else:
        with init_empty_weights():
            model = build()
    load_checkpoint_in_model(model, path, {"": "cpu"})
    return model


def are_equal(model: nn.Module, values: dict[str, Tensor]) -> bool:
    return all(
        torch.equal(tensor, values[name].to(tensor.dtype)) for name, tensor in model.state_dict().items()
    )


@pytest.mark.skipif(not MAPS.exists(), reason="the system does not tell what is mapped")
def test_what_the_host_can_use_as_it_is_in_the_file_is_not_copied(tmp_path: Path) -> None:
    path, torchs = tmp_path / "model.safetensors", tmp_path / "model.bin"
    saved(path)
    saved(torchs)
    for model, expected in (
        (loaded(path), True),
        (loaded(path, empty=False), True),
        (loaded(path, dtype=torch.bfloat16), False),
        (loaded(torchs), False),  # torch.save writes into the file that it finds
    ):
        assert [file_of(each) == str(path) for each in model.parameters()] == [expected] * 2


def test_training_does_not_reach_the_file_nor_another_model(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    values = saved(path)
    model, other = loaded(path), loaded(path, empty=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model[1].weight.zero_()
    assert not torch.equal(model[0].weight, values["0.weight"])
    assert are_equal(other, values)
    assert all(torch.equal(each, values[name]) for name, each in load_file(path).items())


def test_weights_stay_where_the_file_is_replaced_or_deleted(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    values = saved(path)
    model = loaded(path)
    save_file({name: each * 2 for name, each in model.state_dict().items()}, path)  # from its own pages
    assert all(torch.equal(each, values[name] * 2) for name, each in load_file(path).items())
    assert are_equal(model, values)
    again = loaded(path)
    os.unlink(path)
    assert are_equal(model, values)
    assert are_equal(again, {name: each * 2 for name, each in values.items()})


def test_a_file_of_torchs_may_be_written_over(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    values = saved(path)
    model = loaded(path)
    torch.save({name: each * 2 for name, each in values.items()}, path)
    assert are_equal(model, values)


def test_a_tensor_that_is_not_aligned_is_copied(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    values = saved(path)
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].rstrip() + b" "
    while len(header) % 4 != 2:
        header += b" "
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    model = loaded(path)
    assert are_equal(model, values)
    assert all(each.data_ptr() % 4 == 0 for each in model.parameters())


def test_the_progress_reaches_its_total(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    saved(path)
    told: list[tuple[int, int]] = []
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
    load_checkpoint_in_model(model, path, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (2 * 64 * 64 * 4,) * 2
