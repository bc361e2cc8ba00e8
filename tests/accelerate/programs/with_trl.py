"""A program written for TRL: its trainers learn from texts or preferences, and it prints what came out."""

import argparse
import json
from typing import Any

from datasets import Dataset
from small_models import llama, texts, tokenizer
from transformers import LlamaForSequenceClassification, set_seed
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer


def preferences(number: int) -> Dataset:
    pairs = zip(texts(number), texts(number)[::-1], strict=True)
    return Dataset.from_list(
        [{"prompt": "red sea", "chosen": " " + good, "rejected": " " + bad} for good, bad in pairs]
    )


def supervised(common: dict[str, Any], data: Dataset, **more: Any) -> SFTTrainer:
    return SFTTrainer(
        model=llama(),
        args=SFTConfig(max_length=16, **common, **more),
        train_dataset=data,
        eval_dataset=data.select(range(7)),
        processing_class=tokenizer(),
    )


def preferring(common: dict[str, Any]) -> DPOTrainer:
    data = preferences(22)
    return DPOTrainer(
        model=llama(),
        ref_model=llama(),
        args=DPOConfig(max_length=32, **common),
        train_dataset=data,
        eval_dataset=data.select(range(7)),
        processing_class=tokenizer(),
    )


def rewarding(common: dict[str, Any]) -> RewardTrainer:
    data = preferences(22)
    config = llama().config
    config.num_labels = 1
    set_seed(0)
    return RewardTrainer(
        model=LlamaForSequenceClassification(config),
        args=RewardConfig(max_length=32, **common),
        train_dataset=data,
        eval_dataset=data.select(range(7)),
        processing_class=tokenizer(),
    )


def made(kind: str, common: dict[str, Any]) -> Any:
    written = Dataset.from_list([{"text": text} for text in texts(22)])
    asked = Dataset.from_list([{"prompt": "red sea", "completion": " " + text} for text in texts(22)])
    if kind == "sft":
        return supervised(common, written)
    if kind == "completions":
        return supervised(common, asked, completion_only_loss=True)
    if kind == "packed":
        return supervised(common, written, packing=True, packing_strategy="wrapped")
    return preferring(common) if kind == "dpo" else rewarding(common)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("kind", choices=["sft", "completions", "packed", "dpo", "reward"])
    options = parser.parse_args()
    common = {
        "output_dir": options.folder,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "train_sampling_strategy": "sequential",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "learning_rate": 1e-3,
    }
    trainer = made(options.kind, common)
    trainer.train()
    kept = [
        {key: value for key, value in entry.items() if not key.endswith(("runtime", "per_second", "flos"))}
        for entry in trainer.state.log_history
    ]
    weights = float(sum(each.detach().double().abs().sum() for each in trainer.model.parameters()))
    if trainer.is_world_process_zero():
        print("FOUND", json.dumps({"history": kept, "weights": weights}))


if __name__ == "__main__":
    main()
