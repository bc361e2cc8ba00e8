"""The sweep on an accelerator: `test_dispatch_sweep.py` runs it, in a process of its own.

Weights are on the host and come to a device that has memory and streams of its own; the same model, on the device
altogether, gives the bits.
"""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from checks.commits import drawn_by_commit
from dispatch_sweep.cases import dispatched_cases
from dispatch_sweep.results import difference, gradients_of, tensors_of
from dispatch_sweep.ways import NOT_GENERATED, NOT_GIVEN, run, seed
from drivetrain_dispatch import dispatch_model, remove_hooks
from hardware.simulated import device
from sweep.model_cases import ModelCase, loss_of

device.make(device.NPU)
FIRST = torch.device(device.NPU.name, 0)
NUM_DRAWN = 20  # for a commit
# What this device cannot compute, and nothing of ours is about.
NOT_ON_IT = (
    "deepseek_v2", "llama4_text",  # complex numbers
    "encodec",  # an LSTM
    "ConsistencyDecoderVAE",  # keeps a tensor that it makes in inference mode, and trains with it
)  # fmt: skip
# Which generate in a way that does not go on it. What BLIP-2 computes outside of any forward, and Switch Transformers
# converts there, is on the host: the weights themselves have not come.
NOT_GENERATED_ON_IT = (*NOT_GENERATED, "whisper", "blip-2", "switch_transformers")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Draw the cases."""
    names = [name for name in dispatched_cases() if name not in NOT_ON_IT]
    everything = metafunc.config.getoption("--sweep") == "all"
    metafunc.parametrize("name", names if everything else drawn_by_commit(names, NUM_DRAWN))


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Any:
    """Operations that models use and the device does not have: the host's."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("convolution_overrideable", _convolution, "PrivateUse1")
    library.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
    library.impl("histc", _histogram, "PrivateUse1")
    return library  # which lasts as long as this is held


@pytest.mark.filterwarnings("ignore")
def test_a_class_whose_weights_come_to_the_device_gives_the_bits_of_one_that_is_there(name: str) -> None:
    case = dispatched_cases()[name]
    torch.set_num_threads(1)
    plain = case.build()
    model = dispatch_model(copy.deepcopy(plain), {"": "cpu"}, main_device=0)
    plain.to(FIRST)
    with torch.no_grad():
        expected = _on_the_host(run(plain, _moved(case.batch(0))))
    with torch.inference_mode():
        for _ in range(2):  # the order is learnt, then known
            output = run(model, case.batch(0))
            assert {tensor.device.type for _, tensor in tensors_of(output)} == {"cpu"}
            assert difference(_on_the_host(output), expected) is None
    assert difference(_generated(name, model, case), _generated(name, plain, case)) is None
    for one in (model, plain):
        # On the device: gradients of several outputs on the host would be added up in whatever order they come.
        loss_of(run(one.train(), _moved(case.batch(0)))).backward()
    assert {p.grad.device.type for p in model.parameters() if p.grad is not None} == {"cpu"}
    assert difference(_on_the_host(gradients_of(model)), _on_the_host(gradients_of(plain))) is None
    remove_hooks(model)
    assert difference(_on_the_host(model.state_dict()), _on_the_host(plain.state_dict())) is None


def _generated(name: str, model: Any, case: ModelCase) -> Tensor:
    if name in NOT_GENERATED_ON_IT or not getattr(model, "can_generate", lambda: False)():
        return torch.zeros(())
    asked = {key: value for key, value in case.batch(0).items() if key not in NOT_GIVEN}
    seed(0)
    return model.generate(**_moved(asked), max_new_tokens=4, min_new_tokens=4, do_sample=False).cpu()


def _moved(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _moved(item) for key, item in value.items()}
    return value.to(FIRST) if isinstance(value, Tensor) else value


def _on_the_host(output: Any) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors_of(output)}


def _host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    return torch.ops.aten.convolution(_host(x), _host(weight), _host(bias), *options).to(x.device)


def _convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    num_outputs = weight.shape[1] * groups if transposed else weight.shape[0]
    results = torch.ops.aten.convolution_backward(
        gradient.cpu(), x.cpu(), weight.cpu(), [num_outputs], stride, padding, dilation, transposed, output_padding,
        groups, wanted,
    )  # fmt: skip
    return tuple(None if result is None else result.to(x.device) for result in results)


def _histogram(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    return torch.histc(x.cpu().float(), bins, min, max).to(x.device, x.dtype)
