"""A program written for PEFT: an adapter is trained by the Trainer, saved, read back and merged."""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from small_models import QUIET, llama, samples, tell
from transformers import Trainer, TrainingArguments, set_seed


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
        save_steps=2,
        eval_strategy="epoch",
        train_sampling_strategy="sequential",
        learning_rate=1e-2,
        label_names=["labels"],
        **QUIET,
    )
    data = samples()
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:7])
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(options.folder / "adapter"))
    if not trainer.is_world_process_zero():
        return
    ids = torch.stack([sample["input_ids"] for sample in data[:3]])
    merged = PeftModel.from_pretrained(llama(), options.folder / "adapter").merge_and_unload().eval()
    with torch.no_grad():
        tell(
            trainer,
            *("loss", "grad_norm", "eval_loss", "step"),
            trained=float(model.eval()(input_ids=ids).logits.double().abs().sum()),
            merged=float(merged(input_ids=ids).logits.double().abs().sum()),
            files=sorted(path.name for path in (options.folder / "adapter").iterdir()),
        )


if __name__ == "__main__":
    main()
