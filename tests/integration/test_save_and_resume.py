from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from logged_messages import messages_of
from registered import Kept

SAMPLES, GLOBAL_BATCH, IN_SECOND_EPOCH = 52, 4, 17


def run(
    folder: Path, stop_at: int | None = None, resume: bool = False
) -> tuple[list[list[int]], torch.Tensor, int]:
    """Train two epochs with dropout; save and stop at a step, or go on from there."""
    accelerator = Accelerator(cpu=True, seed=11, project_dir=folder)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 4), nn.Dropout(0.2 if accelerator.num_processes == 1 else 0.0), nn.Linear(4, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
    data = TensorDataset(
        torch.arange(SAMPLES), torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(1))
    )
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // accelerator.num_processes, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    counter = Kept()
    accelerator.register_for_checkpointing(counter)
    if resume:
        accelerator.load_state()
    seen: list[list[int]] = []
    for epoch in range(loader.epoch, 2):
        for index, x in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().sum(), count=len(x))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            counter.value += 1
            seen.append(accelerator.gather_for_metrics(index).tolist())
            if counter.value == stop_at:
                accelerator.save_state()
                return seen, torch.empty(0), counter.value
        assert loader.epoch == epoch
    weights = torch.cat([p.detach().flatten() for p in accelerator.unwrap_model(model).parameters()])
    return seen, weights, counter.value


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (1, 2), (2, 1), (4, 2), (2, 4)])
@pytest.mark.default_cases("2-1", "1-2")
def test_a_run_goes_on_exactly_where_it_was_saved(run_ranks, tmp_path, before: int, after: int) -> None:
    whole, weights, total = run_ranks(run, tmp_path / "whole", num_processes=before)[0]
    first, _, _ = run_ranks(run, tmp_path / "parts", IN_SECOND_EPOCH, num_processes=before)[0]
    rest, resumed_weights, resumed_total = run_ranks(
        run, tmp_path / "parts", None, True, num_processes=after
    )[0]
    assert first + rest == whole
    assert len(whole) == total == 2 * SAMPLES // GLOBAL_BATCH
    assert sorted(sample for step in whole[: total // 2] for sample in step) == list(range(SAMPLES))
    assert resumed_total == total
    if before == after or before > 1 < after:
        torch.testing.assert_close(resumed_weights, weights, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_a_resume_at_another_world_size_says_what_became_of_the_generators(run_ranks, tmp_path) -> None:
    run_ranks(run, tmp_path, IN_SECOND_EPOCH, num_processes=2)
    first, again = (run_ranks(resumed_draw, tmp_path, num_processes=1)[0] for _ in range(2))
    assert first == again
    assert "saved with world size 2, resumed with 1" in first[1]


def resumed_draw(folder: Path) -> tuple[float, str]:
    with messages_of("drivetrain.saving.resume") as told:
        run(folder, resume=True)
    assert "saved with world size 2, resumed with 1" in (folder / "plan.json").read_text()
    return torch.rand(()).item(), "\n".join(told)
