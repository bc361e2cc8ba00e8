"""Run a model that is larger than the memory given to it: what does not fit stays on the disk.

Without a folder, a small Llama with random weights is saved first, so that nothing is downloaded.

python examples/disk_inference.py
python examples/disk_inference.py MODEL_FOLDER --memory cpu=60GB --memory 0=20GB

MODEL_FOLDER is what `save_pretrained` wrote, or `huggingface_hub.snapshot_download`. One process spreads the model
over all of its devices; for more throughput, start one process for each part of the prompts. There is nothing to
resume: the weights stay in the files of MODEL_FOLDER, and a second start reads them there.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from drivetrain_dispatch import load_pretrained


def save_small_model(folder: Path) -> None:
    """Save a Llama of 8 layers and 6 MB, unless it is there."""
    if (folder / "config.json").exists():
        return
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def parse_memory(given: str) -> tuple[int | str, str]:
    """Read "cpu=60GB" or "0=20GB": a device, and the most that it may hold."""
    device, _, size = given.partition("=")
    return (int(device) if device.isdigit() else device), size


def main() -> None:
    """Load the model within the memory, and generate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", help="folder of the model; by default a small one")
    parser.add_argument(
        "--memory",
        type=parse_memory,
        action="append",
        help="what a device may hold, as DEVICE=SIZE; may be repeated; by default cpu=2MB",
    )
    parser.add_argument("--offload-folder", type=Path, default=Path("runs/disk_inference/offload"))
    parser.add_argument("--new-tokens", type=int, default=8, help="tokens to generate")
    args = parser.parse_args()
    folder = args.model or Path("runs/disk_inference/model")
    if args.model is None:
        save_small_model(folder)

    model = load_pretrained(
        AutoModelForCausalLM,
        folder,
        device_map="auto",
        max_memory=dict(args.memory or [("cpu", "2MB")]),
        offload_folder=args.offload_folder,  # for weights whose form differs between file and model
    )
    places = list(model.hf_device_map.values())
    for place in dict.fromkeys(places):
        print(f"{places.count(place)} parts of the model on {place}")
    prompt = torch.tensor([[3, 5, 8, 13]])  # in yours, what the tokenizer returns
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=args.new_tokens, do_sample=False
    )
    print("tokens", *tokens[0].tolist())


if __name__ == "__main__":
    main()
