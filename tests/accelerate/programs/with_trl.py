"""A program written for TRL: its trainers learn from texts or preferences, and it prints what came out."""

import argparse
from typing import Any

from datasets import Dataset
from small_models import QUIET, llama, preferences, rewarding_llama, tell, texts, tokenizer, weight_of
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer


def made(kind: str, common: dict[str, Any]) -> Any:
    written = [{"text": text} for text in texts(22)]
    completed = [{"prompt": "red sea", "completion": " " + text} for text in texts(22)]
    packed = {"packing": True, "packing_strategy": "wrapped"}
    rows, trainer, model, config, options = {
        "sft": (written, SFTTrainer, llama, SFTConfig, {"max_length": 16}),
        "completions": (
            *(completed, SFTTrainer, llama, SFTConfig),
            {"max_length": 16, "completion_only_loss": True},
        ),
        "packed": (written, SFTTrainer, llama, SFTConfig, {"max_length": 16, **packed}),
        "dpo": (preferences(), DPOTrainer, llama, DPOConfig, {"max_length": 32}),
        "reward": (preferences(), RewardTrainer, rewarding_llama, RewardConfig, {"max_length": 32}),
    }[kind]
    data = Dataset.from_list(rows)
    return trainer(
        model=model(),
        args=config(**options, **common),
        train_dataset=data,
        eval_dataset=data.select(range(7)),
        processing_class=tokenizer(),
        **({"ref_model": llama()} if kind == "dpo" else {}),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("kind", choices=["sft", "completions", "packed", "dpo", "reward"])
    options = parser.parse_args()
    trainer = made(
        options.kind,
        {
            "output_dir": options.folder,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 1,
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "train_sampling_strategy": "sequential",
            "bf16": False,
            "learning_rate": 1e-3,
            **QUIET,
        },
    )
    trainer.train()
    tell(trainer, weights=weight_of(trainer.model))


if __name__ == "__main__":
    main()
