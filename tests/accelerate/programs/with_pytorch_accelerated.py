"""A program for the Trainer of pytorch-accelerated, which trains, evaluates, and prints the history of the run."""

import json

import torch
from pytorch_accelerated import Trainer
from torch.utils.data import TensorDataset


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    # Samples all alike, so that no order of shuffled data matters.
    data = TensorDataset(torch.ones(22, 4), torch.full((22,), 2))
    trainer = Trainer(
        model,
        loss_func=torch.nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=(),
    )
    trainer.train(
        train_dataset=data,
        eval_dataset=data,
        num_epochs=3,
        per_device_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_clip_value=0.5,
        train_dataloader_kwargs={"num_workers": 0},
        eval_dataloader_kwargs={"num_workers": 0},
    )
    history = trainer.run_history
    if trainer.run_config.is_world_process_zero:
        names = ("train_loss_epoch", "eval_loss_epoch")
        print("FOUND", json.dumps({name: list(history.get_metric_values(name)) for name in names}))


if __name__ == "__main__":
    main()
