import torch
from torch import nn

from drivetrain_dispatch.compat import FakeTensorMode
from drivetrain_plan.program.fake_tensors import give_fake_tensors


class Table(nn.Module):
    """A buffer, and a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(3), persistent=False)
        self.plain = torch.ones(4)
        self.register_parameter("absent", None)


def test_shapes_dtypes_ties_and_frozen_weights_stay() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16(), Table())
        model[1].weight = model[0].weight
        model[1].bias.requires_grad_(False)
    with FakeTensorMode():
        give_fake_tensors(model)
    assert model[1].weight is model[0].weight
    assert isinstance(model[1].bias, nn.Parameter)
    assert (model[1].bias.dtype, model[1].bias.requires_grad) == (torch.bfloat16, False)
    tensors = [*model.parameters(), *model.buffers(), model[2].plain]
    assert all(tensor.device.type == "cpu" for tensor in tensors)
