"""Steps on the device: the host's result, and the host waits for nothing but fp16's look for an overflow."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from hardware.devices import OnDevice, here

NUM_WARM = 2  # steps in which optimizers and wrappers make what they keep
NUM_STEPS = 6


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train.

    Attributes:
        mode: The precision.
        accumulation: Micro-batches a step.
        clip: The norm to clip to.
        counted: What a loss is normalised by: nothing, a number of the host's, or one on the device.
        options: Sections.
    """

    mode: str = "no"
    accumulation: int = 1
    clip: float | None = None
    counted: str = ""
    options: Mapping[str, object] | None = None


class Model(nn.Module):
    """Two layers, a norm, a parameter of shape () and a buffer; (items, 6) to (items, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.bias = nn.Parameter(torch.zeros(()))
        self.register_buffer("scale", torch.full((), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh()) * self.scale + self.bias


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    num = 4 * 2 * 2 * (NUM_WARM + NUM_STEPS)
    return TensorDataset(torch.randn(num, 6, generator=generator), torch.randn(num, 3, generator=generator))


def train(case: Case, backend: str, cpu: bool) -> tuple[dict[str, Tensor], list[str], int]:
    """Train; the weights, where the host waited after the first steps, and how many windows these had."""
    torch.manual_seed(0)
    accelerator = Accelerator(
        backend=backend,
        mixed_precision=case.mode,
        gradient_accumulation_steps=case.accumulation,
        cpu=cpu or None,
        sections=dict(case.options or {}),
    )
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = LambdaLR(optimizer, lambda step: 0.9**step)
    loader = DataLoader(data(), batch_size=4, pin_memory=not cpu)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    losses: list[Tensor] = []
    num_windows = 0
    with here().waits() as found:
        for number, (x, y) in enumerate(loader):
            if number == NUM_WARM * case.accumulation:
                found.clear()
                num_windows = 0
            with accelerator.accumulate(model):
                losses.append(_micro_step(accelerator, case, model, optimizer, x, y))
                scheduler.step()
                num_windows += accelerator.sync_gradients
        waits = list(found)
    assert all(torch.isfinite(loss).item() for loss in losses)
    weights = {
        name: value.cpu() for name, value in accelerator.get_state_dict(model, everywhere=True).items()
    }
    accelerator.end_training()
    return weights, waits, num_windows


def _micro_step(
    accelerator: Accelerator,
    case: Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    y: Tensor,
) -> Tensor:
    squares = (model(x) - y).square().mean(-1)
    if case.counted:
        count = len(x) if case.counted == "host" else (y[:, 0] > -9).sum()
        accelerator.backward(squares.sum(), count=count)
    else:
        accelerator.backward(squares.mean())
    if case.clip is not None and accelerator.sync_gradients:
        accelerator.clip_grad_norm_(model.parameters(), case.clip)
    optimizer.step()
    optimizer.zero_grad()
    return squares.detach().mean()


def compare(case: Case, backend: str) -> None:
    expected, _, _ = train(case, backend, cpu=True)
    weights, waits, num_windows = train(case, backend, cpu=False)
    tolerance = 1e-5 if case.mode == "no" else 2e-2
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)
    if case.mode != "fp16":
        assert waits == [], "\n".join(waits)
    else:  # whether the step overflowed; just before it whether others scaled FSDP's shards, which nothing else tells
        places = ["finalize", "were_scaled"] if backend == "fsdp" else ["finalize"]
        counts = [sum(place in wait for wait in waits) for place in places]
        assert counts == [num_windows] * len(places), "\n".join(waits)
        assert len(waits) == sum(counts), "\n".join(waits)


def compare_all(cases: list[Case], backend: str) -> None:
    for case in cases:
        try:
            compare(case, backend)
        except Exception as error:
            error.add_note(f"in {case}")
            raise


CASES = [
    Case(),
    Case(accumulation=2, clip=0.1),
    Case(accumulation=2, counted="host"),
    Case(counted="device", clip=0.1),
    Case(mode="fp16", clip=0.1),
]
MORE = [
    Case(mode=mode, accumulation=accumulation, clip=clip, counted=counted)
    for mode in ("no", "bf16", "fp16")
    for accumulation in (1, 2)
    for clip in (None, 0.1)
    for counted in ("", "host", "device")
]


def test_one_process_waits_for_nothing_but_an_overflow(on_device: OnDevice) -> None:
    on_device(compare_all, CASES, "single")


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
@pytest.mark.default_cases
def test_ranks_wait_for_nothing_but_an_overflow(backend: str, on_device: OnDevice) -> None:
    on_device(compare_all, CASES, backend, num_processes=2)


DIVIDED = [
    Case(clip=0.1, options={"fsdp": {"wrap": ["Linear"]}}),
    # No offload: torch itself waits for gradients on their way to the host, as docs/howto/fsdp.md says.
    Case(accumulation=2, options={"fsdp": {"wrap": ["Linear"]}}),
    Case(options={"fsdp": {"strategy": "shard_grad_op"}}),
]
REPLICATED = [
    Case(options={"ddp": {"find_unused_parameters": True}}),
    # No communication hook: torch's casts run on streams of a pool, which a device made in Python's terms has not.
    Case(clip=0.1, options={"ddp": {"gradient_as_bucket_view": False}}),
    Case(accumulation=2, options={"ddp": {"static_graph": True}}),
    Case(clip=0.1, options={"ddp": {"reduce": "at_close"}}),
]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["single", "ddp", "fsdp"])
def test_no_way_to_train_waits(backend: str, on_device: OnDevice) -> None:
    own = {"ddp": REPLICATED, "fsdp": DIVIDED}.get(backend, [])
    num_processes = 1 if backend == "single" else 2
    on_device(compare_all, [*MORE, *own], backend, num_processes=num_processes, timeout_seconds=500)


def train_in_bf16(update: str, cpu: bool) -> dict[str, Tensor]:
    """Train with weights held in bf16, and the norm and the bias in fp32; the weights and what is kept of each."""
    torch.manual_seed(0)
    precision = {
        "param_dtype": "bf16",
        "buffer_dtype": "bf16",
        "keep_fp32": ("norm",),
        "weight_update": update,
    }
    accelerator = Accelerator(cpu=cpu, sections={"precision": precision, "run": {"show_plan": False}})
    model = Model()
    model, optimizer = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    )
    for x, _ in DataLoader(data(), batch_size=8):
        accelerator.backward(model(x.to(accelerator.device)).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert {d for n, d in dtypes.items() if not n.startswith("norm")} == {torch.bfloat16}
    assert dtypes["norm.weight"] is torch.float32
    accelerator.end_training()
    return {name: value.detach().float().cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("update", ["kahan", "stochastic"])
@pytest.mark.default_cases
def test_weights_held_in_bf16_are_updated_on_the_device_as_on_the_host(
    on_device: OnDevice, update: str
) -> None:
    (found,) = on_device(train_in_bf16, update, False)
    (expected,) = on_device(train_in_bf16, update, True)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2.0**-6, atol=2e-2, msg=name)
