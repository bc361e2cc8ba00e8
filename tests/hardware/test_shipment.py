"""Tensors of a device in what a notebook sends to its ranks."""

from collections.abc import Callable

import torch

from drivetrain_launcher.run.notebook.rank_channel import view_content
from drivetrain_launcher.run.notebook.shipment import pack, unpack


def ships_a_model_through_the_cpu() -> None:
    layer = torch.nn.Linear(2, 2)
    weight = layer.weight.detach().clone()
    layer = layer.to(torch.accelerator.current_accelerator())
    layer.bias.requires_grad_(False)
    shipment = pack(lambda: layer, ())
    with shipment.content:
        shipment.content.flush()
        arrived = unpack(view_content(shipment.content))[0]()
    assert shipment.notes[0].startswith("2 tensors of ")
    assert shipment.notes[0].endswith(" reach the ranks on the CPU")
    assert arrived.weight.device.type == "cpu"
    assert isinstance(arrived.weight, torch.nn.Parameter)
    assert (arrived.weight.requires_grad, arrived.bias.requires_grad) == (True, False)
    assert torch.equal(arrived.weight, weight)
    assert layer.weight.device.type != "cpu"  # the notebook keeps its own


def test_a_model_on_a_device_arrives_on_the_cpu(on_device: Callable[..., list[object]]) -> None:
    on_device(ships_a_model_through_the_cpu, num_processes=1)
