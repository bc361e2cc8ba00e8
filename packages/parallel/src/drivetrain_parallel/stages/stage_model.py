"""A model of which a rank holds some stages: its forward runs whole, on what this rank has.

Outside of the running stage nothing is computed: parameters, blocks and what follows from them are absent tensors.
The first block of a stage takes what the stage before sent, in place of the hidden states that would be absent. What
the first block of the next stage is called with is sent there. The loss of the last stage follows from what it
computed alone, or an absent tensor would reach it, which is an error.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from drivetrain_parallel.compat import exchanged_parameters, tree_map_only
from drivetrain_parallel.errors import ParallelPlanError
from drivetrain_parallel.layers.divided_layers import holds_experts, with_forward
from drivetrain_parallel.planning.found_styles import make_of
from drivetrain_parallel.planning.regions import drops
from drivetrain_parallel.sequences.block_calls import BlockCall
from drivetrain_parallel.stages.absent import AbsentTensor, AbsentValueError, absent_like
from drivetrain_parallel.stages.stage_plan import StagePlan
from drivetrain_parallel.streams import RankStream


def keep_stages(model: nn.Module, plan: StagePlan, rank: int, *, device: torch.device) -> "StageModel":
    """Have a model hold the stages of one rank alone, in place; return what runs them. Nothing is sent.

    Parameters and buffers of other ranks' stages are no longer listed by the model. Their attributes are absent
    tensors, which say they are on `device`.
    """
    gone = {name for name, stage in plan.outside.items() if plan.ranks[stage] != rank}
    blocks_gone = tuple(
        block
        for stage in range(plan.num_stages)
        if plan.ranks[stage] != rank
        for block in plan.blocks_of(stage)
    )
    for name, module in list(model.named_modules(remove_duplicate=False)):
        inside = any(name == block or name.startswith(f"{block}.") for block in blocks_gone)
        prefix = f"{name}." if name else ""
        for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if rank not in plan.holders[prefix + key]:
                delattr(module, key)
                vars(module)[key] = _absent(parameter, device, prefix + key)
        for key, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if inside or name in gone:
                delattr(module, key)
                vars(module)[key] = _absent(buffer, device, prefix + key)
    return StageModel(model, plan, rank, device)


def _absent(tensor: Tensor, device: torch.device, name: str) -> AbsentTensor:
    return AbsentTensor(torch.empty_like(tensor, device="meta"), device, name)


class StageModel:
    """The stages of one rank, run one at a time.

    Args:
        model: The model, which `keep_stages` has left with this rank's stages.
        plan: The plan of the stages.
        rank: The position of this rank among those of the plan.
        device: The device that the model runs on.
    """

    def __init__(self, model: nn.Module, plan: StagePlan, rank: int, device: torch.device) -> None:
        self.plan, self.rank = plan, rank
        self.stages = tuple(stage for stage, one in enumerate(plan.ranks) if one == rank)
        self._running: int | None = None
        self._receive: Callable[[Tensor], Tensor] | None = None
        self._outputs: list[Tensor] = []  # of the running stage: at most one
        self._is_hooked = False
        self._known: dict[object, Any] = {}  # what blocks of other stages return, by their make and the shape
        self._model = model
        is_random = any(drops(model.get_submodule(name)) for name in plan.blocks)
        # Blocks of other ranks draw other numbers: otherwise they would drop the same elements of each.
        self._stream = RankStream(rank, device, is_used=is_random)
        makes: dict[object, int] = {}
        for stage in range(plan.num_stages):
            for name in plan.blocks_of(stage):
                make = makes.setdefault(make_of(model.get_submodule(name)), len(makes))
                self._exchange(name, stage, make)
        for name, stage in plan.outside.items():
            if any(one != stage for one in self.stages):
                self._exchange_outside(name, stage)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the object itself: a copy of the model computes the same stages, as its blocks' classes do."""
        return self

    @property
    def is_running(self) -> bool:
        """True while a stage runs."""
        return self._running is not None

    def weights(self, stage: int) -> list[nn.Parameter]:
        """Return the trainable parameters of a stage, and those outside of blocks that this rank holds."""
        others = [name for one in self.stages if one != stage for name in self.plan.blocks_of(one)]
        return [
            parameter
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad and not any(name.startswith(f"{block}.") for block in others)
        ]

    @contextmanager
    def running(self, stage: int | None) -> Generator[None]:
        """Run the blocks of one stage in the block, or of none."""
        before, self._running = self._running, stage
        try:
            yield
        finally:
            self._running = before

    def run(
        self, stage: int, call: Callable[[], Any], receive: Callable[[Tensor], Tensor]
    ) -> tuple[Any, Tensor | None]:
        """Run a call of the model, of which one stage computes.

        Args:
            stage: The stage that computes.
            call: The function that calls the model.
            receive: A function that returns what the stage before has sent; its argument has the same shape, dtype
                and device.

        Returns:
            What the call returned, and what the stage hands on; None from the last stage.

        Raises:
            ParallelPlanError: The call needs what another stage computes, or does not run the stage's blocks.
        """
        self._hook()
        self._receive, self._outputs = (receive if stage else None), []
        self._stream.forget()
        try:
            with self.running(stage):
                found = call()
        except AbsentValueError:
            if not self._outputs or self._receive is not None:
                raise
            found = None  # as in a loss that picks some logits: the last stage computes it
        finally:
            self._stream.close()
        output = self._outputs.pop() if self._outputs else None
        is_last = stage == self.plan.num_stages - 1
        if self._receive is not None or not (is_last or output is not None):
            missing = self.plan.blocks_of(stage if self._receive is not None else stage + 1)[0]
            raise ParallelPlanError(
                f"a forward did not call {missing}, where a stage begins: a model that leaves blocks out does not "
                "train in stages; leave parallel.pipeline out"
            )
        if isinstance(output, AbsentTensor):
            raise ParallelPlanError(f"{self.plan.blocks_of(stage + 1)[0]} takes {not_handed_on(output)}")
        return found, output

    def _exchange(self, name: str, stage: int, make: int) -> None:
        """Have a block run in its own stage alone; the call of a stage's first block ends the stage before."""
        is_first = name == self.plan.blocks_of(stage)[0]

        def forward(block: nn.Module, whole: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if stage != self._running:
                if is_first and stage - 1 == self._running and not self._outputs:
                    self._outputs.append(BlockCall(args, kwargs).states)
                return self._pass_over(name, make, block, whole, args, kwargs)
            if (missing := find_absent((args, kwargs))) is not None:
                raise ParallelPlanError(f"{name}, of stage {stage}, takes {not_handed_on(missing)}")
            self._stream.open()
            try:  # a checkpoint ends a block that it runs again by an exception
                return whole(block, *args, **kwargs)
            finally:
                self._stream.close()

        with_forward(self._model.get_submodule(name), forward)

    def _exchange_outside(self, name: str, stage: int) -> None:
        """Have a module outside of the blocks compute in its own stage alone, though this rank holds its weights."""
        absent = partial(absent_like, of=name)

        def forward(module: nn.Module, whole: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._running in (None, stage):
                return whole(module, *args, **kwargs)
            with exchanged_parameters(module, absent, with_buffers=True):
                return whole(module, *args, **kwargs)

        with_forward(self._model.get_submodule(name), forward)

    def _pass_over(
        self,
        name: str,
        make: int,
        block: nn.Module,
        whole: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return what a block would return, without computing it: all blocks of a make return the same."""
        states = BlockCall(args, kwargs).states
        plain = [one for one in (*args, *kwargs.values()) if isinstance(one, bool | int | str | None)]
        key = (make, states.dtype, block.training, *(one.shape for one in _leaves((args, kwargs))), *plain)
        if key in self._known:
            return _anew(self._known[key])
        absent = partial(absent_like, of=name)
        changed = BlockCall(args, kwargs).changed(lambda one: absent(one) if one is states else one)

        def like_tokens(*args: Any, **kwargs: Any) -> Tensor:
            return absent(next(_leaves((args, kwargs))))

        with torch.no_grad(), ExitStack() as stack:
            for module in block.modules():
                stack.enter_context(exchanged_parameters(module, absent, with_buffers=True))
                if holds_experts(module):  # whose exchange asks how many tokens go where
                    vars(module)["forward"] = like_tokens
                    stack.callback(vars(module).pop, "forward")
            output = whole(block, *changed[0], **changed[1])
        absents = [one for one in _leaves(output) if isinstance(one, AbsentTensor)]
        renewed = set(map(id, _leaves(_anew(output))))
        if absents and renewed.isdisjoint(
            map(id, _leaves(output))
        ):  # else a call would receive for another one
            self._known[key] = _anew(output)
        return output

    def _hook(self) -> None:
        """Have each stage take hidden states. Late: outside of what other transforms do to blocks."""
        if self._is_hooked:
            return
        self._is_hooked = True
        for stage in filter(None, self.stages):
            first = self._model.get_submodule(self.plan.blocks_of(stage)[0])
            take: Any = torch.compiler.disable(partial(self._take, stage))
            first.register_forward_pre_hook(take, with_kwargs=True, prepend=True)

    def _take(self, stage: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if stage != self._running or self._receive is None:
            return None
        receive, self._receive = self._receive, None
        call = BlockCall(args, kwargs)
        states = call.states
        if not isinstance(states, AbsentTensor):
            raise ParallelPlanError(
                f"{self.plan.blocks_of(stage)[0]} takes another tensor than hidden states first, and stages hand on "
                "hidden states: leave parallel.pipeline out"
            )
        received = states.received = receive(states)
        return call.changed(lambda one: received if one is states else one)


def _anew(value: Any) -> Any:
    """Return absent tensors like those of a value, each of which may receive other values."""
    return tree_map_only(AbsentTensor, lambda one: one.anew(), value)


def _leaves(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of arguments, in tuples, lists and dicts too: faster than torch's own walk."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))


def find_absent(value: Any) -> AbsentTensor | None:
    """Return the first absent tensor in a value, in tuples, lists and dicts too; None without one."""
    return next((one for one in _leaves(value) if isinstance(one, AbsentTensor)), None)


def not_handed_on(tensor: AbsentTensor) -> str:
    """Return why a tensor is absent, and what would do, for an error that begins with what takes it."""
    return (
        f"what follows from {tensor.of}, which another stage has, and stages hand on hidden states alone. If it is "
        "of a module that runs after the blocks, name that in parallel.pipeline_last; if both ends share it, give it "
        "to a module after the blocks too, as head.weight = embedding.weight does; else leave it out of what the "
        "last stage computes, or leave parallel.pipeline out"
    )
