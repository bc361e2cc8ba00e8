"""The contract that every backend passes: the gradients of a plain single-process loop at any number of ranks.

A backend's tests subclass `BackendContract`, set the backend, and call `check_all` on every rank of a group (and in a
single process, if the backend supports it). Each check trains the same small model on the same data twice, through
the backend and by a plain loop over all ranks' micro-batches, and compares every step.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from drivetrain_backends.errors import NonFiniteGradientError, PairingError
from drivetrain_backends.gradients.accumulation import AccumulationWindow, OnNonfinite
from drivetrain_backends.modules.block_changes import BlockChanges
from drivetrain_backends.protocol import Backend
from drivetrain_backends.state_dict.full_tensors import full_state_dict
from drivetrain_backends.testing.average_check import check_average
from drivetrain_backends.testing.reference_training import (
    NUM_FEATURES,
    RATE,
    Case,
    UsedGradients,
    changed,
    discriminator_loss,
    gan_batches,
    generator_loss,
    loss_and_count,
    make_adamw,
    make_gan,
    make_optimizer,
    make_windows,
    named,
    tiny_model,
    train_gan_plainly,
    train_plainly,
)
from drivetrain_backends.testing.runner import Run, clip_and_step, held, whole_weights
from drivetrain_precision import PrecisionSettings, choose_policy, supported_modes
from drivetrain_state import Context

_SCALING = PrecisionSettings(initial_scale=256.0)  # low enough that no step overflows and is skipped


class BackendContract:
    """The contract of a backend, as a base class for its tests; a subclass sets `backend`.

    Attributes:
        backend: The class under test.
        settings: The settings with which the backend is constructed.
        dtype: The dtype of the model; float64 unless the backend does not support float64.
        tolerance: The largest difference of losses, norms and weights from the plain loop; relative above 1.
            Gradients are derived from movements of weights, and may differ by tolerance / learning rate.
        modes: The precisions that the backend supports.
        trains_models_together: Whether one optimizer may train two models; if not, the backend must refuse this.
        layer: The class of the models' layers; see `Case.layer`.
        mixed_tolerance: The tolerance for fp16 or bf16, against a plain loop in float32.
    """

    backend: ClassVar[type[Backend]]
    settings: ClassVar[Any] = None
    dtype: ClassVar[torch.dtype] = torch.float64
    tolerance: ClassVar[float] = 1e-10
    layer: ClassVar[Callable[..., nn.Module]] = nn.Linear
    mixed_tolerance: ClassVar[float] = 2e-2
    modes: ClassVar[Sequence[str]] = ("no", "fp16", "bf16")
    trains_models_together: ClassVar[bool] = True
    cases: ClassVar[dict[str, Case]] = {
        "mean, 20 steps": Case(windows=[1] * 20),
        "count, accumulated, clipped, uneven tails, 20 steps": Case(
            windows=([4] * 4 + [1]) * 4, accumulation=4, counted=True, clip=0.05
        ),
        "mean, accumulated, clipped, a short last window": Case(windows=[4, 4, 3], accumulation=4, clip=0.05),
        "mean, zero_grad first": Case(windows=[4, 4, 2], accumulation=4, zero_first=True),
        "count": Case(windows=[1] * 4, counted=True),
        "tied weights": Case(windows=[2] * 20, accumulation=2, tied=True),
        "frozen layer": Case(windows=[2] * 20, accumulation=2, frozen=True),
        "recomputed": Case(windows=[2] * 4, accumulation=2, changes=changed(activation_checkpointing="full")),
        "recomputed in part": Case(windows=[1] * 4, changes=changed(activation_checkpointing="selective")),
        "compiled": Case(windows=[1] * 4, changes=changed(compile="blocks", compile_backend="eager")),
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
        able = supported_modes(context.device)
        cases = {
            name: case
            for name, case in self.cases.items()
            if case.mode in self.modes and able[case.mode].level != "none"
        }
        for name, case in cases.items():
            self.check_case(context, name, case)
        others: list[Callable[[Context], None]] = [
            self.check_scheduler_counts_steps,
            self.check_resume,
            self.check_average,
            self.check_two_models,
            self.check_gan,
            self.check_cleared_gradients,
            self.check_failed_micro_batch,
            self.check_nonfinite_gradients,
            self.check_gathered,
            self.check_untrained_model,
            self.check_unwrap,
        ]
        for check in others:
            check(context)
        return [*cases, *(check.__name__ for check in others)]

    def check_case(self, context: Context, name: str, case: Case) -> None:
        """Check losses, norms, gradients and weights against the plain loop at every step."""
        reads, case = context.ranks("reads"), replace(case, layer=self.layer)
        expected = train_plainly(case, reads.size, self._dtype_of(case))
        tolerance = self.tolerance if case.mode == "no" else self.mixed_tolerance
        run = self._start(context, case)
        assert run.is_changed(), f"{name}: the model is not what {case.changes} asks for"
        used = UsedGradients(run.weights())
        for step, _ in enumerate(run.steps()):
            plain, what, weights = expected[step], f"{name}: step {step + 1}", run.weights()
            own = {f"loss {i}": by_rank[reads.index] for i, by_rank in enumerate(plain.losses)}
            found = {f"loss {i}": loss for i, loss in enumerate(run.losses)}
            norms = {} if plain.norm is None else {"norm": plain.norm}
            self._assert_close(own | norms | plain.weights, found | run.norms | weights, what, tolerance)
            self._assert_close(plain.gradients, used.of_step(weights), f"{what}: gradient", tolerance / RATE)
        if case.mode != "no":
            last = expected[-1].weights
            same = all(torch.equal(value, last[key]) for key, value in run.weights().items())
            assert not same, f"{name}: the weights are those of float32, so nothing ran in {case.mode}"
        run.backend.close()
        run.changes.undo()

    def check_scheduler_counts_steps(self, context: Context) -> None:
        """Check that a schedule counts optimizer steps, at any number of ranks and micro-batches."""
        run = self._start(context, self._case(windows=[4, 4, 2], accumulation=4), scheduled=True)
        rates = [run.optimizer.param_groups[0]["lr"] for _ in run.steps()]
        expected = [RATE * (1 - step / 3) for step in (1, 2, 3)]
        assert rates == expected, f"scheduler: learning rates {rates}, expected {expected}"
        run.backend.close()

    def check_resume(self, context: Context) -> None:
        """Check that a run resumed from `state_dict` continues as if it had not stopped."""
        self._check_resume(context, self._case(windows=[2] * 6, accumulation=2, counted=True), make_optimizer)
        self._check_resume(context, self._case(windows=[2] * 6, accumulation=2, clip=0.05), make_adamw)

    def _check_resume(self, context: Context, case: Case, make: Callable[[nn.Module], Optimizer]) -> None:
        run = self._start(context, case, scheduled=True, make=make)
        steps = [run.weights() for _ in run.steps()]
        run.backend.close()
        stopped = self._start(context, case, scheduled=True, make=make)
        for _ in zip(range(3), stopped.steps(), strict=False):
            pass
        state, backend_state = deepcopy(
            full_state_dict((stopped.prepared.state_dict(), stopped.backend.state_dict()))
        )
        stopped.backend.close()
        resumed = self._start(context, case, scheduled=True, make=make, seed=1)
        resumed.prepared.load_state_dict(state)
        resumed.backend.load_state_dict(backend_state)
        for step, _ in enumerate(resumed.steps(skip=3), start=3):
            self._assert_close(steps[step], resumed.weights(), f"resume: weights after step {step + 1}")
        resumed.backend.close()

    def check_average(self, context: Context) -> None:
        """Check an average of the weights: applied to the model, saved and loaded, and the mean of all updates."""
        run = self._start(context, self._case(windows=[1] * 5))
        check_average(run, self._assert_close)
        run.backend.close()

    def check_two_models(self, context: Context) -> None:
        """Check two models under one optimizer, prepared in two calls: they train like one model, or are refused."""
        if self.trains_models_together:
            for counted in (False, True):
                self._check_two_models(
                    context, self._case(windows=[2, 2, 1], accumulation=2, counted=counted)
                )
            return
        case = self._case(windows=[1])
        backend = self._backend(context, case)
        model = tiny_model(case, self.dtype, seed=0)
        try:
            backend.prepare([model.first, model.last], [make_optimizer(model)], [])
        except PairingError:
            backend.close()
            return
        raise AssertionError(
            "two models of one optimizer: the backend must train them together or raise a PairingError"
        )

    def _check_two_models(self, context: Context, case: Case) -> None:
        expected = train_plainly(case, context.ranks("reads").size, self.dtype)
        backend = self._backend(context, case)
        model = tiny_model(case, self.dtype, seed=0)
        optimizer = make_optimizer(model)
        first, last = backend.prepare([model.first, model.last], [], [])
        (pair,) = backend.prepare([], [optimizer], [])
        for step, window in enumerate(make_windows(case, context.ranks("reads").size, self.dtype)):
            for i, by_rank in enumerate(window):
                backend.window.begin(is_last=i + 1 == len(window))
                x, y = (t.to(context.device) for t in by_rank[context.ranks("reads").index])
                with held(backend, first), held(backend, last):
                    loss, count = loss_and_count(case, last.model(torch.tanh(first.model(x))), y)
                    backend.backward(loss, count=count)
                pair.optimizers[0].step()
                pair.optimizers[0].zero_grad()
            found = named(first=whole_weights(first), last=whole_weights(last))
            self._assert_close(expected[step].weights, found, f"two models: step {step + 1}")
        backend.close()

    def check_gan(self, context: Context) -> None:
        """Check a generator and a discriminator that train in turns; the discriminator is frozen in between."""
        for case in (self._case(windows=[1] * 4), self._case(windows=[2, 2, 1], accumulation=2, clip=0.2)):
            self._check_gan(context, case)

    def _check_gan(self, context: Context, case: Case) -> None:
        expected = train_gan_plainly(case, context.ranks("reads").size, self.dtype)
        backend = self._backend(context, case)
        generator, discriminator = make_gan(case, self.dtype)
        g, d = backend.prepare(
            [generator, discriminator], [make_optimizer(generator), make_optimizer(discriminator)], []
        )
        for step, window in enumerate(gan_batches(case, context.ranks("reads").size, self.dtype)):
            for i, by_rank in enumerate(window):
                noise, real = (t.to(context.device) for t in by_rank[context.ranks("reads").index])
                backend.window.begin(is_last=i + 1 == len(window))
                with held(backend, g), held(backend, d):
                    d.backward(discriminator_loss(d.model(real), d.model(g.model(noise).detach())))
                clip_and_step(d, case)
                discriminator.requires_grad_(False)
                with held(backend, g), held(backend, d):
                    g.backward(generator_loss(d.model(g.model(noise))))
                clip_and_step(g, case)
                discriminator.requires_grad_(True)
            found = named(g=whole_weights(g), d=whole_weights(d))
            self._assert_close(expected[step], found, f"gan of {case}: step {step + 1}")
        backend.close()

    def check_cleared_gradients(self, context: Context) -> None:
        """Check that gradients cleared instead of a step leave no trace in the next step."""
        case = self._case(windows=[1] * 3)
        expected = train_plainly(case, context.ranks("reads").size, self.dtype)
        run = self._start(context, case)
        for step, _ in enumerate(run.steps()):
            self._assert_close(expected[step].weights, run.weights(), f"cleared gradients: step {step + 1}")
            run.backend.window.begin()
            x = torch.ones(2, NUM_FEATURES, dtype=self.dtype, device=context.device)
            run.prepared.backward(run.prepared.model(x).sum())
            run.optimizer.zero_grad()
        run.backend.close()

    def check_failed_micro_batch(self, context: Context) -> None:
        """Check that gradients cleared after an exception are in no step, and that `close` ends the window."""
        case = self._case(windows=[2] * 3, accumulation=2)
        expected = train_plainly(case, context.ranks("reads").size, self.dtype)
        run = self._start(context, case)
        x = torch.ones(2, NUM_FEATURES, dtype=self.dtype, device=context.device)
        for step, _ in enumerate(run.steps()):
            self._assert_close(expected[step].weights, run.weights(), f"failed micro-batch: step {step + 1}")
            run.backend.window.begin()
            with run.prepared.no_sync():
                run.prepared.backward(run.prepared.model(x).sum())
            run.backend.window.begin()
            run.backend.window.fail()
            run.optimizer.zero_grad()
        run.backend.window.begin()
        run.backend.close()
        run.backend.window.begin()
        assert run.backend.window.length == 1, "close: the open window goes on, and with it what was released"

    def check_nonfinite_gradients(self, context: Context) -> None:
        """Check that a NaN of one rank skips the step on all, or is an error on all, if the backend looks for it."""
        treatments: tuple[OnNonfinite, ...] = ("skip", "raise")
        for treatment in treatments:
            run = self._start(context, self._case(windows=[1] * 2), on_nonfinite=treatment)
            if "on_nonfinite" not in run.backend.applied():  # the Accelerator refuses to ask it
                run.backend.close()
                return
            windows = run.steps()
            next(windows)
            before = run.weights()
            if context.ranks("reads").index == 0:
                for x, _ in run.windows[1][0]:
                    x.fill_(torch.nan)
            what = f"on_nonfinite={treatment!r}"
            try:
                next(windows)
                assert treatment == "skip", f"{what}: a step on a NaN was no NonFiniteGradientError"
                assert run.optimizer.was_skipped, f"{what}: a step on a NaN was not skipped"
            except NonFiniteGradientError:
                assert treatment == "raise", f"{what}: a step on a NaN was an error"
            self._assert_close(before, run.weights(), f"{what}: weights after a NaN", 0.0)
            run.backend.close()

    def check_gathered(self, context: Context) -> None:
        """Check that `gathered` gives full parameters, and that all ranks keep the values written by rank 0."""
        case = self._case(windows=[1])
        whole = {name: tuple(p.shape) for name, p in tiny_model(case, self.dtype, seed=0).named_parameters()}
        run = self._start(context, case)
        with run.prepared.gathered(write=True):
            shapes = {name: tuple(p.shape) for name, p in run.prepared.unwrap().named_parameters()}
            if context.topology.is_main:
                for parameter in run.prepared.unwrap().parameters():
                    nn.init.constant_(parameter, 0.5)
        assert shapes == whole, f"gathered: parameters of shapes {shapes}, expected {whole}"
        halves = {name: torch.full(shape, 0.5, dtype=self.dtype) for name, shape in whole.items()}
        self._assert_close(halves, run.weights(), "gathered: what rank 0 wrote")
        run.backend.close()

    def check_untrained_model(self, context: Context) -> None:
        """Check that a model without an optimizer computes the same as before."""
        model = tiny_model(self._case(windows=[1]), self.dtype, seed=0).requires_grad_(False)
        x = torch.ones(2, NUM_FEATURES, dtype=self.dtype)
        expected = model(x)
        backend = self._backend(context, self._case(windows=[1]))
        (prepared,) = backend.prepare([model], [], [])
        with torch.no_grad():
            found = prepared.model(x.to(context.device)).cpu()
        self._assert_close({"output": expected}, {"output": found}, "untrained model")
        backend.close()

    def check_unwrap(self, context: Context) -> None:
        """Check that `unwrap` returns the user's module, with the names of the state dict."""
        run = self._start(context, self._case(windows=[1]))
        assert run.prepared.unwrap() is run.model, "unwrap: another module than the user's"
        own = run.model.state_dict(keep_vars=True)  # an empty `get_extra_state` may be left out
        names, expected = (
            {name for name, value in state.items() if value is not None}
            for state in (run.prepared.state_dict()["model"], own)
        )
        assert names == expected, f"state_dict: names {sorted(names)}, expected {sorted(expected)}"
        run.backend.close()

    def _case(self, **options: Any) -> Case:
        return Case(layer=self.layer, **options)

    def _backend(self, context: Context, case: Case, on_nonfinite: OnNonfinite = "warn") -> Backend:
        window = AccumulationWindow(case.accumulation, on_nonfinite=on_nonfinite)
        return self.backend(
            context, choose_policy(case.mode, context.device, _SCALING), window=window, settings=self.settings
        )

    def _start(
        self,
        context: Context,
        case: Case,
        *,
        scheduled: bool = False,
        seed: int = 0,
        make: Callable[[nn.Module], Optimizer] = make_optimizer,
        on_nonfinite: OnNonfinite = "warn",
    ) -> Run:
        backend = self._backend(context, case, on_nonfinite)
        model = tiny_model(case, self._dtype_of(case), seed=seed)
        optimizer = make(model)
        schedulers = [LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 3))] if scheduled else []
        changes = BlockChanges(case.changes)
        changes.apply([model])
        (prepared,) = backend.prepare([model], [optimizer], schedulers)
        windows = make_windows(case, context.ranks("reads").size, self._dtype_of(case))
        return Run(
            context=context,
            case=case,
            backend=backend,
            prepared=prepared,
            model=model,
            changes=changes,
            windows=windows,
        )

    def _dtype_of(self, case: Case) -> torch.dtype:
        return self.dtype if case.mode == "no" else torch.float32

    def _assert_close(
        self, expected: dict[str, Tensor], found: dict[str, Tensor], what: str, tolerance: float | None = None
    ) -> None:
        allowed = self.tolerance if tolerance is None else tolerance
        for name, value in expected.items():
            difference = ((value - found[name]).abs() / value.abs().clamp(min=1.0)).max().item()
            assert difference <= allowed, f"{what}: {name} differs by {difference}, allowed {allowed}"
