"""CUDA graphs of a user's own: training beside them and around them leaves them as they are."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from hardware.devices import first, runs_on_device

pytestmark = pytest.mark.only_on("cuda", why="only CUDA has graphs")
QUIET = {"run": {"show_plan": False}}


def capture(module: nn.Module, given: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture an inference, after a first one on a stream beside; the graph, and the tensor that a replay fills."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside), torch.no_grad():
        module(given)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        result = module(given)
    return graph, result


@pytest.mark.parametrize("mode", ["no", "bf16", "fp16"])
@runs_on_device()
def test_a_graph_is_captured_and_replayed_beside_training(mode: str) -> None:
    """Replay two graphs, captured before the first step and after the last epoch's, between steps of training."""
    accelerator = Accelerator(mixed_precision=mode, sections=QUIET | {"tracking": {"throughput": True}})
    served = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).to(first()).eval()
    given = torch.randn(4, 16, device=first())
    graphs = [capture(served, given)]
    model = nn.Linear(16, 4)
    loader = DataLoader(TensorDataset(torch.randn(32, 16)), batch_size=4, pin_memory=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    for _ in range(2):
        for (x,) in loader:
            accelerator.backward(model(x).float().square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            given.normal_()
            with torch.no_grad():
                expected = served(given)
            for graph, result in graphs:
                graph.replay()
                torch.testing.assert_close(result, expected)
        graphs.append(capture(served, given))
    accelerator.end_training()


def losses(graphed: bool) -> list[float]:
    """Train a model, one part of which may be graphs; the losses."""
    torch.manual_seed(0)
    accelerator = Accelerator(sections=QUIET)
    part = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    model = nn.Sequential(nn.Linear(8, 16), part, nn.Linear(16, 4))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    x = torch.randn(4, 8).to(accelerator.device)
    if graphed:
        given = torch.randn(4, 16, device=accelerator.device, requires_grad=True)
        torch.cuda.make_graphed_callables(part, (given,))
    found: list[Tensor] = []
    for _ in range(6):
        loss = (model(x) - 1).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    accelerator.end_training()
    return [loss.item() for loss in found]


@runs_on_device()
def test_a_prepared_models_part_that_became_graphs_trains_as_before() -> None:
    expected = losses(graphed=False)
    assert expected[-1] < expected[0]
    assert losses(graphed=True) == pytest.approx(expected, rel=1e-5)
