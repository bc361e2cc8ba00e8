"""Tensors of a device in what a notebook sends to its ranks."""

import io
from contextlib import redirect_stderr

import pytest
import torch

from drivetrain_launcher import LaunchError, Workers, debug_launcher, notebook_launcher
from drivetrain_launcher.run.notebook.pickled_call import pack, unpack
from drivetrain_launcher.run.notebook.rank_channel import view_content
from hardware.devices import OnDevice, first, here, runs_on_device


@runs_on_device()
def test_a_model_on_a_device_arrives_on_the_cpu() -> None:
    layer = torch.nn.Linear(2, 2)
    weight = layer.weight.detach().clone()
    layer = layer.to(torch.accelerator.current_accelerator())
    layer.bias.requires_grad_(False)
    pickled_call = pack(lambda: layer, ())
    with pickled_call.content:
        pickled_call.content.flush()
        arrived = unpack(view_content(pickled_call.content))[0]()
    assert pickled_call.notes[0].startswith("2 tensors of ")
    assert pickled_call.notes[0].endswith(" reach the ranks on the CPU")
    assert arrived.weight.device.type == "cpu"
    assert isinstance(arrived.weight, torch.nn.Parameter)
    assert (arrived.weight.requires_grad, arrived.bias.requires_grad) == (True, False)
    assert torch.equal(arrived.weight, weight)
    assert layer.weight.device.type != "cpu"  # the notebook keeps its own


def launches_while_the_device_is_in_use() -> tuple[list[tuple[str, str]], str]:
    """Call a function that holds a tensor of the device on two ranks, which return tensors of their own device."""
    held = torch.ones(1, device=first())

    def where() -> tuple[str, torch.Tensor]:
        here().prepare()
        return str(held.device), torch.ones(1, device=first())

    said = io.StringIO()
    with redirect_stderr(said):
        results = debug_launcher(where, num_processes=2)
    return [(of_held, str(made.device)) for of_held, made in results], said.getvalue()


def test_an_accelerator_may_be_in_use_and_its_tensors_arrive_on_the_cpu(on_device: OnDevice) -> None:
    ((places, said),) = on_device(launches_while_the_device_is_in_use)
    assert places == [("cpu", "cpu")] * 2
    assert "reaches the ranks on the CPU" in said


def launches_on_the_card() -> tuple[list[str], list[str]]:
    """Where a function computes that a notebook launches after it used the card: in this process, and in another."""
    held = torch.ones(1, device=first())

    def where() -> str:
        return str((held.to(first()) + 1).device)

    with pytest.raises(LaunchError, match="devices to give"):
        notebook_launcher(where, num_processes=torch.cuda.device_count() + 1)
    with redirect_stderr(io.StringIO()), Workers(1) as workers:
        return notebook_launcher(where, num_processes=1), workers.run(where)


@pytest.mark.only_on("cuda", why="the launcher knows no simulated device")
def test_a_notebook_launches_on_the_card_after_it_used_it(on_device: OnDevice) -> None:
    assert on_device(launches_on_the_card) == [([first()], [first()])]
