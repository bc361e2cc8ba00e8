"""Published runs, as a check from outside: the way in which they trained is among the planner's first.

torchtitan's docs/performance.md tells of Llama 3 on 64 A100 with 80 GB: 8 B at 1 sample a rank, 70 B recomputed;
of Llama 3.1 8 B on 8 H100 with 96 GB, at 2 samples a rank, recomputed selectively; and of 405 B, recomputed, on
128 H100 with 94 GB by shards of 16 x tensor 8, where shards alone did not fit. NVIDIA's guide to Megatron Core tells
of Mixtral 8x7B on 64 H100 with 80 GB by 4 stages and 8 ranks for the experts, whose time is by arithmetic alone here.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from drivetrain_plan import MODES, PlanTable, TrainingJob, find_source, parse_hardware, plan_training

WIDTHS: Mapping[str, tuple[int, int, int, int]] = {  # width, width of the perceptron, blocks, heads
    "8B": (4096, 14336, 32, 32),
    "70B": (8192, 28672, 80, 64),
    "405B": (16384, 53248, 126, 128),
    "8x7B": (4096, 14336, 32, 32),
}
PLANNED = {"pipeline": 1}  # as these runs, and the backends


def plan(
    folder: Path, model: str, hardware: str, batch: int, num_tokens: int, pins: Mapping[str, Any] = PLANNED
) -> PlanTable:
    width, inner, blocks, heads = WIDTHS[model]
    config: dict[str, Any] = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": width,
        "intermediate_size": inner, "num_hidden_layers": blocks, "num_attention_heads": heads,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "use_cache": False,
    }  # fmt: skip
    if model == "8x7B":
        config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 32000}
    (folder / "config.json").write_text(json.dumps(config))
    job = TrainingJob(batch=batch, pins=pins)
    source, rates = find_source(str(folder)), parse_hardware(hardware)
    return plan_training(source, rates, job, MODES["mixed"], num_tokens=num_tokens, exact=0)


@pytest.mark.parametrize(
    ("model", "hardware", "batch", "plan_of_run"),
    [
        ("8B", "8x96GB h100", 16, "FSDP 8, recomputed"),
        ("8B", "8x80GB a100 x 8 hosts 200Gb", 64, "FSDP 64"),
        ("70B", "8x80GB a100 x 8 hosts 200Gb", 64, "FSDP 64, recomputed"),
        ("405B", "8x94GB h100 x 16 hosts 400Gb", 32, "FSDP 16 x tensor 8, sequence, recomputed"),
    ],
)
@pytest.mark.default_cases
def test_the_plan_of_a_published_run_is_among_the_first(
    model: str, hardware: str, batch: int, plan_of_run: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    table = plan(tmp_path, model, hardware, batch, 8192)
    found = [one.choice.name.replace("FSDP grad-op", "FSDP") for one in table.plans]
    assert plan_of_run in found[:5], found[:12]


@pytest.mark.slow
def test_the_division_of_a_published_mixture_of_experts_fits(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pins = {"pipeline": 4, "expert": 8, "tensor": 1, "context": 1}
    table = plan(tmp_path, "8x7B", "8x80GB h100 x 8 hosts 400Gb", 256, 4096, pins)
    assert table.plans[0].choice.name == "pipeline 4 x DDP 2 x FSDP 8 x expert 8, recomputed"
    assert table.plans[0].memory.peak < 0.6 * 80e9
