"""Small models and data, made on the spot, for the programs that run libraries, and how these tell what came out."""

import json
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    set_seed,
)

WORDS = ["red", "green", "blue", "cold", "warm", "sea", "sky", "sand", "wind", "rain", "runs", "falls"]

# What all trainers are told.
QUIET: dict[str, Any] = {"logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True}


def tell(trainer: Trainer, *kept: str, **found: Any) -> None:
    """Print the `history` of a run, and what else was found, from the main process."""
    if trainer.is_world_process_zero():
        print("FOUND", json.dumps({"history": history(trainer, *kept), **found}))


def history(trainer: Trainer, *kept: str) -> list[dict[str, Any]]:
    """Return the log of a run with these keys; without any, all but those that are times."""
    timed = ("runtime", "per_second", "flos", "_time")
    return [
        {key: value for key, value in entry.items() if (key in kept if kept else not key.endswith(timed))}
        for entry in trainer.state.log_history
    ]


def weight_of(model: nn.Module) -> float:
    return float(sum(each.detach().double().abs().sum() for each in model.parameters()))


def samples(number: int = 22) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    words = [torch.randint(3, 32, (8,), generator=generator) for _ in range(number)]
    return [{"input_ids": text, "labels": text} for text in words]


def preferences(number: int = 22) -> list[dict[str, Any]]:
    pairs = zip(texts(number), texts(number)[::-1], strict=True)
    return [{"prompt": "red sea", "chosen": " " + good, "rejected": " " + bad} for good, bad in pairs]


def texts(number: int) -> list[str]:
    """Return texts of several lengths."""
    return [
        " ".join(WORDS[(place * 5 + word) % 12] for word in range(4 + place % 5)) for place in range(number)
    ]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words."""
    special = ["<pad>", "<s>", "</s>", "<unk>", "[CLS]", "[SEP]"]
    words = {word: place for place, word in enumerate([*special, *WORDS])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=32,
    )


def llama(hidden_size: int = 32) -> LlamaForCausalLM:
    """Return a model of a few thousand parameters, equal on every call."""
    set_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def rewarding_llama() -> LlamaForSequenceClassification:
    """Return a model that gives a number for a text."""
    config = llama().config
    config.num_labels = 1
    set_seed(0)
    return LlamaForSequenceClassification(config)
