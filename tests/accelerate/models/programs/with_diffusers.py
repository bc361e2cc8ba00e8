"""Pipelines of Diffusers offloaded to the host, on the tests' accelerator; and models with weights on the disk."""

# ruff: noqa: I001, E402, F401 the interface comes before what imports accelerate

import drivetrain_accelerate.auto
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hardware.simulated import device

device.make(device.NPU)
library = torch.library.Library("aten", "IMPL")


def host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    return torch.ops.aten.convolution(host(x), host(weight), host(bias), *options).to(x.device)


library.impl("convolution_overrideable", convolution, "PrivateUse1")
warnings.simplefilter("ignore")
from accelerate.hooks import AlignDevicesHook, CpuOffload, remove_hook_from_module
from diffusers import UNet2DConditionModel

from dispatch.test_diffusers import image, stable_diffusion

FOLDER = Path(sys.argv[1])
torch.manual_seed(0)
torch.set_num_threads(1)
pipeline = stable_diffusion(FOLDER)
pipeline.set_progress_bar_config(disable=True)
on_host = image(pipeline)
pipeline.to("npu:0")
expected = image(pipeline).cpu()
pipeline.to("cpu")
for enable, hook in (
    (pipeline.enable_model_cpu_offload, CpuOffload),
    (pipeline.enable_sequential_cpu_offload, AlignDevicesHook),
):
    enable(device="npu:0")
    assert isinstance(pipeline.unet._hf_hook, hook)
    assert pipeline._execution_device == torch.device("npu:0")
    for _ in range(2):
        assert torch.equal(image(pipeline).cpu(), expected)
    assert {parameter.device.type for parameter in pipeline.unet.parameters()} == {"cpu"}
    pipeline.remove_all_hooks()
    assert not any(hasattr(module, "_hf_hook") for module in pipeline.unet.modules())
    assert torch.equal(image(pipeline), on_host)

pipeline.unet.save_pretrained(FOLDER / "unet")
parts = {name: "disk" if name.endswith("blocks") else "cpu" for name, _ in pipeline.unet.named_children()}
unet = UNet2DConditionModel.from_pretrained(FOLDER / "unet", device_map=parts, offload_folder=FOLDER / "disk")
assert len(list((FOLDER / "disk").glob("*.dat"))) > 10
assert not list((FOLDER / "disk").glob("*.safetensors"))  # its own files are used as they are
pipeline.unet = unet
assert torch.equal(image(pipeline), on_host)
remove_hook_from_module(unet, recurse=True)
assert torch.equal(image(pipeline), on_host)
planned = UNet2DConditionModel.from_pretrained(
    FOLDER / "unet",
    device_map="auto",
    max_memory={0: "20KB", "cpu": "1GB"},
    offload_folder=FOLDER / "planned",
)
sample = torch.ones(1, 4, 8, 8)
torch.testing.assert_close(
    planned(sample, 1, torch.ones(1, 2, 16)).sample,
    unet(sample, 1, torch.ones(1, 2, 16)).sample,
    atol=1e-5,
    rtol=0,
)
print("as without")
