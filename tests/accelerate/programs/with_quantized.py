"""A program that has transformers load quantised weights, computes with them, and trains an adapter on them."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from small_models import QUIET, llama
from torchao.quantization import Int8WeightOnlyConfig
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    TorchAoConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)

CONFIGS: dict[str, Any] = {
    "nf4": lambda: BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=True,
    ),
    "fp4": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
    "int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "torchao": lambda: TorchAoConfig(Int8WeightOnlyConfig()),
}


def fine_tuned(model: Any, folder: Path, ids: torch.Tensor) -> list[float]:
    model = prepare_model_for_kbit_training(model)
    set_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        save_strategy="no",
        train_sampling_strategy="sequential",
        learning_rate=1e-2,
        label_names=["labels"],
        **QUIET,
    )
    data = [{"input_ids": row, "labels": row} for row in ids.repeat(4, 1)]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("kinds", nargs="+", choices=sorted(CONFIGS))
    parser.add_argument("--device-map")
    parser.add_argument("--train", action="store_true")
    options = parser.parse_args()
    llama(64).save_pretrained(options.folder / "base")
    ids = torch.arange(3, 27).reshape(3, 8)
    found: dict[str, Any] = {}
    for kind in options.kinds:
        more = {"device_map": options.device_map} if options.device_map else {}
        model = AutoModelForCausalLM.from_pretrained(
            options.folder / "base", quantization_config=CONFIGS[kind](), **more
        ).eval()
        with torch.no_grad():
            logits = model(input_ids=ids).logits.float()
            words = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False
            )
        found[kind] = {
            "logits": logits.double().abs().sum().item(),
            "words": words.tolist(),
            "layer": type(model.model.layers[0].self_attn.q_proj).__name__,
            "weight": type(model.model.layers[0].self_attn.q_proj.weight).__name__,
            "map": {
                name: str(device) for name, device in (getattr(model, "hf_device_map", None) or {}).items()
            },
            "bytes": model.get_memory_footprint(),
        }
        if options.train:
            found[kind]["losses"] = fine_tuned(model, options.folder / kind, ids)
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
