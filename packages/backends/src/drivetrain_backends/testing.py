"""The contract that every backend passes: the gradients of a plain single-process loop, whatever the ranks.

A backend's tests subclass `BackendContract`, name the backend, and call `check_all` on every rank of a group (and in
a single process, if it can run so). Each check trains the same small model on the same data twice, through the
backend and by a plain loop over all ranks' micro-batches, and compares every step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from drivetrain_backends.accumulation import AccumulationWindow
from drivetrain_backends.optimizer import PreparedOptimizer
from drivetrain_backends.protocol import Backend, Prepared
from drivetrain_precision import PrecisionSettings, choose_policy, supported_modes
from drivetrain_state import Context

_FEATURES = 6
_RATE = 0.1
_SCALING = PrecisionSettings(initial_scale=256.0)  # no step overflows, so that none is skipped
_Window: TypeAlias = list[list[tuple[Tensor, Tensor]]]  # [micro-batch][rank] -> (x, y)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to train.

    Attributes:
        windows: Micro-batches of each accumulation window; a shorter one closes early.
        accumulation: The nominal number of micro-batches.
        counted: Losses are sums with a count, of sizes that differ by rank and micro-batch.
        clip: The norm to clip to, if any.
        tied: The model's last layer shares its first layer's weight.
        frozen: The model's first layer is not trained.
        zero_first: `zero_grad` comes before backward, as many loops have it.
        mode: The precision; in fp16 and bf16 the model is float32, and its weights come near the plain loop's.
    """

    windows: Sequence[int]
    accumulation: int = 1
    counted: bool = False
    clip: float | None = None
    tied: bool = False
    frozen: bool = False
    zero_first: bool = False
    mode: str = "no"


class TinyModel(nn.Module):
    """Two layers with a nonlinearity between them; maps (items, features) to (items, features)."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(_FEATURES, _FEATURES, dtype=dtype)
        self.last = nn.Linear(_FEATURES, _FEATURES, dtype=dtype)
        if case.tied:
            self.last.weight = self.first.weight
        if case.frozen:
            self.first.requires_grad_(not case.frozen)

    def forward(self, x: Tensor) -> Tensor:
        """Map (items, features) to (items, features)."""
        return self.last(torch.tanh(self.first(x)))


class BackendContract:
    """What a backend must do; subclass it and set `backend`.

    Attributes:
        backend: The class under test.
        settings: What it is constructed with.
        dtype: The dtype of the model; float64 unless the backend has none.
        tolerance: Largest absolute difference of weights from the plain loop's.
        mixed_tolerance: The same where the backend computes in fp16 or bf16, and the plain loop in float32.
    """

    backend: ClassVar[type[Backend]]
    settings: ClassVar[Any] = None
    dtype: ClassVar[torch.dtype] = torch.float64
    tolerance: ClassVar[float] = 1e-10
    mixed_tolerance: ClassVar[float] = 5e-3
    cases: ClassVar[dict[str, Case]] = {
        "mean": Case(windows=[1] * 6),
        "mean, accumulated": Case(windows=[4] * 3, accumulation=4),
        "mean, a short last window": Case(windows=[4, 4, 3], accumulation=4),
        "mean, clipped": Case(windows=[2] * 4, accumulation=2, clip=0.05),
        "mean, zero_grad first": Case(windows=[4, 4, 2], accumulation=4, zero_first=True),
        "count": Case(windows=[1] * 6, counted=True),
        "count, accumulated": Case(windows=[4] * 3, accumulation=4, counted=True),
        "count, a short last window, clipped": Case(
            windows=[4, 4, 1], accumulation=4, counted=True, clip=0.05
        ),
        "tied weights": Case(windows=[2] * 3, accumulation=2, tied=True),
        "frozen layer": Case(windows=[2] * 3, accumulation=2, frozen=True),
        "fp16": Case(windows=[1] * 4, mode="fp16"),
        "fp16, count, accumulated, clipped": Case(
            windows=[2, 2, 1], accumulation=2, counted=True, clip=0.5, mode="fp16"
        ),
        "bf16": Case(windows=[1] * 4, mode="bf16"),
        "bf16, count, accumulated, clipped": Case(
            windows=[2, 2, 1], accumulation=2, counted=True, clip=0.5, mode="bf16"
        ),
    }

    def check_all(self, context: Context) -> list[str]:
        """Run every check. Called on all ranks.

        Returns:
            The names of the checks that ran.

        Raises:
            AssertionError: A check failed; the message names it.
        """
        modes = [mode for mode, has in supported_modes(context.device).items() if has.level != "none"]
        cases = {name: case for name, case in self.cases.items() if case.mode in modes}
        for name, case in cases.items():
            self.check_case(context, name, case)
        others: list[Callable[[Context], None]] = [
            self.check_scheduler_counts_steps,
            self.check_resume,
            self.check_two_models,
            self.check_unwrap,
        ]
        for check in others:
            check(context)
        return [*cases, *(check.__name__ for check in others)]

    def check_case(self, context: Context, name: str, case: Case) -> None:
        """Weights equal the plain loop's after every step; in mixed precision they are near, and not the same."""
        expected = _train_plainly(case, context.topology.world_size, self._dtype_of(case))
        tolerance = self.tolerance if case.mode == "no" else self.mixed_tolerance
        run = self._start(context, case)
        for step, _ in enumerate(run.steps()):
            what = f"{name}: weights after step {step + 1}"
            self._assert_close(expected[step], run.weights(), what, tolerance)
        if case.mode != "no":
            same = all(torch.equal(value, expected[-1][key]) for key, value in run.weights().items())
            assert not same, f"{name}: the weights are those of float32, so nothing ran in {case.mode}"
        run.backend.close()

    def check_scheduler_counts_steps(self, context: Context) -> None:
        """A schedule over three steps ends after three optimizer steps, at any number of ranks and micro-batches."""
        run = self._start(context, Case(windows=[4, 4, 2], accumulation=4), scheduled=True)
        rates = [run.optimizer.param_groups[0]["lr"] for _ in run.steps()]
        expected = [_RATE * (1 - step / 3) for step in (1, 2, 3)]
        assert rates == expected, f"scheduler: learning rates {rates}, expected {expected}"
        run.backend.close()

    def check_resume(self, context: Context) -> None:
        """A run taken up from `state_dict` goes on as if it had not stopped."""
        case = Case(windows=[2] * 6, accumulation=2, counted=True)
        run = self._start(context, case, scheduled=True)
        steps = [run.weights() for _ in run.steps()]
        run.backend.close()
        stopped = self._start(context, case, scheduled=True)
        for _ in zip(range(3), stopped.steps(), strict=False):
            pass
        state, backend_state = deepcopy((stopped.prepared.state_dict(), stopped.backend.state_dict()))
        stopped.backend.close()
        resumed = self._start(context, case, scheduled=True, seed=1)
        resumed.prepared.load_state_dict(state)
        resumed.backend.load_state_dict(backend_state)
        for step, _ in enumerate(resumed.steps(skip=3), start=3):
            self._assert_close(steps[step], resumed.weights(), f"resume: weights after step {step + 1}")
        resumed.backend.close()

    def check_two_models(self, context: Context) -> None:
        """Two models under one optimizer, prepared in two calls, train as the model made of both."""
        for counted in (False, True):
            self._check_two_models(context, Case(windows=[2, 2, 1], accumulation=2, counted=counted))

    def _check_two_models(self, context: Context, case: Case) -> None:
        expected = _train_plainly(case, context.topology.world_size, self.dtype)
        backend = self._backend(context, case)
        model = _model(case, self.dtype, seed=0)
        optimizer = _optimizer(model)
        first, last = backend.prepare([model.first, model.last], [], [])
        (pair,) = backend.prepare([], [optimizer], [])
        for step, window in enumerate(_windows(case, context.topology.world_size, self.dtype)):
            for i, by_rank in enumerate(window):
                backend.window.begin(is_last=i + 1 == len(window))
                x, y = (t.to(context.device) for t in by_rank[context.topology.rank])
                with _held(backend, first), _held(backend, last):
                    output = last.model(torch.tanh(first.model(x)))
                    if case.counted:
                        backend.backward(_loss(output, y, reduction="sum"), count=len(x))
                    else:
                        backend.backward(_loss(output, y))
                pair.optimizers[0].step()
                pair.optimizers[0].zero_grad()
            self._assert_close(expected[step], _weights(model), f"two models: weights after step {step + 1}")
        backend.close()

    def check_unwrap(self, context: Context) -> None:
        """`unwrap` gives the user's module, whose names are the checkpoint's."""
        run = self._start(context, Case(windows=[1]))
        assert run.prepared.unwrap() is run.model, "unwrap: another module than the user's"
        names, expected = set(run.prepared.state_dict()["model"]), set(run.model.state_dict())
        assert names == expected, f"state_dict: names {sorted(names)}, expected {sorted(expected)}"
        run.backend.close()

    def _backend(self, context: Context, case: Case) -> Backend:
        window = AccumulationWindow(case.accumulation)
        return self.backend(
            context, choose_policy(case.mode, context.device, _SCALING), window=window, settings=self.settings
        )

    def _start(self, context: Context, case: Case, *, scheduled: bool = False, seed: int = 0) -> "_Run":
        backend = self._backend(context, case)
        model = _model(case, self._dtype_of(case), seed=seed)
        optimizer = _optimizer(model)
        schedulers = [LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 3))] if scheduled else []
        (prepared,) = backend.prepare([model], [optimizer], schedulers)
        windows = _windows(case, context.topology.world_size, self._dtype_of(case))
        return _Run(
            context=context, case=case, backend=backend, prepared=prepared, model=model, windows=windows
        )

    def _dtype_of(self, case: Case) -> torch.dtype:
        return self.dtype if case.mode == "no" else torch.float32

    def _assert_close(
        self, expected: dict[str, Tensor], found: dict[str, Tensor], what: str, tolerance: float | None = None
    ) -> None:
        allowed = self.tolerance if tolerance is None else tolerance
        for name, value in expected.items():
            difference = (value - found[name]).abs().max().item()
            assert difference <= allowed, f"{what}: {name} differs by {difference}, allowed {allowed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A prepared model on its way through the windows of a case."""

    context: Context
    case: Case
    backend: Backend
    prepared: Prepared
    model: TinyModel
    windows: list[_Window]

    @property
    def optimizer(self) -> PreparedOptimizer:
        return self.prepared.optimizers[0]

    def steps(self, *, skip: int = 0) -> Iterator[None]:
        """Train as a user's loop does, yielding after every window."""
        for window in self.windows[skip:]:
            for i, by_rank in enumerate(window):
                self.backend.window.begin(is_last=i + 1 == len(window))
                self._micro_batch(*by_rank[self.context.topology.rank])
            yield

    def weights(self) -> dict[str, Tensor]:
        return _weights(self.model)

    def _micro_batch(self, x: Tensor, y: Tensor) -> None:
        x, y = x.to(self.context.device), y.to(self.context.device)
        if self.case.zero_first:
            self.optimizer.zero_grad()
        with _held(self.backend, self.prepared):
            output = self.prepared.model(x)
            if self.case.counted:
                self.prepared.backward(_loss(output, y, reduction="sum"), count=len(x))
            else:
                self.prepared.backward(_loss(output, y))
        if self.case.clip is not None:
            self.prepared.clip(norm=self.case.clip)
        self.optimizer.step()
        for scheduler in self.prepared.schedulers:
            scheduler.step()
        if not self.case.zero_first:
            self.optimizer.zero_grad()


def _held(backend: Backend, prepared: Prepared) -> AbstractContextManager[None]:
    return nullcontext() if backend.window.closing else prepared.no_sync()


def _model(case: Case, dtype: torch.dtype, *, seed: int) -> TinyModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyModel(case, dtype)


def _optimizer(model: nn.Module) -> Optimizer:
    return SGD([p for p in model.parameters() if p.requires_grad], lr=_RATE, momentum=0.9)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def _loss(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    each = (output - target).square().sum(-1)
    return each.sum() if reduction == "sum" else each.mean()


def _windows(case: Case, num_ranks: int, dtype: torch.dtype) -> list[_Window]:
    """The data of all ranks. Sizes differ by rank and micro-batch where losses are counted."""
    generator = torch.Generator().manual_seed(7)

    def batch(step: int, micro_batch: int, rank: int) -> tuple[Tensor, Tensor]:
        size = 1 + (3 * step + 5 * micro_batch + 7 * rank) % 6 if case.counted else 4
        x, y = torch.randn(2, size, _FEATURES, generator=generator, dtype=dtype)
        return x, y

    return [
        [[batch(step, i, rank) for rank in range(num_ranks)] for i in range(length)]
        for step, length in enumerate(case.windows)
    ]


def _train_plainly(case: Case, num_ranks: int, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """The loop that the contract is measured against: one process, every rank's micro-batches, torch alone."""
    model = _model(case, dtype, seed=0)
    optimizer = _optimizer(model)
    weights: list[dict[str, Tensor]] = []
    for window in _windows(case, num_ranks, dtype):
        batches = [pair for by_rank in window for pair in by_rank]
        if case.counted:
            total = sum(len(x) for x, _ in batches)
            loss = torch.stack([_loss(model(x), y, reduction="sum") for x, y in batches]).sum() / total
        else:
            loss = torch.stack([_loss(model(x), y) for x, y in batches]).mean()
        optimizer.zero_grad()
        loss.backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        weights.append(_weights(model))
    return weights
