"""What users give is checked before anything is done, and each error names the argument."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dispatch.models import Stack
from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.load_and_dispatch import load_checkpoint_and_dispatch
from drivetrain_dispatch.loading.load_checkpoint import load_checkpoint_in_model


class Kept:
    """Packs nothing."""

    skip_modules = None

    def size_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return 1

    def pack(self, weight: torch.Tensor) -> nn.Parameter:
        return nn.Parameter(weight)

    def layer(self, linear: nn.Linear, weight: nn.Parameter) -> None:
        return None


QUANTIZATION = "give a BitsAndBytes4Bit, a BitsAndBytes8Bit, a StoredFP8 or a TorchAO (wrap torchao's "


@pytest.mark.parametrize("load", [load_checkpoint_in_model, load_checkpoint_and_dispatch])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype='bfloat16' is no torch.dtype: give torch.bfloat16"),
        ({"dtype": "torch.float16"}, "dtype='torch.float16' is no torch.dtype: give torch.float16"),
        ({"dtype": 16}, "dtype=16 is no torch.dtype: give torch.bfloat16"),
        (
            {"dtype": torch.float8_e4m3fn},
            "dtype=torch.float8_e4m3fn: no layer computes in it, weights are only stored so: load in "
            "torch.bfloat16, then apply_layerwise_casting",
        ),
        ({"quantization": "nf4"}, f"quantization='nf4': {QUANTIZATION}"),
        ({"quantization": Stack}, f"quantization=Stack: {QUANTIZATION}"),
        ({"quantization": Kept}, "or an object with pack, layer, size_bytes, skip_modules, called: Kept()"),
        ({"progress": True}, "progress=True cannot be called: give a function"),
        ({"device_map": 0}, 'device_map=0: give a map from names to devices, such as {"": "cpu"}; '
         'for the whole model on one device {"": 0}'),
        ({"device_map": "cpu"}, "for the whole model on one device {\"\": 'cpu'}"),
        ({"device_map": "cuda"}, "for the whole model on one device {\"\": 'cuda'}"),
        ({"device_map": torch.device("cpu")}, "for the whole model on one device {\"\": 'cpu'}"),
        ({"device_map": ["cpu"]}, "device_map=['cpu']: give a map from names to devices"),
    ],
)  # fmt: skip
def test_a_load_says_what_it_takes(
    load: Callable[..., Any], given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = Stack()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=re.escape(message)):
        load(model, tmp_path, **{"device_map": {"": "cpu"}, **given})
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert not hasattr(model, "hf_device_map")


def test_names_of_a_map_are_text() -> None:
    with pytest.raises(DeviceMapError, match=r"device_map=\{0: \.\.\.\}: names are text, .* '0'"):
        load_checkpoint_and_dispatch(nn.Sequential(nn.Linear(2, 2)), "nowhere", {0: "cpu"})  # type: ignore[dict-item]


@pytest.mark.parametrize("switch", ["release_pages", "offload_buffers"])
def test_a_load_alone_takes_no_switch_of_a_dispatched_model(switch: str) -> None:
    with pytest.raises(ValueError, match=f"{switch}=True is for a model that is dispatched"):
        load_checkpoint_and_dispatch(nn.Linear(2, 2), "nowhere", None, **{switch: True})
