"""A program written for transformers' Trainer: it trains, evaluates and predicts, and prints what came out."""

import argparse
import json
import os
import signal
from typing import Any

import torch
from small_models import QUIET, tell
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    set_seed,
)

LENGTH, WORDS = 16, 64


def samples(number: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    words = [torch.randint(0, WORDS, (LENGTH,), generator=generator) for _ in range(number)]
    # Labels of several lengths: the loss is normalised by tokens.
    labels = [text.clone().index_fill_(0, torch.arange(place % 7), -100) for place, text in enumerate(words)]
    return [{"input_ids": text, "labels": label} for text, label in zip(words, labels, strict=True)]


class Death(TrainerCallback):
    """An end without a word, of every process, after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--resume")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--samples", type=int, default=46, help="by default the last batch is not full")
    parser.add_argument("--fsdp", type=json.loads, help="the options of fsdp_config")
    parser.add_argument("--deepspeed", type=json.loads, help="a configuration of DeepSpeed")
    parser.add_argument("--lora", action="store_true", help="train adapters of PEFT")
    parser.add_argument("--times", type=int, default=1, help="how often the Trainer trains")
    parser.add_argument("--die-after", type=int, default=0, help="the step after which the program is killed")
    options = parser.parse_args()
    set_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
    )
    data = samples(options.samples)
    arguments = TrainingArguments(
        output_dir=options.folder,
        per_device_train_batch_size=4,
        num_train_epochs=2,
        gradient_accumulation_steps=options.accumulate,
        save_steps=4,
        eval_strategy="epoch",
        train_sampling_strategy="sequential",
        bf16=options.bf16,
        learning_rate=1e-3,
        fsdp=options.fsdp is not None,
        fsdp_config=options.fsdp,
        deepspeed=options.deepspeed,
        **QUIET,
    )
    model: Any = LlamaForCausalLM(config)
    if options.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data[:10],
        callbacks=[Death(options.die_after)],
    )
    for _ in range(options.times):
        trainer.train(resume_from_checkpoint=options.resume)
    predicted = trainer.predict(data[:10])
    tell(
        trainer,
        *("loss", "grad_norm", "learning_rate", "eval_loss", "step"),
        predictions=float(torch.as_tensor(predicted.predictions).double().abs().sum()),
        rows=len(predicted.predictions),
        test_loss=predicted.metrics["test_loss"],
    )


if __name__ == "__main__":
    main()
