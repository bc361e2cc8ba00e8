"""A program written for PEFT: an adapter is trained by the Trainer, saved, read back and merged."""

import argparse
import json
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from small_models import llama
from transformers import Trainer, TrainingArguments, set_seed

NUM_SAMPLES, LENGTH, WORDS = 22, 8, 32


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    words = [torch.randint(3, WORDS, (LENGTH,), generator=generator) for _ in range(NUM_SAMPLES)]
    return [{"input_ids": text, "labels": text} for text in words]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume")
    parser.add_argument("--dropout", type=float, default=0.1)
    options = parser.parse_args()
    set_seed(0)
    config = LoraConfig(
        r=4, lora_dropout=options.dropout, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(llama(), config)
    arguments = TrainingArguments(
        output_dir=str(options.folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        logging_steps=1,
        save_steps=2,
        eval_strategy="epoch",
        train_sampling_strategy="sequential",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        learning_rate=1e-2,
        label_names=["labels"],
    )
    data = samples()
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:7])
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.folder / "adapter"))
    if not trainer.is_world_process_zero():
        return
    ids = torch.stack([sample["input_ids"] for sample in data[:3]])
    merged = PeftModel.from_pretrained(llama(), options.folder / "adapter").merge_and_unload().eval()
    kept = ("loss", "grad_norm", "eval_loss", "step")
    with torch.no_grad():
        found = {
            "history": [
                {key: entry[key] for key in kept if key in entry} for entry in trainer.state.log_history
            ],
            "trained": float(model.eval()(input_ids=ids).logits.double().abs().sum()),
            "merged": float(merged(input_ids=ids).logits.double().abs().sum()),
            "files": sorted(path.name for path in (options.folder / "adapter").iterdir()),
        }
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
