"""What user code computes in half precision is found at its line; what upcasts itself is not."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drivetrain_precision import (
    HalfPrecisionWarning,
    chunked_cross_entropy,
    cross_entropy,
    find_half_operations,
)
from drivetrain_precision.checks.half_precision import HalfOperation

BF16 = torch.bfloat16
LABELS = torch.tensor([0, 2, -100])
WIDE = torch.linspace(-1, 1, 900).view(3, 300).to(BF16)


def found(
    call: Callable[[Tensor], Any], value: Tensor, model: nn.Module | None = None
) -> Sequence[HalfOperation]:
    with find_half_operations(model, warn=False) as result:
        call(value.clone().requires_grad_())
    return result.operations


LOSSES: dict[str, Callable[[Tensor], Any]] = {
    "cross_entropy": lambda x: F.cross_entropy(x, LABELS),
    "log_softmax": lambda x: x.log_softmax(-1),
    "nll_loss": lambda x: F.nll_loss(x, LABELS),
    "mse_loss": lambda x: F.mse_loss(x, x.detach()),
    "l1_loss": lambda x: F.l1_loss(x, x.detach()),
    "kl_div": lambda x: F.kl_div(x, x.detach().exp(), reduction="batchmean"),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x.detach()),
}


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_loss_is_found_at_its_line(name: str, dtype: torch.dtype) -> None:
    (one,) = found(LOSSES[name], WIDE.to(dtype))
    assert (one.operation, one.kind, one.dtype, one.rounds_result_only) == (name, "loss", dtype, False)
    assert one.file == __file__
    assert name in inspect.getsource(inspect.getmodule(found)).splitlines()[one.line - 1]
    assert not found(LOSSES[name], WIDE.float())


@pytest.mark.parametrize(
    ("call", "operation", "kind", "rounded"),
    [
        (lambda x: F.softmax(x, -1), "softmax", "softmax", True),
        (lambda x: x.exp() / x.exp().sum(-1, keepdim=True), "sum of exponentials", "softmax", False),
        (lambda x: x.logsumexp(-1), "logsumexp", "softmax", False),
        (lambda x: x * x.pow(2).mean(-1, keepdim=True).rsqrt(), "mean of squares", "norm", False),
        (lambda x: x / (x * x).sum(-1, keepdim=True).sqrt(), "sum of squares", "norm", False),
        (lambda x: x.square().mean(-1, keepdim=True), "mean of squares", "norm", False),
        (lambda x: F.layer_norm(x, (300,)), "layer_norm", "norm", True),
        (lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True), "std", "norm", True),
        (lambda x: ((x - 1) ** 2).mean(), "mean of squares", "loss", False),
        (lambda x: (x - 1).abs().mean(), "mean", "loss", True),
        (lambda x: x.cumsum(-1), "cumsum", "sum", False),
        (lambda x: x.half().sum(-1), "sum", "sum", True),
    ],
)
def test_what_loses_is_found(call: Callable[[Tensor], Any], operation: str, kind: str, rounded: bool) -> None:
    (one,) = found(call, WIDE)
    assert (one.operation, one.kind, one.rounds_result_only) == (operation, kind, rounded)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.softmax(x, -1, dtype=torch.float32).to(x.dtype),
        lambda x: F.rms_norm(x, (300,)),
        lambda x: (x * x.float().pow(2).mean(-1, keepdim=True).rsqrt()).to(x.dtype),
        lambda x: cross_entropy(x, LABELS).backward(),
        lambda x: chunked_cross_entropy(x, torch.ones(9, 300, dtype=BF16), LABELS).backward(),
        lambda x: F.cross_entropy(x.float(), LABELS).backward(),
        lambda x: F.gelu(x) * torch.exp(x).sigmoid() + x.mean(-1, keepdim=True),
        lambda x: x[:, :8].cumsum(-1),
        lambda x: (x.relu() ** 2) @ torch.ones(300, 2, dtype=BF16),
    ],
)
def test_what_upcasts_itself_or_loses_nothing_is_not_found(call: Callable[[Tensor], Any]) -> None:
    assert not found(call, WIDE)


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.pow(2).mean(-1, keepdim=True).rsqrt()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), Norm()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_modules_are_told_by_their_names_or_their_classes() -> None:
    model = Model().bfloat16()
    value = torch.ones(3, 4, dtype=BF16)
    assert [one.module for one in found(model, value, model)] == ["blocks.0.1", "blocks.1.1"]
    (one,) = found(model, value)
    assert (one.module, one.num_calls) == ("Norm", 2)


def test_a_whole_step_reports_what_the_user_wrote_and_nothing_that_torch_does() -> None:
    model = Model().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step(value: Tensor) -> None:
        checkpoint(model, value, use_reentrant=False).float().square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    operations = found(step, torch.ones(3, 4, dtype=BF16), model)
    assert {(one.operation, one.module) for one in operations} == {
        ("mean of squares", "blocks.0.1"),
        ("mean of squares", "blocks.1.1"),
    }


def test_under_autocast_only_what_it_does_not_repair_is_found() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Softmax(-1))
    with torch.autocast("cpu", BF16):
        assert not found(lambda x: F.cross_entropy(model(x), LABELS), torch.ones(3, 4))
        (one,) = found(lambda x: (F.linear(x, x) ** 2).mean(-1), torch.ones(3, 4))
    assert one.operation == "mean of squares"  # written by hand: the CPU's autocast has no rule for it


def test_a_compiled_model_is_checked_without_the_compiler() -> None:
    model = torch.compile(Model().bfloat16(), backend="aot_eager")
    model(torch.ones(3, 4, dtype=BF16))
    assert [one.module for one in found(model, torch.ones(3, 4, dtype=BF16), model)] == [
        "blocks.0.1",
        "blocks.1.1",
    ]


def test_a_warning_lists_the_lines_with_what_to_write() -> None:
    with pytest.warns(
        HalfPrecisionWarning, match=r"test_half_precision.py:\d+: cross_entropy.*bfloat16.*float\(\)"
    ):
        with find_half_operations():
            F.cross_entropy(WIDE, LABELS)


def test_nothing_found_gives_no_warning() -> None:
    with find_half_operations() as result:
        F.cross_entropy(WIDE.float(), LABELS)
    assert result.operations == ()
    assert "no softmax" in str(result)


def test_code_of_libraries_is_reported_for_what_it_computes_in_half_and_on_request_for_rounded_results() -> (
    None
):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model, words = transformers.BertForMaskedLM(config).bfloat16(), torch.ones(1, 4, dtype=torch.long)
    with find_half_operations(model, warn=False) as result:
        model(input_ids=words, labels=words)
    (one,) = result.operations  # BERT's loss takes the logits as they are
    assert (one.operation, one.kind) == ("cross_entropy", "loss")
    assert "modeling_bert" in one.file
    with find_half_operations(model, libraries=True, warn=False) as result:
        model(input_ids=words, labels=words)
    assert {"cross_entropy", "layer_norm"} <= {one.operation for one in result.operations}


TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
}
MODELS = [
    ("Llama", {}),
    ("Gemma2", {}),
    *(
        pytest.param(name, more, marks=pytest.mark.slow)
        for name, more in [
            *(("Mistral", {}), ("Qwen2", {}), ("Qwen3", {}), ("Olmo2", {}), ("Phi3", {}), ("GPTNeoX", {})),
            ("Mixtral", {"num_local_experts": 2}),
            ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2}),
            ("Mamba", {"state_size": 4}),
            ("GPT2", {"n_embd": 16, "n_layer": 1, "n_head": 2}),
            ("OPT", {"ffn_dim": 16, "word_embed_proj_dim": 16}),
        ]
    ),
]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("name", "more"), MODELS)
@pytest.mark.parametrize("under_autocast", [False, True])
def test_models_that_upcast_themselves_raise_no_alarm(
    name: str, more: dict[str, int], attention: str, under_autocast: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    if (name, attention) in (("Gemma2", "sdpa"), ("Mamba", "sdpa")):
        pytest.skip("the model has no such attention")
    config = getattr(transformers, f"{name}Config")(**(TINY | more))
    config._attn_implementation = attention
    classes = [f"{name}ForCausalLM", f"{name}LMHeadModel"]
    model = next(getattr(transformers, each) for each in classes if hasattr(transformers, each))(config)
    if not under_autocast:
        model = model.bfloat16()
    words = torch.arange(2, 18).view(2, 8)
    with (
        find_half_operations(model, warn=False) as result,
        torch.autocast("cpu", BF16, enabled=under_autocast),
    ):
        model(input_ids=words, labels=words).loss.backward()
    assert str(result).startswith("no softmax"), str(result)
