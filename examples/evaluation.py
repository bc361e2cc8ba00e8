"""An exact metric on any number of processes: 103 samples in batches of 8 leave an uneven tail.

`gather_for_metrics` gives every rank each sample once, in the dataset's order: tensors, and any other objects.

python examples/evaluation.py
drivetrain launch --num-processes 2 examples/evaluation.py
"""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from drivetrain import Accelerator


class Points(Dataset):
    """Named points of the plane, labelled by the quadrant they lie in."""

    def __init__(self, num_points: int) -> None:
        self.points = torch.randn(num_points, 2)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, Tensor | str]:
        x, y = self.points[index]
        return {"name": f"point {index}", "point": self.points[index], "quadrant": 2 * (x > 0) + (y > 0)}


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[float, list[str]]:
    """The accuracy, and the names of the points that were taken for others. Called on all ranks."""
    hits: list[Tensor] = []
    names: list[str] = []
    for batch in loader:
        right = model(batch["point"]).argmax(dim=1) == batch["quadrant"]
        hits.append(accelerator.gather_for_metrics(right))
        names += accelerator.gather_for_metrics(batch["name"], use_gather_object=True)
    right = torch.cat(hits)
    return right.double().mean().item(), [
        name for name, hit in zip(names, right.tolist(), strict=True) if not hit
    ]


def main() -> None:
    """Evaluate an untrained model; any number of processes prints the same."""
    with Accelerator(seed=0) as accelerator:
        model = nn.Linear(2, 4)
        loader = DataLoader(Points(103), batch_size=8)
        model, loader = accelerator.prepare(model, loader)
        accuracy, wrong = evaluate(accelerator, model, loader)
        accelerator.print(f"{len(loader.dataset)} points, accuracy {accuracy:.6f}")
        accelerator.print(f"{len(wrong)} were wrong, the first: {', '.join(wrong[:3])}")


if __name__ == "__main__":
    main()
