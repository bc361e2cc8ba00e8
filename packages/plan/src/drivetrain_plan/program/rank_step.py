"""Run the training step of one rank on tensors without data, and return its figures."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from drivetrain_backends.fsdp.compat import gathered_parameter, sharded_parameters
from drivetrain_dispatch.compat import FakeTensorMode, tree_leaves
from drivetrain_plan.choice import PlanChoice
from drivetrain_plan.compat import FakeMeshes, fake_meshes
from drivetrain_plan.model.source import BuiltSource
from drivetrain_plan.model.training_modes import OPTIMIZERS, Parameters, TrainingMode
from drivetrain_plan.program.fake_tensors import explain_errors, give_fake_tensors
from drivetrain_plan.program.figures import StepFigures
from drivetrain_plan.program.rank_model import RankModel, build_rank, sharding_sizes
from drivetrain_plan.program.tally import StepTally

# Windows that begin a backward: what is outside of blocks, and the first block. They have as many gradients however
# many blocks there are; those behind them have the more.
_BEGIN = 2


def run_rank(
    source: BuiltSource,
    choice: PlanChoice,
    mode: TrainingMode,
    *,
    num_tokens: int,
    optimizer: str | Callable[[Parameters], torch.optim.Optimizer] = "adamw",
    kept: Mapping[tuple[str, int], int] | None = None,
    is_sharded: bool | None = None,
    meshes: FakeMeshes | None = None,
) -> StepFigures:
    """Return the figures of the first rank's step: the model divided and sharded, two steps, the second counted.

    Of a mode that does not train, the forward without autograd.

    Args:
        source: The source of the model.
        choice: The division of it; its accumulation is not run.
        mode: The dtypes of weights and computing.
        num_tokens: The number of tokens of a sample, if samples have tokens.
        optimizer: The name of the optimizer, of `OPTIMIZERS`, or a function that makes it.
        kept: The number of blocks of each make that the model keeps; None for all.
        is_sharded: Whether FSDP holds the model; None for what the choice's backend does.
        meshes: The function of `fake_meshes`, for several programs; None for this one alone.

    Raises:
        CostError: A forward depends on the values of tensors.
        PlanError: The model cannot be divided so.
    """
    shards = choice.by_blocks if is_sharded is None else is_sharded
    make_optimizer = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    with fake_meshes() if meshes is None else nullcontext(meshes) as mesh_of:
        mesh = mesh_of(**sharding_sizes(choice)) if shards else None
        rank = build_rank(source, choice, mode, kept, mesh=mesh)
        model = rank.module
        tally = StepTally()
        for one in rank.ranks:
            one.tally = tally
        with FakeTensorMode(allow_non_fake_inputs=True):
            if shards:
                model.to_empty(device="cpu")
            give_fake_tensors(model)
            with tally:
                tally.add(map(_local, (*model.parameters(), *model.buffers())))
                weights = tally.live_bytes
                inputs = source.inputs(model, choice.micro_batch, num_tokens)
                tally.add(one for one in tree_leaves(inputs) if isinstance(one, Tensor))
                batch = tally.live_bytes - weights
                with explain_errors(model):
                    if mode.trains:
                        figures = _count_step(rank, inputs, source.loss_of, tally, make_optimizer)
                    else:
                        figures = _count_forward(model.eval(), inputs, tally)
                return figures.changed(weights=weights, inputs=batch)


def _count_forward(model: nn.Module, inputs: Mapping[str, Any], tally: StepTally) -> StepFigures:
    """Run a forward without autograd, and return its figures."""
    with torch.no_grad():
        _gather_once(model, tally)
        tally.restart()
        held = tally.live_bytes
        model(**inputs)
    return StepFigures(forward=tally.peak_bytes - held)


def _count_step(
    rank: RankModel,
    inputs: Mapping[str, Any],
    loss_of: Callable[[Any], Tensor],
    tally: StepTally,
    make_optimizer: Callable[[Parameters], torch.optim.Optimizer],
) -> StepFigures:
    """Run a step whose optimizer has states, and return its figures; FSDP gathers once before it."""
    model = rank.module
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(trained)
    counted = _Counted(rank.blocks, trained, tally)
    _create_states(optimizer, trained)
    _gather_once(model, tally)
    counted.begin()
    loss = loss_of(model(**inputs))
    counted.end_forward()
    loss.backward()
    del loss
    counted.end_backward()
    optimizer.step()
    counted.end_step()
    optimizer.zero_grad()
    leaves = tree_leaves(list(optimizer.state.values()))
    states = sum(_size_bytes(_local(leaf)) for leaf in leaves if isinstance(leaf, Tensor))
    return counted.figures(states=states)


def _gather_once(model: nn.Module, tally: StepTally) -> None:
    """Have FSDP gather for the first time, into memory that is kept, and follow its size; do nothing without FSDP."""
    for block in model.modules():
        if isinstance(block, FSDPModule):
            block.unshard()
            block.reshard()
    tally.follow(gathered_parameters(model))


def _create_states(optimizer: torch.optim.Optimizer, trained: list[nn.Parameter]) -> None:
    """Have an optimizer create its states, in a step on gradients that are dropped."""
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


class _Counted:
    """The peaks and counts of one step, phase by phase."""

    def __init__(self, blocks: Iterable[nn.Module], trained: list[nn.Parameter], tally: StepTally) -> None:
        self._tally, self._trained = tally, trained
        self._peaks: list[float] = []  # of the windows of the backward, which blocks begin
        self._values: dict[str, float] = {}
        self._held = 0
        for parameter in trained:
            if not isinstance(parameter, DTensor):
                parameter.register_post_accumulate_grad_hook(tally.note_gradient)
        for block in blocks:
            block.register_forward_hook(self._watch)

    def begin(self) -> None:
        """Begin a step: nothing is allocated but what lasts."""
        self._tally.gradient_bytes = 0
        self._tally.restart()
        self._tally.clear_counts()
        self._held = self._tally.live_bytes
        self._peaks.clear()
        self._values = {}

    def end_forward(self) -> None:
        """Note the forward's peak, and what it leaves."""
        self._values["forward"] = self._tally.peak_bytes - self._held
        self._values["activations"] = self._tally.live_bytes - self._held
        self._tally.restart(keeps_computing=True)

    def end_backward(self) -> None:
        """Note the backward's peaks, in its first windows and its others, and what was computed and sent."""
        self._end_window()
        self._values["early"] = max(self._peaks[:_BEGIN]) - self._held
        self._values["late"] = max(self._peaks[_BEGIN:] or self._peaks[-1:]) - self._held
        self._values["computing"] = self._tally.computing_bytes - self._held
        self._values |= {"flops": self._tally.flops, "moved": self._tally.moved_bytes}
        self._values["operations"] = self._tally.num_operations
        self._values["gradients"] = self._gradients()
        self._tally.restart()
        self._tally.moved_bytes = 0

    def end_step(self) -> None:
        """Note the peak of the optimizer's step."""
        self._values["stepping"] = self._tally.peak_bytes - self._held
        self._values["stepped"] = self._tally.moved_bytes

    def figures(self, **values: float) -> StepFigures:
        """Return the figures, with further values."""
        payloads, calls = dict(self._tally.payloads), dict(self._tally.calls)
        return StepFigures(**self._values, **values, payloads=payloads, calls=calls)

    def _watch(self, _: nn.Module, args: object, output: Any) -> None:
        """Begin a window where the backward comes to a block's outputs."""
        del args
        tensor = next(
            (one for one in tree_leaves(output) if isinstance(one, Tensor) and one.requires_grad), None
        )
        if tensor is not None:
            tensor.register_hook(self._end_window)

    def _end_window(self, _: object = None) -> None:
        self._peaks.append(self._tally.peak_bytes)
        self._tally.gradient_bytes = self._gradients()
        self._tally.restart(keeps_computing=True)

    def _gradients(self) -> int:
        held = {_local(p.grad).untyped_storage() for p in self._trained if p.grad is not None}
        return sum(storage.nbytes() for storage in held)


def gathered_parameters(model: nn.Module) -> list[Tensor]:
    """Return the whole parameters that FSDP has gathered once, whose memory it frees and allocates again."""
    blocks = (module for module in model.modules() if isinstance(module, FSDPModule))
    gathered = (gathered_parameter(one) for block in blocks for one in sharded_parameters(block))
    return [_local(one) for one in gathered if one is not None]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _size_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
