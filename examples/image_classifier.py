"""An image classifier with augmentation, an average of its weights, and a schedule that a resumed run continues.

The images are made: stripes of ten directions in noise. For yours, put any map-style dataset in place of `Stripes`.

python examples/image_classifier.py
drivetrain launch --num-processes 2 examples/image_classifier.py
drivetrain launch --num-processes 2 examples/image_classifier.py --resume

--resume goes on from the newest checkpoint in --project-dir, also in the middle of an epoch.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset

from drivetrain import Accelerator

NUM_CLASSES = 10


class Stripes(Dataset):
    """Pairs of a striped image, of shape (3, 16, 16), and the number of the stripes' direction."""

    def __init__(self, num_images: int, *, augmented: bool) -> None:
        self.augmented = augmented
        self.labels = torch.arange(num_images) % NUM_CLASSES
        angle = (math.pi * self.labels / NUM_CLASSES)[:, None, None]
        row, column = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        stripes = torch.sin(row * angle.cos() + column * angle.sin())[:, None]
        self.images = stripes + 1.5 * torch.randn(num_images, 3, 16, 16)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if self.augmented:  # the same numbers are drawn again after a resume, and with any number of workers
            top, left = torch.randint(0, 5, (2,)).tolist()
            image = F.pad(image, (2, 2, 2, 2))[:, top : top + 16, left : left + 16]
            image = image * (0.8 + 0.4 * torch.rand(3, 1, 1))
        return image, self.labels[index]


def convolution(num_inputs: int, num_outputs: int) -> nn.Module:
    """A convolution with its norm, which halves height and width."""
    return nn.Sequential(
        nn.Conv2d(num_inputs, num_outputs, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(num_outputs),
        nn.ReLU(),
    )


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """The accuracy over every image, each counted once. Called on all ranks."""
    model.eval()
    hits = [
        accelerator.gather_for_metrics(model(images).argmax(dim=1) == labels) for images, labels in loader
    ]
    model.train()
    return torch.cat(hits).double().mean().item()


def main() -> None:
    """Train, evaluate both the weights and their average after each epoch, and export the average."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--images", type=int, default=2000, help="images to train on")
    parser.add_argument("--batch-size", type=int, default=32, help="images in a batch of each process")
    parser.add_argument("--save-every", type=int, default=50, help="optimizer steps between checkpoints")
    parser.add_argument("--project-dir", type=Path, default=Path("runs/images"), help="where all is written")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    args = parser.parse_args()

    sections = {"checkpoint": {"save_every_steps": args.save_every}}
    with Accelerator(seed=0, project_dir=args.project_dir, sections=sections) as accelerator:
        loader = DataLoader(Stripes(args.images, augmented=True), args.batch_size, shuffle=True)
        validation = DataLoader(Stripes(args.images // 4, augmented=False), args.batch_size)
        loader, validation = accelerator.prepare(loader, validation)

        model = nn.Sequential(
            convolution(3, 16), convolution(16, 32), nn.Flatten(), nn.Linear(32 * 4 * 4, NUM_CLASSES)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        num_steps = accelerator.num_steps(loader, epochs=args.epochs)  # fewer on more processes
        scheduler = OneCycleLR(optimizer, max_lr=0.05, total_steps=num_steps)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        ema = accelerator.ema(model, decay=0.98, warmup=10)
        if args.resume:
            accelerator.load_state()

        for epoch in range(loader.epoch, args.epochs):
            for images, labels in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(F.cross_entropy(model(images), labels, label_smoothing=0.1))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                accelerator.save_if_due()
            accuracy = evaluate(accelerator, model, validation)
            with ema.applied():
                averaged = evaluate(accelerator, model, validation)
            accelerator.print(f"epoch {epoch}: accuracy {accuracy:.3f}, of the average {averaged:.3f}")

        with ema.applied():
            accelerator.save_model(model, args.project_dir / "export")


if __name__ == "__main__":
    main()
