"""Fine-tune a language model with LoRA, shard it by FSDP, and export the adapter for PEFT.

The model has random weights and the tokens are made, so that nothing is downloaded. For your own, replace
`base_model` by `AutoModelForCausalLM.from_pretrained(...)`, and `made_tokens` by your tokenised text.

python examples/lora.py
drivetrain launch --num-processes 2 --backend fsdp --mixed-precision bf16 examples/lora.py
drivetrain launch --num-processes 2 --backend fsdp --mixed-precision bf16 examples/lora.py --resume

Checkpoints and the export hold the adapter alone; a run that resumes builds the same base model first.
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from drivetrain import Accelerator

VOCABULARY = 64


def base_model(width: int) -> PreTrainedModel:
    """A Llama of two layers, with the same random weights at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config)


def made_tokens(num_sequences: int, length: int = 16) -> Tensor:
    """Sequences of shape (sequences, length) that count up from a random token."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(VOCABULARY, (num_sequences, 1), generator=generator)
    return (first + torch.arange(length)) % VOCABULARY


def main() -> None:
    """Train the adapter and export it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=4096, help="sequences to train on")
    parser.add_argument("--width", type=int, default=64, help="size of the hidden state, a multiple of 8")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapter's matrices")
    parser.add_argument("--save-every", type=int, default=100, help="optimizer steps between checkpoints")
    parser.add_argument("--project-dir", type=Path, default=Path("runs/lora"), help="where all is written")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    args = parser.parse_args()

    sections = {"checkpoint": {"save_every_steps": args.save_every}}
    with Accelerator(seed=0, project_dir=args.project_dir, sections=sections) as accelerator:
        adapter = LoraConfig(r=args.rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(base_model(args.width), adapter)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
        loader = DataLoader(made_tokens(args.sequences), batch_size=16, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        step = accelerator.load_state() if args.resume else 0

        for tokens in loader:  # after load_state: the rest of the epoch
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            if step % 20 == 1 or step == len(loader):
                mean = accelerator.reduce(loss.detach(), "mean").item()
                accelerator.print(f"step {step}: loss {mean:.3f}")
            accelerator.save_if_due(trained_only=True)

        folder = args.project_dir / "adapter"
        accelerator.save_model(model, folder, trained_only=True)
        accelerator.print(f"PeftModel.from_pretrained(base_model, {str(folder)!r}) reads the adapter")


if __name__ == "__main__":
    main()
