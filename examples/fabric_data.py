"""Lightning Fabric trains, and `drivetrain-data` alone shards the data: uneven tails count right, and epochs resume.

The rest of drivetrain is not imported: `pip install drivetrain-data lightning-fabric` is enough.

python examples/fabric_data.py
python examples/fabric_data.py --devices 2
python examples/fabric_data.py --devices 2 --resume

--resume goes on in the middle of the epoch, also with another number of devices.
"""

import argparse
from pathlib import Path

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain_data import Shard, shard_loader, trim


def main() -> None:
    """Train, and measure an exact error over all samples."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accelerator", default="cpu", help="the kind of device, as Fabric names it")
    parser.add_argument("--devices", type=int, default=1, help="how many, with a process each")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=20, help="batches between checkpoints")
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/fabric/checkpoint.pt"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    args = parser.parse_args()

    fabric = Fabric(accelerator=args.accelerator, devices=args.devices)
    fabric.launch()
    fabric.seed_everything(0)
    inputs = torch.randn(1003, 8)  # no multiple of anything
    targets = inputs.sum(dim=1, keepdim=True) + 0.1 * torch.randn(1003, 1)
    data = TensorDataset(inputs, targets)
    model = nn.Linear(8, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))

    # In place of fabric.setup_dataloaders:
    shard = Shard(fabric.global_rank, fabric.world_size)
    loader = shard_loader(DataLoader(data, batch_size=16, shuffle=True), shard, seed=0, device=fabric.device)
    # Padded, since Fabric gathers equal shapes alone; `trim` leaves the padding out.
    validation = shard_loader(DataLoader(data, batch_size=16), shard, even="pad", device=fabric.device)
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    if args.resume:
        fabric.load(args.checkpoint, state)
        place = loader.state_dict()
        fabric.print(f"goes on in epoch {place['epoch']}, behind {place['position']} samples")

    num_batches = 0
    for _ in range(loader.epoch, args.epochs):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            # 1 but in an uneven tail, where ranks hold different numbers of samples.
            fabric.backward(loss * loader.current.weight(shard.index))
            optimizer.step()
            optimizer.zero_grad()
            num_batches += 1
            if num_batches % args.save_every == 0:
                fabric.save(args.checkpoint, state)

    errors = []
    with torch.no_grad():
        for x, y in validation:
            gathered = fabric.all_gather((model(x) - y).abs()).reshape(-1, 1)  # (ranks * batch, 1)
            errors.append(trim(validation.current, gathered))  # each sample once
    errors = torch.cat(errors)
    fabric.print(f"{len(errors)} samples, mean error {errors.mean().item():.6f}")


if __name__ == "__main__":
    main()
