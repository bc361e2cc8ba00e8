"""What libraries do between two loops: free memory, prepare again, set even_batches; beside the real Accelerate."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from drivetrain_accelerate.accelerator.accelerator import Accelerator

accelerate: Any = pytest.importorskip("accelerate")
BOTH = (Accelerator, accelerate.Accelerator)


@contextmanager
def made(kind: Any) -> Generator[Any]:
    torch.manual_seed(0)
    accelerator = kind(cpu=True)
    try:
        yield accelerator
    finally:
        accelerator.free_memory()
        accelerator.state._reset_state(reset_partial_state=True)


def loader() -> DataLoader[Any]:
    data = TensorDataset(torch.arange(7.0).reshape(7, 1))
    return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, drop_last=False))


def outcome(accelerator: Any) -> list[float]:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.5))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    accelerator.prepare_model(model, evaluation_mode=True)  # a Trainer that evaluates before it trains
    found: list[float] = []
    for even in (False, True):  # sentence-transformers sets it between its loaders
        accelerator.free_memory()
        accelerator.even_batches = even
        batches = accelerator.prepare(loader())
        prepared, optimizer = accelerator.prepare(model, optimizer)
        for (batch,) in batches:
            with accelerator.accumulate(prepared):
                loss = prepared(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            # transformers repeats a mean once for each sample of a full batch.
            found += [loss.item(), len(accelerator.gather_for_metrics(loss.detach().repeat(4)))]
    return found


def test_a_loop_after_free_memory_goes_on_with_the_optimizer_and_the_masks_of_the_real_one() -> None:
    found: list[list[float]] = []
    for kind in BOTH:
        with made(kind) as accelerator:
            found.append(outcome(accelerator))
    assert found[0] == pytest.approx(found[1])
    assert found[0][1::2] == [4, 3, 4, 3]
