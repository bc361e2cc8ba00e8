"""Replicas that train apart, against a plain loop that holds all of them in one process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from drivetrain import Accelerator, ParallelDims
from plain_loop.accelerated import ON_TWO, accelerator_of, assert_equal_weights, weights_of

OUTER = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)
AVERAGES = partial(SGD, lr=1.0)
STEPS = 14
HALVES = [slice(0, 2), slice(2, 6)]  # 40 and 81 elements


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def batch_of(step: int, replica: int) -> Tensor:
    return torch.randn(
        6, 4, dtype=torch.double, generator=torch.Generator().manual_seed(100 * step + replica)
    )


def loss_of(model: nn.Module, step: int, replica: int) -> Tensor:
    x = batch_of(step, replica)
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, step, accelerator.process_index))
            optimizer.step()
            optimizer.zero_grad()


class PlainReplicas:
    """All replicas in one process, their outer weights and outer optimizers: what the papers say, line by line."""

    def __init__(self, number: int, inner: Callable[..., Optimizer], fragments: list[slice]) -> None:
        self.replicas = [model_of() for _ in range(number)]
        self.inner = [inner(one.parameters()) for one in self.replicas]
        self.outer = [nn.Parameter(p.detach().clone()) for p in self.replicas[0].parameters()]
        self.fragments = [(part, OUTER(self.outer[part])) for part in fragments]
        self.means: list[Tensor] = []

    def step(self, number: int) -> None:
        for index, (replica, inner) in enumerate(zip(self.replicas, self.inner, strict=True)):
            inner.zero_grad()
            loss_of(replica, number, index).backward()
            inner.step()

    def weights(self, part: slice) -> list[list[Tensor]]:
        return [[p.data for p in list(one.parameters())[part]] for one in self.replicas]

    def send(self, fragment: int) -> None:
        part, _ = self.fragments[fragment]
        of_replicas = zip(*self.weights(part), strict=True)
        means = [torch.stack(held).mean(0) for held in of_replicas]
        self.means = [outer.data - mean for outer, mean in zip(self.outer[part], means, strict=True)]

    def receive(self, fragment: int, share: float) -> None:
        part, optimizer = self.fragments[fragment]
        for outer, mean in zip(self.outer[part], self.means, strict=True):
            outer.grad = mean
        optimizer.step()
        for weights in self.weights(part):
            for weight, outer in zip(weights, self.outer[part], strict=True):
                weight.copy_(share * weight + (1 - share) * outer.data)


@ON_TWO
@pytest.mark.parametrize("outer", [None, AVERAGES], ids=["averages", "an outer step of 1"])
def test_an_exchange_after_every_step_of_sgd_is_data_parallelism(outer: Any) -> None:
    found: list[dict[str, Tensor]] = []
    for is_apart in (False, True):
        with accelerator_of("ddp") as accelerator:
            model: Any = model_of()
            model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
            if is_apart:
                with accelerator.local_updates(model, every=1, outer=outer):
                    train(accelerator, model, optimizer, range(STEPS))
            else:
                train(accelerator, model, optimizer, range(STEPS))
            found.append(weights_of(accelerator, model))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)


@ON_TWO
@pytest.mark.parametrize(
    ("said", "fragments"),
    [
        pytest.param({"every": 4}, [slice(0, 6)], id="diloco"),
        pytest.param({"every": 4, "fragments": 2}, HALVES, id="streaming"),
        pytest.param({"every": 6, "fragments": 2, "delay": 2, "local_share": 0.25}, HALVES, id="late"),
    ],
)
def test_weights_are_those_of_plain_replicas(said: dict[str, int], fragments: list[slice]) -> None:
    plain = PlainReplicas(2, AdamW, fragments)
    every, delay = said["every"], said.get("delay", 0)
    period = every // len(fragments)
    for step in range(1, STEPS + 1):
        plain.step(step)
        if step % period == 0:
            plain.send((step // period - 1) % len(fragments))
        if step > delay and (step - delay) % period == 0:
            plain.receive(
                ((step - delay) // period - 1) % len(fragments), said.get("local_share", 0) if delay else 0
            )
    with accelerator_of("ddp") as accelerator:
        model: Any = model_of()
        model, optimizer = accelerator.prepare(model, AdamW(model.parameters()))
        local = accelerator.local_updates(model, outer=OUTER, **said)
        own = plain.replicas[accelerator.process_index]
        with local:
            train(accelerator, model, optimizer, range(1, STEPS + 1))
            for mine, expected in zip(
                accelerator.unwrap_model(model).parameters(), own.parameters(), strict=True
            ):
                torch.testing.assert_close(mine.data, expected.data, rtol=0, atol=1e-12)


@ON_TWO
def test_an_every_of_seven_sends_a_seventh_of_data_parallelism() -> None:
    with accelerator_of("ddp") as accelerator:
        model: Any = model_of()
        model, optimizer = accelerator.prepare(model, AdamW(model.parameters()))
        local = accelerator.local_updates(model, every=7, outer=OUTER)
        of_gradients = STEPS * sum(p.numel() * p.itemsize for p in model.parameters())
        with local:
            train(accelerator, model, optimizer, range(STEPS))
        assert local.sent_bytes == of_gradients / 7


def trained(folder: Path, parts: tuple[int, ...], *, loads: bool = False) -> dict[str, Tensor]:
    """The weights at the end of a run that saves after each part; or that loads the first save, and goes on."""
    with accelerator_of("ddp" if dist.is_initialized() else "single", project_dir=folder) as accelerator:
        model: Any = model_of()
        model, optimizer = accelerator.prepare(model, AdamW(model.parameters()))
        local = accelerator.local_updates(model, every=4, fragments=2, outer=OUTER)
        if loads:
            accelerator.load_state(folder / "checkpoints")
        begun = local.num_steps
        with local:
            for end in parts:
                train(accelerator, model, optimizer, range(begun, end))
                begun = end
                if not loads:
                    accelerator.save_state()
        return weights_of(accelerator, model)


def gone_on(folder: Path, end: int) -> dict[str, Tensor]:
    return trained(folder, (end,), loads=True)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = [str(tmp_path)]
    if dist.is_initialized():
        dist.broadcast_object_list(folder)
    return Path(folder[0])


@ON_TWO
def test_a_run_goes_on_from_a_save_between_exchanges(shared: Path) -> None:
    whole = trained(shared, (5, STEPS))
    if dist.get_rank() == 0:  # the later one is put away
        (shared / "checkpoints" / f"step-{STEPS}").rename(shared / "later")
    dist.barrier()
    assert_equal_weights(trained(shared, (STEPS,), loads=True), whole)


@pytest.mark.default_cases("2-1")
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_replicas_goes_on_from_the_same_weights(
    run_ranks: Any, tmp_path: Path, before: int, after: int
) -> None:
    saved, *_ = run_ranks(trained, tmp_path, (5,), num_processes=before)
    loaded, *_ = run_ranks(gone_on, tmp_path, 5, num_processes=after)
    assert_equal_weights(loaded, saved)
    later, *_ = run_ranks(gone_on, tmp_path, 6, num_processes=after)
    assert not torch.equal(later["0.weight"], saved["0.weight"])


@ON_TWO
def test_replicas_become_equal_at_the_end_and_then_train_together() -> None:
    with accelerator_of("ddp") as accelerator:
        model: Any = nn.Sequential(model_of(), nn.BatchNorm1d(1).double())
        model, optimizer = accelerator.prepare(model, AdamW(model.parameters()))
        with accelerator.local_updates(model, every=3, outer=OUTER):
            train(accelerator, model, optimizer, range(5))
        for is_after in (False, True):
            if is_after:
                train(accelerator, model, optimizer, range(5, 7))
            own = accelerator.unwrap_model(model)
            moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
            # DDP makes statistics equal before the next forward.
            for tensor in (*own.parameters(), *moments, *(() if is_after else own.buffers())):
                of_ranks = accelerator.gather(tensor.detach()[None].clone())
                torch.testing.assert_close(of_ranks[0], of_ranks[1], rtol=0, atol=0)


OF_TWO = [
    pytest.param("ddp", ParallelDims(data=2, tensor=2), {}, id="tensor"),
    pytest.param("fsdp", ParallelDims(data=2, shard=2), {}, id="shard"),
    pytest.param("fsdp", ParallelDims(data=2, context=2), {"fsdp": {"shard_size": 2}}, id="context"),
]


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("backend", "dims", "sections"), OF_TWO)
def test_ranks_of_one_replica_go_on_talking(backend: str, dims: ParallelDims, sections: Any) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=16
    )
    found: list[dict[str, Tensor]] = []
    for name, sizes, said in ((backend, dims, sections), ("ddp", ParallelDims(data=4), {})):
        with accelerator_of(name, parallelism=sizes, sections=said) as accelerator:
            torch.manual_seed(0)
            model: Any = transformers.LlamaForCausalLM(config).double()
            model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
            # Of four replicas two and two read the same, so that their mean is that of two.
            replica, shards = accelerator.context.ranks("data").index % 2, accelerator.context.ranks("shard")
            with accelerator.local_updates(model, every=4, fragments=2, outer=OUTER):
                for step in range(STEPS):
                    drawn = torch.Generator().manual_seed(100 * step + replica)
                    words = torch.randint(16, (2, 8), generator=drawn)[shards.index :: shards.size]
                    with accelerator.accumulate(model):
                        accelerator.backward(model(input_ids=words, labels=words).loss)
                        optimizer.step()
                        optimizer.zero_grad()
            found.append(weights_of(accelerator, model))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)  # the model's norms compute in fp32


def in_shards(folder: Path, parts: tuple[int, ...], loads: bool) -> dict[str, Tensor]:
    """The weights of two replicas of two shards, whose last layer has fewer rows than shards; see `trained`."""
    dims = ParallelDims(data=2, shard=2)
    with accelerator_of("fsdp", project_dir=folder, parallelism=dims) as accelerator:
        model: Any = model_of()
        model, optimizer = accelerator.prepare(model, AdamW(model.parameters()))
        local = accelerator.local_updates(model, every=4, fragments=2, outer=OUTER)
        if loads:
            accelerator.load_state(folder / "checkpoints" / f"step-{parts[0]}")
        begun = local.num_steps
        with local:
            for end in parts[loads:]:
                train(accelerator, model, optimizer, range(begun, end))
                begun = end
                accelerator.save_state()
        return weights_of(accelerator, model)


@pytest.mark.slow
def test_replicas_of_shards_go_on_from_a_save(run_ranks: Any, tmp_path: Path) -> None:
    whole, *_ = run_ranks(in_shards, tmp_path / "whole", (5, STEPS), False, num_processes=4)
    run_ranks(in_shards, tmp_path / "part", (5,), False, num_processes=4)
    again, *_ = run_ranks(in_shards, tmp_path / "part", (5, STEPS), True, num_processes=4)
    assert_equal_weights(again, whole)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.taken, self.left = nn.Linear(4, 1).double(), nn.Linear(4, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return (self.taken if x.shape[0] % 2 else self.left)(x)


@ON_TWO
@pytest.mark.parametrize(
    "steps", [((5, 6), (6, 5)), ((5, 6), (5, 5))], ids=["in other orders", "one never taken"]
)
def test_moments_are_averaged_by_weight_and_begin_anew_where_a_replica_has_none(steps: Any) -> None:
    with accelerator_of("ddp", sections={"ddp": {"find_unused_parameters": True}}) as accelerator:
        torch.manual_seed(0)
        model: Any = Branches()
        model, optimizer = accelerator.prepare(model, AdamW(model.parameters()))
        seen: list[dict[str, Tensor]] = []
        with accelerator.local_updates(model, every=10):
            for rows in steps[accelerator.process_index]:
                accelerator.backward(model(torch.full((rows, 4), float(rows)).double()).sum())
                optimizer.step()
                optimizer.zero_grad()
            own = accelerator.unwrap_model(model)
            names = {p: name for name, p in own.named_parameters()}
            seen = [{names[p]: state["exp_avg"].clone() for p, state in optimizer.state.items() if state}]
        of_ranks: list[Any] = [None] * 2
        dist.all_gather_object(of_ranks, seen[0])
        after = {names[p]: state["exp_avg"] for p, state in optimizer.state.items() if state}
        both = of_ranks[0].keys() & of_ranks[1].keys()
        assert after.keys() == both
        for name in both:
            torch.testing.assert_close(after[name], (of_ranks[0][name] + of_ranks[1][name]) / 2)


@ON_TWO
def test_weights_of_an_optimizer_that_does_not_count_are_exchanged_too() -> None:
    with accelerator_of("ddp") as accelerator:
        model: Any = model_of()
        first, *rest = model.parameters()
        model, often, _seldom = accelerator.prepare(model, SGD([first], lr=0.1), SGD(rest, lr=0.1))
        with accelerator.local_updates(model, every=10, outer=OUTER) as local:
            accelerator.backward(loss_of(model, 0, accelerator.process_index))
            often.step()
            assert local.num_steps == 0
        of_ranks = accelerator.gather(
            next(accelerator.unwrap_model(model).parameters()).detach()[None].clone()
        )
        torch.testing.assert_close(of_ranks[0], of_ranks[1], rtol=0, atol=0)


@ON_TWO
def test_an_export_in_the_block_is_of_one_model(shared: Path) -> None:
    with accelerator_of("ddp") as accelerator:
        model: Any = model_of()
        model, optimizer = accelerator.prepare(model, AdamW(model.parameters()))
        with accelerator.local_updates(model, every=10, outer=OUTER) as local:
            train(accelerator, model, optimizer, range(3))
            accelerator.prepare(LambdaLR(optimizer, lambda _: 1.0))  # which leaves the counting as it is
            train(accelerator, model, optimizer, range(3, 6))
            assert local.num_steps == 6
            accelerator.save_model(model, shared / "exported")
            written = load_file(shared / "exported" / "model.safetensors")
            for name, value in accelerator.unwrap_model(model).state_dict().items():
                torch.testing.assert_close(value, written[name], rtol=0, atol=0)


@ON_TWO
def test_what_cannot_train_apart_is_refused() -> None:
    with accelerator_of("fsdp") as accelerator:
        model: Any = model_of()
        model, _ = accelerator.prepare(model, AdamW(model.parameters()))
        with pytest.raises(
            RuntimeError, match=r"replicas are not those of the run's mesh; say parallel\.data"
        ):
            accelerator.local_updates(model, every=2)
    with accelerator_of("ddp") as accelerator:
        model = accelerator.prepare(model_of())
        with pytest.raises(ValueError, match="prepare it with its optimizer first"):
            accelerator.local_updates(model, every=2)
