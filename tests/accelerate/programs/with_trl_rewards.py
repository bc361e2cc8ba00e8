"""A program written for TRL's trainers that sample completions and learn from rewards, and from labels."""

import argparse
import os
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from small_models import QUIET, llama, preferences, rewarding_llama, tell, texts, tokenizer, weight_of
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

SAMPLED = {
    "max_completion_length": 8,
    "shuffle_dataset": False,
    "steps_per_generation": 2,
    "num_iterations": 2,
}


def colourful(completions: list[str], **others: Any) -> list[float]:
    """Reward colours and length."""
    return [
        sum(each.count(word) for word in ("red", "green", "blue")) + len(each) / 50 for each in completions
    ]


def sampling(kind: str, common: dict[str, Any]) -> Any:
    """Return a trainer that samples; each rank saves the weights that TRL reads anew as its reference."""
    place = os.path.join(common["output_dir"], "model" + os.environ.get("RANK", "0"))
    llama().save_pretrained(place)
    given: dict[str, Any] = {
        "model": AutoModelForCausalLM.from_pretrained(place),
        "reward_funcs": [colourful],
        "train_dataset": Dataset.from_list([{"prompt": text} for text in texts(16)]),
        "processing_class": tokenizer(),
    }
    if kind == "rloo":
        return RLOOTrainer(args=RLOOConfig(num_generations=2, beta=0.05, **SAMPLED, **common), **given)
    if kind == "grpo-adapter":
        given["peft_config"] = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
        given["reward_funcs"] = [colourful, rewarding_llama()]
        given["reward_processing_classes"] = [None, tokenizer()]
        return GRPOTrainer(args=GRPOConfig(num_generations=2, beta=0.1, **SAMPLED, **common), **given)
    return GRPOTrainer(args=GRPOConfig(num_generations=4, **SAMPLED, **common), **given)


def labelled(kind: str, common: dict[str, Any]) -> Any:
    common = common | {"max_length": 32, "train_sampling_strategy": "sequential", "eval_strategy": "epoch"}
    rows = preferences()
    if kind == "kto":
        rows = [
            {"prompt": "red sea", "completion": row["chosen"], "label": place % 3 > 0}
            for place, row in enumerate(rows)
        ]
    data = Dataset.from_list(rows)
    given: dict[str, Any] = {
        "model": llama(),
        "train_dataset": data,
        "eval_dataset": data.select(range(7)),
        "processing_class": tokenizer(),
    }
    if kind == "kto":
        return KTOTrainer(ref_model=llama(), args=KTOConfig(**common), **given)
    if kind == "orpo":
        return ORPOTrainer(args=ORPOConfig(**common), **given)
    return CPOTrainer(args=CPOConfig(**common), **given)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("kind", choices=["grpo", "grpo-adapter", "rloo", "kto", "orpo", "cpo"])
    options = parser.parse_args()
    common = {
        "output_dir": options.folder,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "save_strategy": "no",
        "bf16": options.kind == "grpo-adapter",
        "learning_rate": 1e-2,
        **QUIET,
    }
    make = sampling if options.kind in ("grpo", "grpo-adapter", "rloo") else labelled
    trainer = make(options.kind, common)
    trainer.train()
    tell(trainer, weights=weight_of(trainer.model))


if __name__ == "__main__":
    main()
