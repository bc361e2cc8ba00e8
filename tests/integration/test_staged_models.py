"""Models in stages train as whole ones under every strategy and schedule, save and load, or are refused."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain import Accelerator
from drivetrain_backends import AccumulationError
from drivetrain_state import ParallelDims

WIDTH, STEPS = 8, 12


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Model(nn.Module):
    """Eight blocks between an embedding and a head of the same weight; some are frozen."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(8))
        self.head = nn.Linear(WIDTH, 9)
        self.head.weight = self.words.weight
        self.blocks[0].requires_grad_(False)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x)}


def loss_of(model: nn.Module, tokens: Tensor, *, counted: bool) -> Any:
    logits, targets = model(tokens)["logits"].flatten(0, 1), tokens.flatten()
    if counted:
        is_counted = targets > 2
        return F.cross_entropy(logits, targets, reduction="none")[is_counted].sum(), is_counted.sum()
    return F.cross_entropy(logits, targets)


def build(dropout: float = 0.0) -> Model:
    torch.manual_seed(0)
    return Model(dropout=dropout).double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    first, rest = trained[:3], trained[3:]
    return torch.optim.AdamW([{"params": rest}, {"params": first, "lr": 2e-3}], lr=1e-2)


def tokens_of(step: int, num_readers: int) -> Tensor:
    """Return the tokens of a step: of most 7 for each reader, of any length."""
    rows, length = (7, 7, 3, 1)[step % 4], (6, 4)[step // 2 % 2]
    return torch.randint(9, (rows * num_readers, length), generator=torch.Generator().manual_seed(step))


def train_plainly(
    counted: bool, accumulation: int, num_readers: int
) -> tuple[list[float], dict[str, Tensor]]:
    model = build()
    optimizer, norms = optimizer_of(model), list[float]()
    for start in range(0, STEPS, accumulation):
        window = [tokens_of(step, num_readers)[r::num_readers] for step in range(start, start + accumulation)
                  for r in range(num_readers)]  # fmt: skip
        total = sum(int((tokens > 2).sum()) for tokens in window)
        for tokens in window:
            loss = loss_of(model, tokens, counted=counted)
            (loss[0] / total if counted else loss / len(window)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


def check(sizes: dict[str, Any], backend: str, folder: str, options: dict[str, Any]) -> None:
    """Train in each way, save half way, go on from there, and evaluate."""
    for counted, accumulation in ((False, 1), (True, 2)):
        with Accelerator(
            cpu=True,
            backend=None if backend == "usual" else backend,
            parallelism=ParallelDims(**sizes),
            gradient_accumulation_steps=accumulation,
            project_dir=f"{folder}/{accumulation}",
            **options,
        ) as accelerator:
            model = build()
            model, _ = accelerator.prepare(model, optimizer_of(model))
            reads, norms = accelerator.context.ranks("reads"), list[float]()
            for step in range(STEPS):
                if step == STEPS // 2:
                    accelerator.save_state()
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.add_(1)
                    accelerator.load_state()
                tokens = tokens_of(step, reads.size)[reads.index :: reads.size]
                found = accelerator.train_step(tokens, loss=partial(loss_of, counted=counted), max_norm=0.05)
                norms += [found.grad_norm.item()] if found.grad_norm is not None else []
            expected, weights = train_plainly(counted, accumulation, reads.size)
            assert norms == pytest.approx(expected, abs=1e-9)
            for name, value in accelerator.get_state_dict(model, everywhere=True).items():
                torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-8)
            whole = build().eval()
            whole.load_state_dict(weights)
            with torch.no_grad():
                logits = model.eval()(tokens)["logits"]
                torch.testing.assert_close(logits, whole(tokens)["logits"], rtol=0, atol=1e-8)
            with (
                accelerator.accumulate(model),
                pytest.raises(AccumulationError, match=r"accelerator\.train_step"),
            ):
                accelerator.backward(logits.sum())


MESHES: dict[str, tuple[dict[str, Any], str, int]] = {
    "pipeline 2": ({"pipeline": 2}, "usual", 2),
    "pipeline 4": ({"pipeline": 4}, "usual", 4),
    "pipeline 2 x data 2": ({"pipeline": 2, "data": 2}, "ddp", 4),
    "pipeline 2 x shard 2": ({"pipeline": 2, "shard": 2}, "fsdp", 4),
    "pipeline 2 x replicas": ({"pipeline": 2, "data": 2}, "fsdp", 4),
    "pipeline 2 x tensor 2": (
        {"pipeline": 2, "tensor": 2, "tensor_styles": {"*.up": "column", "*.down": "row"}}, "usual", 4,
    ),
}  # fmt: skip
SPLIT = {"interleaved_zero_bubble", "zbv", "dual_pipe_v"}
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", *sorted(SPLIT))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.default_cases("pipeline 2-1f1b")
def test_stages_train_as_the_whole_model(run_ranks, tmp_path: Path, mesh: str, schedule: str) -> None:
    sizes, backend, num_ranks = MESHES[mesh]
    if num_ranks == 4 and sizes["pipeline"] == 4 and schedule not in ("gpipe", "1f1b"):
        sizes = {**sizes, "pipeline_micro_batches": 4}
    sizes = {**sizes, "pipeline_schedule": schedule}
    if backend == "fsdp" and schedule in SPLIT:
        with pytest.raises(BaseException, match="FSDP reduces gradients at the end of whole backwards"):
            run_ranks(check, sizes, backend, str(tmp_path), {}, num_processes=num_ranks, timeout_seconds=60)
        return
    run_ranks(check, sizes, backend, str(tmp_path), {}, num_processes=num_ranks, timeout_seconds=170)


class Normed(Model):
    """A model whose statistics its first and its last module keep."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(9, affine=False)
        self.words, stem = nn.Sequential(self.words, nn.Flatten(0, 1)), self.first
        del self.first
        self.words.append(stem)
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        logits = super().forward(tokens)["logits"]
        return {"logits": self.last(logits).unflatten(0, tokens.shape)}


def statistics(schedule: str | None) -> dict[str, Tensor]:
    """The statistics after a step on two micro-batches, whose means are their own; whole for no schedule."""
    sizes = None if schedule is None else ParallelDims(
        pipeline=2, pipeline_schedule=schedule, pipeline_micro_batches=2
    )  # fmt: skip
    with Accelerator(
        cpu=True, parallelism=sizes, gradient_accumulation_steps=1 if sizes else 2
    ) as accelerator:
        torch.manual_seed(0)
        model: Any = Normed().double()
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        tokens = torch.randint(9, (6, 4), generator=torch.Generator().manual_seed(0))
        for part in (tokens,) if sizes else tokens.split(3):
            accelerator.train_step(part, loss=partial(loss_of, counted=False))
        state = accelerator.get_state_dict(model, everywhere=True)
        return {name: value for name, value in state.items() if "running" in name or "tracked" in name}


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved_1f1b"])
@pytest.mark.default_cases("zbv")
def test_statistics_are_those_of_the_stage_that_computes_them(run_ranks, schedule: str) -> None:
    (expected,) = run_ranks(statistics, None, num_processes=1)
    assert len(expected) == 6
    for found in run_ranks(statistics, schedule, num_processes=2):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def rows_of(reader: int, step: int) -> Tensor:
    """Return the samples of a reader: the second one has fewer, and than micro-batches, too."""
    drawn = torch.randint(9, (5, 4), generator=torch.Generator().manual_seed(step))
    return drawn[:3] if reader == 0 else drawn[3:]


def trained_unevenly(is_whole: bool) -> list[float]:
    sizes = None if is_whole else ParallelDims(pipeline=2, shard=2)
    with Accelerator(cpu=True, backend="single" if is_whole else "fsdp", parallelism=sizes) as accelerator:
        model: Any = build()
        model, _ = accelerator.prepare(model, optimizer_of(model))
        readers = range(2) if is_whole else [accelerator.context.ranks("reads").index]
        norms: list[float] = []
        for step in range(3):
            tokens = torch.cat([rows_of(reader, step) for reader in readers])
            found = accelerator.train_step(tokens, loss=partial(loss_of, counted=True), max_norm=0.05)
            assert found.grad_norm is not None
            norms.append(found.grad_norm.item())
        return norms


@pytest.mark.slow
def test_shards_read_other_numbers_of_samples(run_ranks) -> None:
    (expected,) = run_ranks(trained_unevenly, True, num_processes=1)
    for found in run_ranks(trained_unevenly, False, num_processes=4):
        assert found == pytest.approx(expected, rel=1e-9)


def trained_frozen(is_whole: bool) -> list[float]:
    """The norms of a model whose embedding and first two blocks are frozen: a stage has no backward."""
    sizes = None if is_whole else ParallelDims(pipeline=2, pipeline_schedule="interleaved_1f1b")
    with Accelerator(cpu=True, backend="single" if is_whole else "fsdp", parallelism=sizes) as accelerator:
        model: Any = build()
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        for part in (model.words, *model.blocks[:2]):
            part.requires_grad_(False)
        model, _ = accelerator.prepare(model, optimizer_of(model))
        norms: list[float] = []
        for step in range(3):
            found = accelerator.train_step(
                tokens_of(4 * step, 1), loss=partial(loss_of, counted=False), max_norm=0.05
            )
            assert found.grad_norm is not None
            norms.append(found.grad_norm.item())
        return norms


@pytest.mark.slow
def test_a_frozen_stage_of_two_leaves_the_other_to_reduce(run_ranks) -> None:
    (expected,) = run_ranks(trained_frozen, True, num_processes=1)
    for found in run_ranks(trained_frozen, False, num_processes=2):
        assert found == pytest.approx(expected, rel=1e-9)


def recomputed(kind: str) -> list[Tensor]:
    """The weights after some steps with dropout, with or without recomputation."""
    with Accelerator(
        cpu=True, backend="fsdp", parallelism=ParallelDims(pipeline=2), seed=0,
        sections={"fsdp": {"strategy": "no_shard"}, "model": {"activation_checkpointing": kind}},
    ) as accelerator:  # fmt: skip
        model = build(0.5)
        model, _ = accelerator.prepare(model, optimizer_of(model))
        for step in range(3):
            accelerator.train_step(tokens_of(step, 1), loss=partial(loss_of, counted=False))
        return list(accelerator.get_state_dict(model, everywhere=True).values())


@pytest.mark.slow
def test_recomputed_blocks_drop_what_they_dropped(run_ranks) -> None:
    plain, *_ = run_ranks(recomputed, "none", num_processes=2)
    again, *_ = run_ranks(recomputed, "full", num_processes=2)
    torch.testing.assert_close(plain, again, rtol=0, atol=1e-12)


def norms_of(kind: str, is_whole: bool) -> list[float]:
    """The norms of the gradients of some steps of a small decoder, whole or in stages."""
    import transformers

    is_routed, sizes, options = kind == "experts", dict[str, Any](pipeline=2), dict[str, Any]()
    backend = "usual"
    if is_routed:
        sizes, backend = {"pipeline": 2, "shard": 2, "expert": 2}, "fsdp"
    precision, _, schedule = kind.partition(", ")
    if precision in ("bf16", "fp16", "fp8"):
        options["mixed_precision"] = precision
    if schedule:
        sizes["pipeline_schedule"] = schedule
    name = "Mixtral" if is_routed else "Llama"
    config = getattr(transformers, f"{name}Config")(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = getattr(transformers, f"{name}ForCausalLM")(config)
    if kind == "adapters":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    if is_whole:
        sizes, backend = {}, "usual"
    with Accelerator(
        cpu=True, backend=None if backend == "usual" else backend,
        parallelism=ParallelDims(**sizes) if sizes else None, **options,
    ) as accelerator:  # fmt: skip
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        compiled: Any = torch.compile(model, backend="aot_eager") if kind == "compiled" else model
        accelerator.prepare(compiled, optimizer)
        reads, norms = accelerator.context.ranks("reads"), list[float]()
        for step in range(3):
            drawn = torch.randint(32, (8, 12), generator=torch.Generator().manual_seed(step))
            found = accelerator.train_step(
                drawn[reads.index :: reads.size],
                loss=lambda model, tokens: model(input_ids=tokens, labels=tokens).loss,
                max_norm=1.0,
            )
            assert found.grad_norm is not None
            norms.append(found.grad_norm.item())
    return norms


@pytest.mark.parametrize(
    ("kind", "num_ranks", "tolerance"),
    [
        ("bf16", 2, 1e-3),
        ("fp16", 2, 1e-3),
        ("fp16, zbv", 2, 1e-3),
        ("fp8", 2, 2e-2),  # whose scales are of a micro-batch
        ("adapters", 2, 1e-5),
        ("experts", 4, 1e-5),
    ],
)
@pytest.mark.slow
def test_stages_compose_with_precisions_adapters_and_experts(
    run_ranks, kind: str, num_ranks: int, tolerance: float
) -> None:
    if kind == "adapters":
        pytest.importorskip("peft")
    (expected,) = run_ranks(norms_of, kind, True, num_processes=1)
    for found in run_ranks(norms_of, kind, False, num_processes=num_ranks, timeout_seconds=170):
        assert found == pytest.approx(expected, rel=tolerance)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_a_compiled_model_trains_in_stages(run_ranks) -> None:
    (expected,) = run_ranks(norms_of, "plain", True, num_processes=1)
    for found in run_ranks(norms_of, "compiled", False, num_processes=2, timeout_seconds=170):
        assert found == pytest.approx(expected, rel=1e-5)


def generated() -> tuple[list[int], list[int]]:
    """The tokens that a model writes whole, and in stages."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        eos_token_id=None,
    )  # fmt: skip
    whole, prompt = LlamaForCausalLM(config).eval(), torch.randint(32, (2, 4))
    say = partial(whole.generate, prompt, max_new_tokens=6, do_sample=False, use_cache=False, pad_token_id=0)
    expected = say().flatten().tolist()  # pyright: ignore[reportAttributeAccessIssue]
    with Accelerator(cpu=True, parallelism=ParallelDims(pipeline=2)) as accelerator:
        accelerator.prepare(whole)
        return expected, say().flatten().tolist()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
def test_a_model_in_stages_writes_what_the_whole_one_does(run_ranks) -> None:
    for expected, found in run_ranks(generated, num_processes=2):
        assert found == expected


FAILING = """
import torch
from torch import nn
from drivetrain import Accelerator

class Block(nn.Linear):
    def forward(self, x):
        if self.is_last and (x == 3).all():
            raise ArithmeticError("a third micro-batch")
        return super().forward(x)

blocks = nn.Sequential(*(Block(2, 2) for _ in range(2)))
for at, block in enumerate(blocks):
    block.is_last = at == 1
    nn.init.eye_(block.weight), nn.init.zeros_(block.bias)
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(blocks, torch.optim.SGD(blocks.parameters()))
batch = torch.arange(4.0)[:, None].expand(4, 2) + 1
accelerator.train_step(batch, loss=lambda model, x: model(x).mean())
"""


@pytest.mark.slow
def test_a_failed_launch_names_the_rank_with_its_stage_and_micro_batch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILING)
    command = [sys.executable, "-m", "drivetrain_launcher", "launch", "--cpu", "--num-processes", "2"]
    done = subprocess.run(
        [*command, "--parallel-pipeline", "2", str(script)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert "in the forward of stage 1 on micro-batch 3 of 4" in done.stderr
    assert "drivetrain: rank 1 failed: ArithmeticError: a third micro-batch;" in done.stderr


def refused_mesh(sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="parts of sequences do not pass between stages yet"):
        Accelerator(cpu=True, parallelism=ParallelDims(pipeline=2, **sizes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{"context": 2}, {"tensor": 2, "sequence": True}], ids=["context", "sequence"]
)
def test_parts_of_sequences_are_refused(run_ranks, sizes: dict[str, Any]) -> None:
    run_ranks(refused_mesh, sizes, num_processes=4)


def refused(sizes: dict[str, Any], said: str) -> None:
    with Accelerator(cpu=True, parallelism=ParallelDims(pipeline=2, **sizes)) as accelerator:
        model = build()
        with pytest.raises(ValueError, match=said):
            accelerator.prepare(model, optimizer_of(model))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (
            {"pipeline_splits": ("blocks.9",)},
            "pipeline_splits=.'blocks.9'.: 2 stages take the names of 1 blocks",
        ),
        ({"pipeline_last": ("nowhere",)}, "'nowhere' matches no module of Model"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(run_ranks, sizes: dict[str, Any], said: str) -> None:
    run_ranks(refused, sizes, said, num_processes=2)
