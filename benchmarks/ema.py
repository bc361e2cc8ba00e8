"""The time that an average of the weights adds to a step: ours, torch's, Lightning's, and one for Accelerate's users.

    uv run --group bench --with pytorch-lightning,pytorch-accelerated python benchmarks/ema.py

Composer's wants another torch. Lightning's callback is called as its Trainer calls it after a batch.

The model is a GPT-2 of 12 blocks of width 256, of 22 million parameters in 148 tensors, without its forward and
backward: contestants update their averages after a step of plain SGD, which all of them take.
"""

from collections.abc import Callable
from typing import Any

import torch
from rounds import Goal, Table, installed, parse_arguments, repeated, report, take_turns
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import GPT2Config, GPT2LMHeadModel

from drivetrain import Accelerator

DECAY, STEPS = 0.999, 20
NONE, OURS, TORCHS = "no average", "drivetrain, accelerator.ema", "torch, AveragedModel by foreach"
LIGHTNINGS = "Lightning, EMAWeightAveraging"
OTHER = "pytorch-accelerated, ModelEma"


def model_of() -> Any:
    """The model, with gradients."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=12, n_head=8, vocab_size=50_000))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-6)
    return model


def lightnings(model: Any) -> Callable[[Any], None]:
    """Return what updates Lightning's average, as its Trainer calls it after a batch."""
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.callbacks import EMAWeightAveraging

    class Counting(Trainer):
        num_steps = 0

        @property
        def global_step(self) -> int:
            return self.num_steps

    module: Any = LightningModule()
    module.model = model
    trainer = Counting(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)
    callback = EMAWeightAveraging(decay=DECAY)
    callback.setup(trainer, module, "fit")

    def update(_: Any) -> None:
        trainer.num_steps += 1
        callback.on_train_batch_end(trainer, module, None, None, trainer.num_steps - 1)

    return update


def contestants() -> dict[str, Callable[[], float]]:
    """What a step does, by contestant."""

    def by_hand(update: Callable[[Any], object] | None = None) -> Callable[[], None]:
        model = model_of()
        optimizer = SGD(model.parameters(), lr=1e-3)
        after = None if update is None else update(model)

        def step() -> None:
            optimizer.step()
            if after is not None:
                after(model)

        return step

    def torchs(model: Any) -> Callable[[Any], None]:
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)).update_parameters

    def other(model: Any) -> Callable[[Any], None]:
        from pytorch_accelerated.utils import ModelEma

        return ModelEma(model, decay=DECAY).update

    accelerator = Accelerator(cpu=True, backend="single", sections={"run": {"show_plan": False}})
    model = model_of()
    optimizer = SGD(model.parameters(), lr=1e-3)
    accelerator.prepare(model, optimizer)
    ema = accelerator.ema(model, decay=DECAY)

    def ours() -> None:
        optimizer.step()
        ema.update()

    steps = {NONE: by_hand(), OURS: ours, TORCHS: by_hand(torchs)}
    if installed("pytorch-lightning"):
        steps[LIGHTNINGS] = by_hand(lightnings)
    if installed("pytorch-accelerated"):
        steps[OTHER] = by_hand(other)
    return {name: repeated(step, times=STEPS) for name, step in steps.items()}


def main() -> None:
    """Measure every contestant, in turns."""
    arguments = parse_arguments(__doc__ or "", rounds=9)
    seconds = take_turns(contestants(), rounds=arguments.rounds)
    goal = Goal(of=OURS, beside=TORCHS, most=1.05)
    report(
        "ema",
        [Table(title="A step of SGD and its average", unit="ms", measured=seconds, goals=[goal])],
        arguments,
    )


if __name__ == "__main__":
    main()
