"""What Megatron's layers do on CUDA alone: their own random numbers, recomputation, bf16, sharded logits."""

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from drivetrain_state import ParallelDims, StateSettings, connect
from hardware.devices import OnDevice, here
from megatron_models import NUM_TOKENS, model_of, places, skip_without_megatron, tokens

pytestmark = pytest.mark.only_on("cuda", why="Megatron's layers name CUDA")


def train(options: dict[str, Any], mode: str, num_steps: int = 5) -> list[float]:
    """Return losses of a converted model on the device, at as many ranks as there are."""
    from drivetrain_backends import AccumulationWindow
    from drivetrain_megatron import MegatronBackend, megatron_from_transformers
    from drivetrain_precision import choose_policy

    settings = StateSettings(device=here().name, watchdog=False)
    with connect(settings, needs_group=True, parallelism=ParallelDims(tensor=-1)) as context:
        policy = choose_policy(mode, context.device)
        backend = MegatronBackend(context, policy, window=AccumulationWindow(1))
        model = megatron_from_transformers(model_of("llama").train(), options=options)
        (prepared,) = backend.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
        losses: list[float] = []
        for step in range(num_steps):
            ids = tokens(seed=step).to(context.device)
            backend.window.begin()
            labels = ids.roll(-1, dims=1)
            loss = prepared.model(ids, places(ids), None, labels=labels)[:, :-1].mean()
            prepared.backward(loss)
            prepared.optimizers[0].step()
            prepared.optimizers[0].zero_grad()
            losses.append(loss.item())
        backend.close()
    return losses


def train_plainly(num_steps: int = 5) -> list[float]:
    model = model_of("llama").train()
    optimizer, losses = SGD(model.parameters(), lr=0.1), list[float]()
    for step in range(num_steps):
        ids = tokens(seed=step)
        loss = cross_entropy(model(ids).logits[:, :-1].reshape(-1, NUM_TOKENS), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("options", [{}, RECOMPUTE], ids=["kept", "recomputed"])
def test_a_converted_model_trains_as_the_plain_one(
    on_device: OnDevice, options: dict[str, Any], num_processes: int
) -> None:
    skip_without_megatron()
    for losses in on_device(train, options, "no", num_processes=num_processes):
        assert losses == pytest.approx(train_plainly(), abs=1e-3)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_converted_model_trains_under_autocast_in_bf16(on_device: OnDevice, num_processes: int) -> None:
    skip_without_megatron()
    for losses in on_device(train, {}, "bf16", num_processes=num_processes):
        assert losses == pytest.approx(train_plainly(), abs=5e-2)


def test_dropout_inside_layers_differs_among_ranks_and_leaves_torchs_numbers(on_device: OnDevice) -> None:
    skip_without_megatron()
    first, second = on_device(drawn_inside, num_processes=2)
    assert first[0] != second[0]
    assert first[1] == second[1]


def drawn_inside() -> tuple[float, float]:
    """A number that Megatron's tracker draws, and torch's next."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from drivetrain_megatron.groups import close_parallel_state, open_parallel_state

    settings = StateSettings(device=here().name, watchdog=False)
    with connect(settings, needs_group=True, parallelism=ParallelDims(tensor=2)) as context:
        torch.manual_seed(3)
        open_parallel_state(context)
        with get_cuda_rng_tracker().fork():
            inside = torch.rand((), device=context.device).item()
        outside = torch.rand((), device=context.device).item()
        close_parallel_state()
    return inside, outside
