"""A program that trains a Llama along one parallel dimension, or none, as Accelerate's guides write each loop.

It prints the losses, the shape of a rank's part of a layer, and what tells of the mesh.
"""

import json
import sys
import warnings
from typing import Any

import torch
from accelerate.utils import (
    DeepSpeedPlugin,
    DeepSpeedSequenceParallelConfig,
    FullyShardedDataParallelPlugin,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from torch.distributed.nn.functional import all_gather
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate import Accelerator, ParallelismConfig

SIZE, LENGTH, WORDS = 2, 10, 32


def options(kind: str) -> dict[str, Any]:
    """The arguments of the Accelerator for one kind of division."""
    if kind == "plugin":
        return {"torch_tp_plugin": TorchTensorParallelPlugin(tp_size=SIZE)}
    if kind == "tensor":
        handler = TorchTensorParallelConfig(enable_async_tp=True)
        return {"parallelism_config": ParallelismConfig(tp_size=SIZE, tp_handler=handler)}
    if kind == "context":
        handler = TorchContextParallelConfig(cp_comm_strategy="allgather")
        return {
            "parallelism_config": ParallelismConfig(cp_size=SIZE, cp_handler=handler),
            "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2),
        }
    if kind.startswith("sequence"):
        handler = DeepSpeedSequenceParallelConfig(
            sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
        )
        groups = 2 if "groups" in kind else 1
        sizes = ParallelismConfig(
            sp_backend="deepspeed", sp_size=SIZE, dp_shard_size=groups, sp_handler=handler
        )
        has_engine = "engine" in kind
        plugin = {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2)} if has_engine else {}
        return {"parallelism_config": sizes, **plugin}
    return {}


def samples() -> list[dict[str, torch.Tensor]]:
    """Eight sequences, each two with equally many words of a prompt, which are no labels."""
    words = torch.randint(WORDS, (8, LENGTH), generator=torch.Generator().manual_seed(0))
    found: list[dict[str, torch.Tensor]] = []
    for index, row in enumerate(words):
        labels = row.clone()
        labels[: 2 * (index // 2)] = -100
        found.append({"input_ids": row, "position_ids": torch.arange(LENGTH), "labels": labels})
    return found


def main() -> None:
    kind, batch_size = sys.argv[1], int(sys.argv[2])
    if kind in ("plugin", "tensor"):
        warnings.filterwarnings("ignore", category=FutureWarning if kind == "plugin" else UserWarning)
    accelerator = Accelerator(cpu=True, **options(kind))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(samples(), batch_size=batch_size)
    )
    losses: list[float] = []
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            if kind == "context":
                labels = batch.pop("labels")
                batch["shift_labels"] = torch.nn.functional.pad(labels, (0, 1), value=-100)[
                    :, 1:
                ].contiguous()
                with accelerator.maybe_context_parallel(
                    buffers=[batch["input_ids"], batch["position_ids"], batch["shift_labels"]],
                    buffer_seq_dims=[1, 1, 1],
                    no_restore_buffers={batch["input_ids"], batch["shift_labels"]},
                ):
                    loss = model(**batch, labels=batch["shift_labels"]).loss
                    accelerator.backward(loss)
            else:
                loss = model(**batch).loss
                # Over gloo, torch's all_gather has no backward in a group of some of the ranks.
                if kind.startswith("sequence") and "groups" not in kind:
                    loss = over_sequence(accelerator, loss, batch["shift_labels"])
                accelerator.backward(loss)
            optimizer.step()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    mesh = accelerator.torch_device_mesh
    found = {
        "losses": losses,
        "axes": None if mesh is None else mesh.mesh_dim_names,
        "is_divided": accelerator.unwrap_model(model).model.layers[0].mlp.up_proj.weight.shape[0] < 32,
    }
    if accelerator.is_main_process:
        print("FOUND", json.dumps(found))
    accelerator.end_training()


def over_sequence(accelerator: Any, loss: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean of the ranks' losses, each of as many words as it has labels."""
    group = accelerator.torch_device_mesh["sp"].get_group()
    counts = all_gather((labels != -100).view(-1).sum(), group=group)
    parts = [part * count for part, count in zip(all_gather(loss, group=group), counts, strict=True) if count]
    return sum(parts[1:], parts[0]) / max(sum(counts), 1)


if __name__ == "__main__":
    main()
