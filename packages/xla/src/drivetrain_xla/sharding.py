"""Tensors cut over the devices of one process: batches by rows, and under FSDP parameters and outputs of blocks.

Annotations change where XLA computes, never what: one that fits badly costs time alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain_backends.composed.strategy import ModelTransform
from drivetrain_backends.modules.wrap_policy import plan_blocks
from drivetrain_xla.compat import forward_pre_hooks, remembering_hooks, sharding_of, tree_leaves
from drivetrain_xla.compilations import Compilation
from drivetrain_xla.library import AXIS, Library
from drivetrain_xla.steps import Graphs


class Sharder:
    """The cutter of tensors over the mesh of all devices."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def cut_rows(self, values: Any) -> None:
        """Cut tensors along dimension 0, unless they are cut already."""
        for leaf in tree_leaves(values):
            if (
                isinstance(leaf, Tensor)
                and leaf.dim()
                and leaf.device.type == "xla"
                and not self.is_cut(leaf)
            ):
                self._mark(leaf, 0)

    def cut_as_parameter(self, tensor: Tensor) -> None:
        """Cut a tensor along its longest dimension, as SpmdFullyShardedDataParallel cuts parameters."""
        if tensor.dim() and not self.is_cut(tensor):
            self._mark(tensor, tensor.shape.index(max(tensor.shape)))

    def is_cut(self, tensor: Tensor) -> bool:
        """Return whether something was said of how a tensor is cut."""
        return sharding_of(self._library.torch_xla, tensor) != ""

    def _mark(self, tensor: Tensor, dim: int) -> None:
        axes = tuple(AXIS if each == dim else None for each in range(tensor.dim()))
        self._library.spmd.mark_sharding(tensor, self._library.mesh, axes)


class WatchInputs(ModelTransform):
    """Tell a run's graphs the shapes that a model is called with, and cut them over devices."""

    def __init__(self, graphs: Graphs, sharder: Sharder | None) -> None:
        self._graphs, self._sharder = graphs, sharder
        self._removers: dict[nn.Module, Callable[[], None]] = {}

    def apply(self, model: nn.Module) -> nn.Module:
        """Register a hook that looks at what the model is given."""
        watch = InputWatch(self._graphs, self._sharder)
        self._removers[model] = model.register_forward_pre_hook(watch, with_kwargs=True).remove
        return model

    def release(self, model: nn.Module) -> None:
        """Remove the hook."""
        if (remove := self._removers.pop(model, None)) is not None:
            remove()


class InputWatch:
    """The hook of `WatchInputs`; `compilations_of` finds the run's graphs by it."""

    def __init__(self, graphs: Graphs, sharder: Sharder | None) -> None:
        self.graphs = graphs
        self._sharder = sharder

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Look at what the model is called with."""
        del model
        self.graphs.note_forward(describe_shapes(args, kwargs))
        if self._sharder is not None:
            self._sharder.cut_rows((args, dict(kwargs)))


def compilations_of(model: nn.Module) -> tuple[Compilation, ...]:
    """Return what has been compiled so far in the run that trains a prepared model, each with its cause.

    Raises:
        ValueError: The model is not prepared by the XLA backend.
    """
    for hook in forward_pre_hooks(model):
        if isinstance(hook, InputWatch):
            return tuple(hook.graphs.counter.found)
    raise ValueError(
        f"compilations_of({type(model).__name__}): the model is not prepared by backend='xla'; pass what "
        "accelerator.prepare() returned, before end_training()"
    )


class ShardParameters(ModelTransform):
    """Cut a model's parameters over devices by SpmdFullyShardedDataParallel, block by block.

    Its wrappers cut what they are given and add a barrier behind each block's backward; they are not kept, so that
    the model stays the user's module. A hook does what their forward would.
    """

    def __init__(self, library: Library, sharder: Sharder, classes: tuple[str, ...] | None) -> None:
        self._library, self._sharder, self._classes = library, sharder, classes
        self._removers: dict[nn.Module, list[Callable[[], Any]]] = {}
        self._blocks: dict[nn.Module, Sequence[str]] = {}

    def plan(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Choose the blocks."""
        del optimizers
        self._blocks = {
            model: plan_blocks(model, self._classes, asked="xla.blocks", others=models).blocks
            for model in models
        }

    def apply(self, model: nn.Module) -> nn.Module:
        """Cut the parameters of each block, inner ones first, then those that are left."""
        removers = self._removers.setdefault(model, [])
        for module in (*map(model.get_submodule, self._blocks[model]), model):
            barriers: list[Callable[[], Any]] = []
            with remembering_hooks(module, barriers):
                self._library.fully_sharded(module, mesh=self._library.mesh, shard_output=_leave)
            removers += [*barriers, module.register_forward_hook(self._cut_output).remove]
            for remove in barriers if module is model else ():  # no backward follows that of the whole model
                remove()
        return model

    def release(self, model: nn.Module) -> None:
        """Remove the hooks; parameters stay cut."""
        for remove in self._removers.pop(model, ()):
            remove()

    def _cut_output(self, module: nn.Module, args: object, output: Any) -> None:
        del module, args
        self._sharder.cut_rows(output)


def describe_shapes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Return the name, shape and dtype of each tensor that a model is called with."""
    named = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
    return [
        f"{name}: {tuple(leaf.shape)} {str(leaf.dtype)[6:]}"
        for name, value in named.items()
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor)
    ]


def _leave(output: object, mesh: object) -> None:
    """Leave an output as it is; the hook cuts outputs of any nesting."""
