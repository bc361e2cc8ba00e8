"""A program that runs a model divided into stages: it prints what each rank has of each output, and what one has."""

import json
import sys

import torch
from accelerate.inference import prepare_pippy
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate import PartialState


def main() -> None:
    gathers, samples = sys.argv[1] == "gathered", [int(number) for number in sys.argv[2].split(",")]
    state = PartialState(cpu=True)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    batches = [torch.randint(64, (number, 5)) for number in samples]
    with torch.no_grad():
        expected = [model(batch).logits.sum(-1).tolist() for batch in batches]
        whole = sum(parameter.numel() for parameter in model.parameters())
        example = (torch.randint(64, (2, 5)),)
        divided = prepare_pippy(
            model, split_points=["model.layers.2"], example_args=example, gather_output=gathers
        )
        # The first rank's inputs count.
        outputs = [divided(batch if state.is_main_process else batch + 1 - batch) for batch in batches]
    found = [None if one is None else one["logits"].sum(-1).tolist() for one in outputs]
    own = sum(parameter.numel() for parameter in model.parameters())
    every: list[object] = [None] * state.num_processes
    if state.num_processes > 1:
        torch.distributed.all_gather_object(every, [found, own])
    else:
        every = [[found, own]]
    if state.is_main_process:
        print("FOUND", json.dumps([expected, whole, every]))
    if state.num_processes > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
