"""Experts that ranks divide train as whole ones under fsdp, or are refused before anything changes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from drivetrain_backends import DDPBackend, DDPSettings, FSDPBackend, FSDPSettings, SingleBackend
from drivetrain_backends.gradients.accumulation import AccumulationWindow
from drivetrain_backends.settings import ModelSettings
from drivetrain_backends.state_dict.dtensor import local
from drivetrain_backends.state_dict.full_tensors import full_model, load_full_state_dict
from drivetrain_parallel import expert_counts
from drivetrain_precision import PrecisionSettings, choose_policy
from drivetrain_state import Context, ParallelDims, gather_object
from drivetrain_weights.meta_init import parameters_on_meta
from optional_modules import skip_without
from parallel.models import WIDTH, Experts, Perceptron, Routed
from parallel.transformers_cases import CASES
from plain_loop.backends import changing, context

WORDS, LENGTH = 11, 6
SCALING = PrecisionSettings(initial_scale=256.0)  # low enough that no step overflows
MESHES = {
    "shard 2 x expert 2": ParallelDims(shard=2, expert=2),
    "shard 4 x expert 2": ParallelDims(shard=4, expert=2),
    "shard 4 x expert 4": ParallelDims(shard=4, expert=4),
    "data 2 x shard 2 x expert 2": ParallelDims(data=2, shard=2, expert=2),
    "tensor 2 x expert 2": ParallelDims(tensor=2, expert=2),
    "shard 2 x tensor 2 x expert 2": ParallelDims(shard=2, tensor=2, expert=2),
    "shard 2 x tensor 2 x expert 4": ParallelDims(shard=2, tensor=2, expert=4),
    "data 2 x tensor 2 x expert 2": ParallelDims(data=2, tensor=2, expert=2),
    "context 2 x expert 2": ParallelDims(context=2, expert=2),
    "context 2 x tensor 2 x expert 4": ParallelDims(context=2, tensor=2, expert=4),
}
NUM_RANKS = {"shard 2 x expert 2": 2, "tensor 2 x expert 2": 2, "context 2 x expert 2": 2}
BACKENDS = {
    "single": (SingleBackend, None),
    "ddp": (DDPBackend, DDPSettings),
    "fsdp": (FSDPBackend, FSDPSettings),
}


class LanguageModel(nn.Module):
    """Two blocks of five experts, each token of which chooses two, and layers that ranks divide."""

    def __init__(self, experts: nn.Module | None = None) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList((Routed(experts), Perceptron(), Routed(experts)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, length) to logits (batch, length, words)."""
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batches(steps: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        yield (torch.randint(0, WORDS, (8, 1), generator=generator) + torch.arange(LENGTH)) % WORDS


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = LanguageModel().double()
    return model, AdamW(model.parameters(), lr=1e-2)


def prepared(
    where: Context,
    model: nn.Module,
    optimizer: Optimizer,
    kind: str = "fsdp",
    mode: str = "no",
    **options: Any,
) -> tuple[Any, Any]:
    """Return a backend with the model that it has prepared; a window is of two micro-batches by default."""
    nonfinite = options.pop("on_nonfinite", "warn")
    window = AccumulationWindow(options.pop("accumulation", 2), on_nonfinite=nonfinite)
    policy = choose_policy(mode, where.device, options.pop("precision", None))
    made, section = BACKENDS[kind]
    changes = options.pop("changes", ModelSettings())
    backend = made(where, policy, window=window, settings=None if section is None else section(**options))
    backend = changing(backend, changes)
    return backend, backend.prepare([model], [optimizer], [])[0]


def step(where: Context, backend: Any, one: Any, tokens: Tensor) -> tuple[float, float]:
    """Train on this rank's part of the tokens; return the loss of all ranks, and the norm."""
    reads, losses = where.ranks("reads"), list[float]()
    for index, part in enumerate(tokens.chunk(reads.size)[reads.index].chunk(2)):
        backend.window.begin(is_last=index == 1)
        loss = loss_of(one.model, part)
        backend.backward(loss)
        losses.append(loss.item())
    norm = one.clip(norm=0.5)
    one.optimizers[0].step()
    one.zero_grad(one.optimizers[0].optimizer)
    everywhere = gather_object(where, sum(losses) / 2)
    return sum(everywhere) / len(everywhere), float(norm)


def plain_steps(steps: int) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    model, optimizer = build()
    found: list[tuple[float, float]] = []
    for tokens in batches(steps):
        loss = loss_of(model, tokens)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found, model.state_dict()


def divided_steps(
    kind: str, mesh: str, steps: int, options: dict[str, Any]
) -> tuple[list[tuple[float, float]], dict[str, Tensor], int]:
    with context(parallelism=MESHES[mesh]) as where:
        model, optimizer = build()
        backend, one = prepared(where, model, optimizer, kind, **options)
        found = [step(where, backend, one, tokens) for tokens in batches(steps)]
        held = sum(local(p).numel() for name, p in model.named_parameters() if "experts" in name)
        weights = full_model(one, where, everywhere=True)
        backend.close()
        return found, weights, held


RECOMPUTED = {"changes": ModelSettings(activation_checkpointing="full")}


@pytest.mark.parametrize(
    ("kind", "mesh", "options"),
    [
        ("fsdp", "shard 2 x expert 2", {}),
        ("fsdp", "shard 2 x expert 2", {"offload": True}),
        ("fsdp", "shard 4 x expert 2", {}),
        ("fsdp", "shard 4 x expert 2", RECOMPUTED),
        ("fsdp", "shard 4 x expert 4", {"strategy": "shard_grad_op"}),
        ("fsdp", "data 2 x shard 2 x expert 2", {}),
        ("fsdp", "data 2 x shard 2 x expert 2", RECOMPUTED),
        ("single", "tensor 2 x expert 2", {}),
        ("fsdp", "tensor 2 x expert 2", {}),
        ("fsdp", "shard 2 x tensor 2 x expert 2", RECOMPUTED),
        ("fsdp", "shard 2 x tensor 2 x expert 4", {}),
        ("ddp", "data 2 x tensor 2 x expert 2", {}),
        ("fsdp", "data 2 x tensor 2 x expert 2", {}),
    ],
    ids=lambda value: ", ".join(value) or "as it is" if isinstance(value, dict) else value,
)
@pytest.mark.default_cases("shard 2 x expert 2-as it is")
def test_20_steps_are_those_of_the_plain_loop(
    run_ranks, kind: str, mesh: str, options: dict[str, Any]
) -> None:
    expected, weights = plain_steps(20)
    assert expected[0][0] - expected[-1][0] > 0.1  # it trains
    num_ranks = NUM_RANKS.get(mesh, 4)
    found = run_ranks(divided_steps, kind, mesh, 20, options, num_processes=num_ranks, timeout_seconds=100)
    for steps, own, _ in found:
        assert steps == [pytest.approx(one, abs=1e-9) for one in expected]
        for name, value in weights.items():
            torch.testing.assert_close(own[name], value, rtol=0, atol=1e-8)
    num_experts = sum(value.numel() for name, value in weights.items() if "experts" in name)
    is_replicated = kind == "ddp" or mesh == "data 2 x shard 2 x expert 2"
    assert sum(held for *_, held in found) == num_experts * (2 if is_replicated else 1)


def transformers_steps(mesh: str | None) -> list[tuple[float, float]]:
    """Train a model of transformers on the same batch, on all ranks of a mesh or plainly; return losses and norms."""
    model = CASES["qwen3 moe"].build().train()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(5, 65, (4, 8), generator=torch.Generator().manual_seed(0))
    found: list[tuple[float, float]] = []
    if mesh is None:
        for _ in range(6):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            found.append((loss.item(), norm.item()))
        return found
    with context(parallelism=MESHES[mesh]) as where:
        backend, one = prepared(where, model, optimizer, accumulation=1)
        for _ in range(6):
            backend.window.begin(is_last=True)
            loss = one.model(input_ids=tokens, labels=tokens).loss
            backend.backward(loss)
            norm = one.clip(norm=0.5)
            one.optimizers[0].step()
            one.zero_grad(optimizer)
            found.append((loss.item(), norm.item()))
        backend.close()
        return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers warns of its own classes
@pytest.mark.parametrize(
    "mesh", ["shard 2 x expert 2", "context 2 x expert 2", "context 2 x tensor 2 x expert 4"]
)
def test_a_model_of_transformers_trains_as_it_does_alone(run_ranks, mesh: str) -> None:
    skip_without("transformers")
    expected = transformers_steps(None)
    assert expected[0][0] - expected[-1][0] > 0.5
    num_ranks = NUM_RANKS.get(mesh, 4)
    for found in run_ranks(transformers_steps, mesh, num_processes=num_ranks, timeout_seconds=100):
        assert found == [pytest.approx(one, rel=1e-4) for one in expected]


def gathered_and_loaded(mesh: str, on_meta: bool) -> None:
    """Build with a seed of each rank, write into the gathered model, load a whole one, and go on after a release."""
    with context(parallelism=MESHES[mesh]) as where:
        torch.manual_seed(where.topology.rank)
        if on_meta:
            with parameters_on_meta():
                model = Resettable()
        else:
            model = LanguageModel()
        first = {} if on_meta else {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = SGD(model.parameters(), lr=0.1)
        backend, one = prepared(where, model, optimizer)
        found = full_model(one, where, everywhere=True)
        everywhere = gather_object(where, [first, found])
        assert all(torch.equal(value, everywhere[0][1][name]) for name, value in found.items())
        if on_meta:
            assert all(value.isfinite().all() and value.std() > 0 for n, value in found.items() if "up" in n)
        else:
            assert all(torch.equal(value, everywhere[0][0][name]) for name, value in found.items())

        with one.gathered(write=True):
            experts = model.blocks[2].experts
            assert experts.up.shape == (5, WIDTH, 2 * WIDTH)
            with torch.no_grad():
                for number in range(5):
                    experts.up[number] = number + 10 * where.topology.rank
        found = full_model(one, where, everywhere=True)
        assert found["blocks.2.experts.up"][:, 0, 0].tolist() == [0, 1, 2, 3, 4]

        given = {name: torch.randn_like(value) for name, value in found.items()}
        load_full_state_dict(one, given if where.topology.is_main else None, where)
        loaded = full_model(one, where)
        assert not where.topology.is_main or all(torch.equal(loaded[name], given[name]) for name in given)
        backend.close()
        backend.prepare([model], [optimizer], [])
        backend.close()


class ResettableExperts(Experts):
    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter)


class Resettable(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        for block in (self.blocks[0], self.blocks[2]):
            block.experts = ResettableExperts(5, WIDTH)


@pytest.mark.parametrize("on_meta", [False, True], ids=["with values", "on meta"])
@pytest.mark.parametrize("mesh", ["shard 2 x expert 2", "shard 4 x expert 2", "data 2 x shard 2 x expert 2"])
@pytest.mark.default_cases("shard 2 x expert 2")
def test_whole_experts_are_filled_gathered_written_and_loaded(run_ranks, mesh: str, on_meta: bool) -> None:
    run_ranks(gathered_and_loaded, mesh, on_meta, num_processes=2 if mesh.startswith("shard 2") else 4)


def one_bad_expert() -> tuple[int, list[float], dict[str, int]]:
    """Measure norms and count what tokens choose; then step on a NaN in one rank's experts."""
    with context(parallelism=MESHES["shard 2 x expert 2"]) as where:
        model, optimizer = build()
        backend, one = prepared(where, model, optimizer, accumulation=1, on_nonfinite="skip")
        (tokens,) = batches(1)
        own = tokens.chunk(2)[where.topology.rank]
        backend.window.begin(is_last=True)
        backend.backward(loss_of(one.model, own))
        norms = [float(one.clip(norm=1e9, norm_type=kind)) for kind in (1.0, 2.0, float("inf"))]
        one.optimizers[0].step()
        one.zero_grad(optimizer)
        counts = {name: int(value.sum()) for name, value in expert_counts(model).items()}
        backend.window.begin(is_last=True)
        backend.backward(loss_of(one.model, own))
        if where.topology.rank == 1:
            model.blocks[0].experts.up.grad.to_local().fill_(torch.nan)
        one.optimizers[0].step()
        backend.close()
        return one.optimizers[0].num_steps, norms, counts


def test_ranks_skip_a_step_together_and_measure_each_expert_once(run_ranks) -> None:
    model, _ = build()
    (tokens,) = batches(1)
    loss_of(model, tokens).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    expected = [nn.utils.get_total_norm(gradients, kind).item() for kind in (1.0, 2.0, float("inf"))]
    for num_steps, norms, counts in run_ranks(one_bad_expert, num_processes=2):
        assert num_steps == 1
        assert norms == pytest.approx(expected, rel=1e-12)
        # Each of 4 samples' 5 tokens chooses two experts.
        assert counts == {"blocks.0.experts": 40, "blocks.2.experts": 40}


def half_precision(mode: str) -> list[float]:
    with context(parallelism=MESHES["shard 2 x expert 2"]) as where:
        torch.manual_seed(0)
        model = LanguageModel()
        backend, one = prepared(
            where, model, AdamW(model.parameters(), lr=1e-2), "fsdp", mode, precision=SCALING
        )
        found = [step(where, backend, one, tokens)[0] for tokens in batches(6)]
        with torch.no_grad():
            one.model(
                torch.zeros(1 + where.topology.rank, LENGTH, dtype=torch.long)
            )  # of other numbers of tokens
        backend.close()
        return found


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
@pytest.mark.slow
def test_half_precision_trains_as_full_precision(run_ranks, mode: str) -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer, expected = AdamW(model.parameters(), lr=1e-2), list[float]()
    for tokens in batches(6):
        loss = loss_of(model, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    first, second = run_ranks(half_precision, mode, num_processes=2)
    assert first == second == pytest.approx(expected, abs=2e-2)


def stepped_before() -> list[Tensor]:
    """Prepare with an optimizer that has states of whole experts already."""
    with context(parallelism=MESHES["shard 2 x expert 2"]) as where:
        model, optimizer = build()
        *earlier, last = batches(3)
        for tokens in earlier:
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        backend, one = prepared(where, model, optimizer)
        step(where, backend, one, last)
        found = full_model(one, where, everywhere=True)
        backend.close()
        return list(found.values())


def test_an_optimizer_keeps_its_states(run_ranks) -> None:
    model, optimizer = build()
    for index, tokens in enumerate(batches(3)):
        loss_of(model, tokens).backward()
        if index == 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(stepped_before, num_processes=2):
        for one, other in zip(found, model.state_dict().values(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def refusals() -> list[str]:
    said: list[str] = []

    def refused(match: str, call: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(ValueError, match=match) as caught:
            call(*args, **kwargs)
        said.append(str(caught.value))

    for mesh, match in (
        (MESHES["shard 2 x expert 2"], "parallel.shard=2 under backend='ddp', .* say backend='fsdp'"),
        (
            ParallelDims(context=2, expert=2),
            "parallel.expert=2 with tensor=1: this backend .* backend='fsdp'",
        ),
    ):
        with context(parallelism=mesh) as where:
            policy = choose_policy("no", where.device)
            refused(match, DDPBackend, where, policy, window=AccumulationWindow(1), settings=DDPSettings())
    with context(parallelism=MESHES["shard 2 x expert 2"]) as where:
        model = LanguageModel()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        refused("Adafactor cannot step the parts", prepared, where, model, Adafactor(model.parameters()))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        listed = LanguageModel(nn.ModuleList(Perceptron() for _ in range(5)))
        refused(
            "no experts that 2 ranks can divide: .* list", prepared, where, listed, AdamW(listed.parameters())
        )
        kept = PrecisionSettings(keep_fp32=("*.experts",))
        refused(
            "keep_fp32 keeps blocks.0.experts whole",
            prepared, where, model, AdamW(model.parameters()), "fsdp", "bf16", precision=kept,
        )  # fmt: skip
    with context(parallelism=ParallelDims(tensor=2, expert=2, sequence=True)) as where:
        refused(
            "expert=2 with parallel.sequence", prepared, where, model, AdamW(model.parameters()), "single"
        )
    return said


def test_what_cannot_be_divided_is_refused_on_every_rank(run_ranks) -> None:
    first, second = run_ranks(refusals, num_processes=2)
    assert first == second
