"""The same global batch gives the same losses and weights on 1, 2 and 4 processes."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from drivetrain import Accelerator

GLOBAL_BATCH = 8


class Case(NamedTuple):
    dtype: torch.dtype
    accumulation: int
    num_samples: int
    counted: bool


class Texts(Dataset[dict[str, Tensor]]):
    """Texts of 1 to 6 tokens of 5 features, padded, with a mask."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(case.num_samples, 6, 5, generator=generator, dtype=case.dtype)
        self.lengths = torch.randint(1, 7, (case.num_samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "mask": torch.arange(6) < self.lengths[index]}


def train(case: Case) -> tuple[list[float], Tensor]:
    accelerator = Accelerator(cpu=True, seed=5, gradient_accumulation_steps=case.accumulation)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).to(case.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)
    loader = DataLoader(Texts(case), batch_size=GLOBAL_BATCH // accelerator.num_processes, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    losses: list[float] = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                error = model(batch["x"]).squeeze(-1).square()
                if case.counted:
                    each = error * batch["mask"]
                    accelerator.backward(each.sum(), count=batch["mask"].sum())
                else:
                    each = error.mean(1)
                    accelerator.backward(each.mean())
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(each.detach()).sum().item())
    weights = torch.cat([p.detach().flatten() for p in accelerator.unwrap_model(model).parameters()])
    return losses, weights


@pytest.mark.parametrize("counted", [False, True], ids=["mean", "count"])
@pytest.mark.parametrize("num_samples", [64, 43, 65], ids=["even", "uneven", "one-sample-tail"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["f64", "f32"]
)
@pytest.mark.default_cases("f32-4-one-sample-tail-count", "f64-1-uneven-mean")
def test_losses_and_weights_do_not_depend_on_the_number_of_processes(
    run_ranks, dtype: torch.dtype, tolerance: float, accumulation: int, num_samples: int, counted: bool
) -> None:
    case = Case(dtype, accumulation, num_samples, counted)
    ((losses, weights),) = run_ranks(train, case, num_processes=1)
    for num_processes in (2, 4):
        for other_losses, other_weights in run_ranks(train, case, num_processes=num_processes):
            torch.testing.assert_close(other_losses, losses, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(other_weights, weights, rtol=tolerance, atol=tolerance)
