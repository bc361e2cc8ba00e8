"""Sharded models that outlast their training: torch cannot undo the sharding.

`close` ends the training of a model and leaves its parameters in shards. A later `prepare` of the same backend finds
the model here, and trains it from its shards.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from drivetrain_backends.fsdp.compat import forward_is_open
from drivetrain_backends.fsdp.guards.block_order import CollectiveOrder
from drivetrain_backends.fsdp.guards.forward_writes import ForwardWrites
from drivetrain_backends.fsdp.guards.misuse import refuse_misuse
from drivetrain_backends.fsdp.models.fp8_gather import Fp8Gather
from drivetrain_backends.fsdp.models.sharded_model import ShardedModel
from drivetrain_backends.fsdp.models.sharded_parameter import ParameterHooks, ProgramUse
from drivetrain_backends.fsdp.shard import Sharding, shard_model
from drivetrain_backends.modules.wrap_policy import BlockPlan, class_name
from drivetrain_backends.settings import FSDPSettings
from drivetrain_precision.fp8.protocol import gathers_in_fp8
from drivetrain_state import Context


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True, eq=False)
class RetainedModel:
    """A sharded model, with the objects that live as long as the model."""

    sharded: ShardedModel  # the sharded model with its blocks and parameters
    hooks: ParameterHooks  # the users' hooks on its parameters
    fp8_gather: Fp8Gather  # the weights that are gathered in 8 bits
    use: ProgramUse  # the use of the parameters by a program's own code
    writes: ForwardWrites  # the writes of forwards into gathered parameters


class RetainedModels:
    """The models that a backend has sharded; a model is kept only as long as the program holds it."""

    def __init__(self) -> None:
        # Weak values too, because a RetainedModel holds its module, whose forward hook holds the RetainedModel.
        self._found: WeakKeyDictionary[nn.Module, ref[RetainedModel]] = WeakKeyDictionary()

    def find(self, model: nn.Module) -> RetainedModel | None:
        """Return the retained model of the user's module; None if this backend has not sharded the module."""
        found = self._found.get(model)
        return None if found is None else found()

    def begin_again(self, models: Iterable[nn.Module]) -> None:
        """Release the parameters of retained models that forwards have gathered since `close`."""
        for retained in filter(None, map(self.find, models)):
            retained.sharded.reshard()
            retained.sharded.check(thoroughly=True)

    def add(self, retained: RetainedModel) -> None:
        """Retain a model, unless it has fp8 layers, which `close` converts to plain ones."""
        module = retained.sharded.module
        if not any(map(gathers_in_fp8, module.modules())):
            self._found[module] = ref(retained)


def shard_for_good(
    model: nn.Module,
    plan: BlockPlan,
    sharding: Sharding,
    context: Context,
    settings: FSDPSettings,
    *,
    islands: frozenset[nn.Module],
    order: CollectiveOrder,
) -> tuple[RetainedModel, dict[Tensor, nn.Parameter]]:
    """Shard a model and register the hooks on its forwards. Called on all ranks.

    The `islands` must compute in fp32 already. Return the sharded model, and the new parameter of each former one.
    """
    before = dict(model.named_parameters())
    sharded = shard_model(model, plan, sharding, context, islands)
    hooks = ParameterHooks(sharded, before)
    refuse_misuse(sharded)
    order.watch(sharded)
    fp8_gather = Fp8Gather(
        sharded,
        note=order.noting("scale", f"the weights of {class_name(model)}"),
        shares_scales=not settings.offload,  # the copy of a shard on the device has no scale
    )
    divided = [(name, p) for name, p in sharded.parameters.items() if name not in sharded.plain]
    retained = RetainedModel(
        sharded=sharded,
        hooks=hooks,
        fp8_gather=fp8_gather,
        use=ProgramUse(divided, partial(forward_is_open, sharded.blocks[-1])),
        writes=ForwardWrites(sharded),
    )
    _set_prefetch(sharded, settings.prefetch)
    model.register_forward_pre_hook(_allocate_outside_inference_mode(sharded), prepend=True)
    model.register_forward_hook(_finish_without_gradients(retained, order))
    return retained, {former: sharded.parameters[name] for name, former in before.items()}


def _finish_without_gradients(retained: RetainedModel, order: CollectiveOrder) -> Callable[..., None]:
    """Return a hook for the end of a forward that no backward follows.

    The hook compares the gathered blocks across ranks, because no later step may do so. It also frees what FSDP keeps
    for a backward; otherwise requires_grad would be set on parameters that the next gather replaces.
    """

    def finish(*_: object) -> None:
        if not torch.is_grad_enabled():
            order.compare_gathered()
            retained.sharded.reshard()

    return finish


def _allocate_outside_inference_mode(sharded: ShardedModel) -> Callable[..., None]:
    """Return a hook that makes FSDP allocate its gather buffers once, as tensors that a training step may use.

    FSDP allocates the buffers at the first forward; if that runs under `inference_mode`, training would fail later.
    """
    is_made = False

    def allocate_buffers(*_: object) -> None:
        nonlocal is_made
        if is_made or not torch.is_inference_mode_enabled():
            is_made = True
            return
        with torch.inference_mode(False):
            for block in sharded.blocks:
                block.unshard()
                block.reshard()
        is_made = True

    return allocate_buffers


def _set_prefetch(sharded: ShardedModel, depth: int | None) -> None:
    """Let each block prefetch the next `depth` blocks, in forward and backward; None keeps torch's own order."""
    if depth is None:
        return
    *blocks, root = sharded.blocks
    forward, backward = [root, *blocks], [root, *reversed(blocks)]
    for index, block in enumerate(forward):
        block.set_modules_to_forward_prefetch(forward[index + 1 : index + 1 + depth])
    for index, block in enumerate(backward):
        # An empty list would mean torch's own order; the block itself is already gathered by then.
        block.set_modules_to_backward_prefetch(backward[index + 1 : index + 1 + depth] or [block])
