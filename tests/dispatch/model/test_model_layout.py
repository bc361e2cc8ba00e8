import pytest
import torch
from torch import nn

from drivetrain_dispatch.model.model_layout import ModelLayout


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 2)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 5)
        self.head.weight = self.embed.weight
        self.again = self.norm
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_parameter("shift", None)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_it_has_what_torch_lists_under_every_name(device: str) -> None:
    model = Tied()
    if device == "meta":
        model.to(device)
        model.head.weight = model.embed.weight
    layout = ModelLayout.of(model)
    assert list(layout.modules.items()) == list(model.named_modules(remove_duplicate=False))
    assert list(layout.parameters.items()) == list(model.named_parameters(remove_duplicate=False))
    assert list(layout.buffers.items()) == list(model.named_buffers(remove_duplicate=False))
    assert list(layout.tensors) == [*layout.parameters, *layout.buffers]
    assert ("embed.weight", "head.weight") in layout.aliases
    assert ("norm.weight", "again.weight") in layout.aliases
    assert sorted(name for names in layout.aliases for name in names) == sorted(layout.tensors)


def test_tensors_are_described_as_they_will_be() -> None:
    layout = ModelLayout.of(
        Tied(),
        dtype=torch.float16,
        special_dtypes={"head.bias": torch.float64},
        special_sizes={"embed.weight": 7},
    )
    assert layout.dtypes["norm.weight"] == torch.float16
    assert layout.dtypes["head.bias"] == torch.float64
    assert layout.dtypes["seen"] == torch.int64
    assert (layout.sizes["embed.weight"], layout.sizes["head.bias"], layout.sizes["seen"]) == (7, 40, 24)
    assert list(layout.sizes) == list(layout.dtypes) == list(layout.tensors)


def test_what_is_converted_to_its_own_dtype_is_not_converted() -> None:
    assert not ModelLayout.of(Tied()).converts
    assert not ModelLayout.of(Tied(), dtype=torch.float32).converts
    assert ModelLayout.of(Tied(), dtype=torch.bfloat16).converts
    assert ModelLayout.of(Tied(), special_dtypes={"seen": torch.int32}).converts


def test_running_statistics_are_what_norms_write_to() -> None:
    each = ("running_mean", "running_var", "num_batches_tracked")
    assert ModelLayout.of(Tied()).running_statistics == {
        f"{name}.{buffer}" for name in ("norm", "again") for buffer in each
    }


@pytest.mark.parametrize("argument", ["special_dtypes", "special_sizes"])
def test_names_that_the_model_lacks_are_refused(argument: str) -> None:
    with pytest.raises(ValueError, match=rf"{argument}=\['head.scale'\]: the model has no such parameter"):
        ModelLayout.of(Tied(), **{argument: {"head.scale": 1}})
