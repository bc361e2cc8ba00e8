import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain_dispatch import disk_offload, dispatch_model
from drivetrain_dispatch.errors import WeightFilesError


def test_what_no_file_holds_is_said_and_the_model_stays(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, dtype=torch.complex128)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(WeightFilesError, match=r"'weight' is of torch.complex128, .* keep it on 'cpu'"):
        disk_offload(model, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("write_back", [False, True])
def test_weights_of_odd_sizes_compute_the_same_bits_from_a_file(tmp_path: Path, write_back: bool) -> None:
    """As matrix times vector does otherwise in fp32, where a weight begins 8 bytes after a multiple of 16."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(1021, 1021), nn.ReLU(), nn.Linear(1021, 517), nn.LayerNorm(517), nn.Linear(517, 1021)
    )
    model.append(nn.Unflatten(1, (1, 1021))).append(nn.Conv1d(1, 3, 5, bias=True)).eval()
    batches = [torch.randn(num, 1021) for num in (1, 2, 7)]
    expected = [model(batch) for batch in batches]
    dispatch_model(model, {"": "disk"}, offload_dir=tmp_path, write_back=write_back)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in model.parameters())
    assert all(torch.equal(model(batch), one) for batch, one in zip(batches, expected, strict=True))
