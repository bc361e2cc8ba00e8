"""A model's state, loaded by copies where that is all there is to do, and by torch where a module does more."""

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain_backends.modules.compile import load_plain_state


class Renaming(nn.Linear):
    """Loads what an earlier version saved under another name."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}kernel" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}kernel")
        super()._load_from_state_dict(state_dict, prefix, *args)


class Counted(nn.Linear):
    """Keeps more than tensors."""

    calls = 0

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def model() -> nn.Sequential:
    tied = nn.Linear(3, 3)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), tied, tied)


def test_every_tensor_is_copied_into_the_models_own() -> None:
    one, other = model(), model()
    held = dict(one.named_parameters())
    load_plain_state(one, other.state_dict())
    for name, value in other.state_dict().items():
        assert torch.equal(one.state_dict()[name], value)
    assert all(one.get_parameter(name) is parameter for name, parameter in held.items())
    assert one[2] is one[3]


def test_modules_that_load_their_own_way_do() -> None:
    renaming = nn.Sequential(Renaming(2, 1, bias=False))
    load_plain_state(renaming, {"0.kernel": torch.ones(1, 2)})
    assert renaming[0].weight.tolist() == [[1.0, 1.0]]
    counted = nn.Sequential(Counted(2, 1))
    load_plain_state(counted, {**counted.state_dict(), "0._extra_state": 7})
    assert counted[0].calls == 7
    seen: list[list[str]] = []
    hooked = nn.Sequential(nn.Linear(2, 1))
    hooked[0].register_load_state_dict_post_hook(lambda _, keys: seen.append(keys.missing_keys))
    load_plain_state(hooked, hooked.state_dict())
    assert seen == [[]]


def test_what_does_not_fit_is_torchs_error_and_a_part_is_loaded_if_allowed() -> None:
    one = model()
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict"):
        load_plain_state(one, {"0.bias": torch.ones(3)})
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.bias"):
        load_plain_state(one, {**one.state_dict(), "0.bias": torch.ones(4)})
    load_plain_state(one, {"0.bias": torch.ones(3)}, strict=False)
    assert one[0].bias.tolist() == [1.0] * 3
