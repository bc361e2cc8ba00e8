"""A small Llama to plan for, by its configuration."""

import json
from pathlib import Path

from drivetrain_plan.model.source import ConfigSource

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 4096, "use_cache": False,
}  # fmt: skip


def llama_source(folder: Path, **changed: object) -> ConfigSource:
    """Write the configuration into a folder, and return the source that reads it."""
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changed}))
    return ConfigSource(folder)
