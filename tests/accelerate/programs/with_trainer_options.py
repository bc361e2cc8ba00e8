"""A program that uses transformers' Trainer in many ways: for each it prints what came out."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from small_models import llama
from torch.utils.data import IterableDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

KEPT = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_sum", "step")


def samples(number: int = 22) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    words = [torch.randint(3, 32, (8,), generator=generator) for _ in range(number)]
    return [{"input_ids": text, "labels": text} for text in words]


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(samples())


class Short(LlamaForCausalLM):
    """A model that fits four samples in memory."""

    def forward(self, input_ids: Any = None, labels: Any = None, **more: Any) -> Any:
        if self.training and len(input_ids) > 4:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(input_ids=input_ids, labels=labels, **more)


class StopsEarly(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_training_stop = state.global_step == 3


def trainer_of(folder: Path, model: Any = None, kind: type[Trainer] = Trainer, **given: Any) -> Trainer:
    of_trainer = {name: given.pop(name) for name in ("callbacks", "compute_metrics") if name in given}
    data = given.pop("data", None) or samples()
    common: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "train_sampling_strategy": "sequential",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 1e-3,
    }
    arguments: Any = Seq2SeqTrainingArguments if kind is Seq2SeqTrainer else TrainingArguments
    return kind(
        args=arguments(**(common | given)),
        model=model or llama(),
        train_dataset=data,
        eval_dataset=samples(7),
        **of_trainer,
    )


def outcome(trainer: Trainer) -> dict[str, Any]:
    weights = float(sum(each.detach().double().abs().sum() for each in trainer.model.parameters()))
    history = [{key: entry[key] for key in KEPT if key in entry} for entry in trainer.state.log_history]
    return {"history": history, "weights": weights, "best": trainer.state.best_metric}


def trained(*given: Any, **more: Any) -> dict[str, Any]:
    trainer = trainer_of(*given, **more)
    trainer.train()
    return outcome(trainer)


def several_times(folder: Path) -> dict[str, Any]:
    trainer = trainer_of(folder, save_strategy="steps", save_steps=2, gradient_accumulation_steps=2)
    found: dict[str, Any] = {}
    for name, start in (("first", None), ("second", None), ("resumed", str(folder / "checkpoint-2"))):
        trainer.train(resume_from_checkpoint=start)
        trainer.evaluate()
        found[name] = outcome(trainer)
    predicted = trainer.predict(samples(5))
    return {**found, "predicted": float(torch.as_tensor(predicted.predictions).double().abs().sum())}


def fits_memory(folder: Path) -> dict[str, Any]:
    model = Short(llama().config)
    return trained(folder, model, auto_find_batch_size=True, per_device_train_batch_size=6)


def writes(folder: Path) -> dict[str, Any]:
    set_seed(0)
    config = T5Config(
        vocab_size=32, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return trained(
        folder,
        T5ForConditionalGeneration(config),
        Seq2SeqTrainer,
        predict_with_generate=True,
        generation_max_length=9,
        compute_metrics=lambda found: {"sum": float(abs(found.predictions).sum())},
    )


def drops_out(folder: Path) -> dict[str, Any]:
    set_seed(0)
    config = BertConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=3,
    )
    data = [{"input_ids": each["input_ids"], "labels": place % 3} for place, each in enumerate(samples())]
    return trained(folder, BertForSequenceClassification(config), data=data, eval_strategy="no")


def best(folder: Path, **more: Any) -> dict[str, Any]:
    chosen = {"save_strategy": "epoch", "load_best_model_at_end": True, "learning_rate": 5e-2}
    return trained(folder, num_train_epochs=4, **chosen, **more)


WAYS: dict[str, Any] = {
    "several times": several_times,
    "fits memory": fits_memory,
    "stops early": lambda folder: trained(folder, callbacks=[StopsEarly()]),
    "stops when worse": lambda folder: best(folder, callbacks=[EarlyStoppingCallback(1)]),
    "stream": lambda folder: trained(folder, data=Stream(), max_steps=9, eval_strategy="no"),
    "workers": lambda folder: trained(folder, dataloader_num_workers=2),
    "evaluates first": lambda folder: trained(folder, eval_on_start=True, gradient_accumulation_steps=3),
    "noise": lambda folder: trained(folder, neftune_noise_alpha=5.0),
    "writes": writes,
    "drops out": drops_out,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    found = {name: run(options.folder / name.replace(" ", "_")) for name, run in WAYS.items()}
    if trainer_of(options.folder / "last").is_world_process_zero():
        print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
