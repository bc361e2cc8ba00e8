"""Small models, a tokenizer and texts, made on the spot, for the programs that run libraries."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

WORDS = ["red", "green", "blue", "cold", "warm", "sea", "sky", "sand", "wind", "rain", "runs", "falls"]


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
