"""A program for transformers' Trainer: the CPU seconds of a step of a small Llama, after the first ones."""

import argparse
import json
import tempfile
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

WARMUP, WORDS, LENGTH, BATCH_SIZE = 20, 256, 32, 4


class StepTimes(TrainerCallback):
    """The times at which steps ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Take the time."""
        self.ends.append(time.process_time())


def main() -> None:
    """Train for some steps, and print the CPU seconds of one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    texts = torch.randint(0, WORDS, ((WARMUP + steps) * BATCH_SIZE, LENGTH))
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH_SIZE,
            max_steps=WARMUP + steps,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        Trainer(
            model=LlamaForCausalLM(config),
            args=arguments,
            train_dataset=[{"input_ids": text, "labels": text} for text in texts],
            callbacks=[times],
        ).train()
    print("FOUND", json.dumps({"step": (times.ends[-1] - times.ends[WARMUP - 1]) / steps}))


if __name__ == "__main__":
    main()
