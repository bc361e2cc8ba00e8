"""Checkpoints that Megatron's own writer has written on two ranks are read whole."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain_megatron import read_megatron_checkpoint, transformers_from_megatron
from megatron_models import config_of, model_of
from optional_modules import skip_without

WRITE = """
import sys

sys.path.insert(0, {tests!r})

from drivetrain_megatron import megatron_from_transformers
from drivetrain_megatron.groups import open_parallel_state
from drivetrain_state import ParallelDims
from megatron_models import model_of
from megatron_on_cpu import megatron_on_cpu
from plain_loop.backends import context


def main():
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    with megatron_on_cpu(), context(parallelism=ParallelDims(tensor=2)) as where:
        open_parallel_state(where)
        model = megatron_from_transformers(model_of(sys.argv[1]))
        strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
        dist_checkpointing.save(model.sharded_state_dict(), sys.argv[2], sharded_strategy=strategy)


if __name__ == "__main__":  # the writer starts a process that imports this file
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
def test_weights_that_megatron_has_written_make_a_model_of_transformers(
    kind: str, run_ranks_script: Callable[..., list[Any]], tmp_path: Path
) -> None:
    skip_without("psutil")  # which Megatron's writer takes for granted
    folder = tmp_path / "written"
    folder.mkdir()
    source = WRITE.format(tests=str(Path(__file__).parents[1]))
    for rank in run_ranks_script(source, kind, str(folder), timeout_seconds=170, fresh=True):
        assert rank.returncode == 0, rank.stderr
    found = transformers_from_megatron(read_megatron_checkpoint(folder), config_of(kind))
    for (name, value), (_, expected) in zip(
        found.named_parameters(), model_of(kind).named_parameters(), strict=True
    ):
        assert torch.equal(value, expected), name


def save(tensors: dict[str, Tensor], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one process saves
        torch.distributed.checkpoint.save({**tensors}, checkpoint_id=folder, no_dist=True)


def test_layers_and_experts_that_are_stacked_get_names_of_their_own(tmp_path: Path) -> None:
    drawn = {
        "embedding.word_embeddings.weight": torch.rand(4, 2),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": torch.rand(2, 3),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": torch.rand(2, 3),
        "decoder.layers.mlp.experts.experts.linear_fc2.weight": torch.rand(2, 2, 3, 4),
        "decoder.layers.0.mlp.linear_fc2.weight": torch.rand(3),
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight": torch.rand(2, 3),
    }
    save(drawn, tmp_path)
    found = read_megatron_checkpoint(tmp_path)
    assert set(found) == {
        "embedding.word_embeddings.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
        *(
            f"decoder.layers.{layer}.{norm}_layernorm.weight"
            for layer in (0, 1)
            for norm in ("input", "pre_mlp")
        ),
        *(
            f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight"
            for layer in (0, 1)
            for expert in (0, 1)
        ),
    }
    last = found["decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight"]
    assert torch.equal(last, drawn["decoder.layers.mlp.experts.experts.linear_fc2.weight"][1, 0])


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    save({"other": torch.ones(2)}, tmp_path)
    with pytest.raises(ValueError, match=r"holds no layers of a GPT model, but \['other'\]"):
        read_megatron_checkpoint(tmp_path)
