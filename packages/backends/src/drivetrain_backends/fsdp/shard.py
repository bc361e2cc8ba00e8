"""Shard a model one block at a time: no rank holds more than its shards and one full block."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from drivetrain_backends.fsdp.compat import forward_is_open
from drivetrain_backends.fsdp.guards.block_order import CollectiveOrder
from drivetrain_backends.fsdp.guards.forward_writes import ForwardWrites
from drivetrain_backends.fsdp.guards.misuse import refuse_misuse
from drivetrain_backends.fsdp.models.fp8_gather import Fp8Gather
from drivetrain_backends.fsdp.models.sharded_model import ShardedModel, find_places
from drivetrain_backends.fsdp.models.sharded_parameter import ParameterHooks, ProgramUse
from drivetrain_backends.fsdp.plan import DtypePlan, Sharding, TensorStorage
from drivetrain_backends.fsdp.retained_models import RetainedModel
from drivetrain_backends.fsdp.sharded_run import ShardedRun
from drivetrain_backends.modules.packed_weights import is_wrapper, parts_of
from drivetrain_backends.modules.wrap_policy import BlockPlan, class_name
from drivetrain_backends.state_dict.dtensor import broadcast_from_first, broadcast_parts
from drivetrain_parallel import holds_experts
from drivetrain_precision.fp8.protocol import gathers_in_fp8
from drivetrain_state import Context
from drivetrain_weights.meta_init import check_ways, initialise, replace_meta_tensors, tensors_of

_ALIGNMENT = 64  # bytes, the alignment of torch's CPU tensors


class _Sources(NamedTuple):
    """The origin of each tensor's values, the same on all ranks."""

    # Names of tensors on meta on all ranks, which modules initialise alike on every rank.
    initialised: frozenset[str]
    seed: int  # of that initialisation


class Scratch:
    """A memory buffer that fits the largest block.

    If each block allocated and freed its own memory, the freed memory would leave holes between the shards, which
    allocators fill badly: on the CPU, the holes of a model of 400 MiB added up to 275 MiB.
    """

    def __init__(self, device: torch.device, sizes: Iterable[int]) -> None:
        self._memory = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device)
        self._used = 0

    def clear(self) -> None:
        """Begin a new block, and invalidate the tensors of the previous one."""
        self._used = 0

    def like(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory in a tensor's shape."""
        size = tensor.numel() * dtype.itemsize
        found = self._memory[self._used : self._used + size].view(dtype).view(tensor.shape)
        self._used += room_for(tensor, dtype)
        return found


def room_for(tensor: Tensor, dtype: torch.dtype) -> int:
    """Return the number of bytes that `Scratch.like` takes."""
    return -(-tensor.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def shard_for_good(
    model: nn.Module, plan: BlockPlan, run: ShardedRun, islands: frozenset[nn.Module]
) -> RetainedModel:
    """Shard a model, and register the hooks on its forwards. Called on all ranks.

    The `islands` must compute in fp32 already. The run gets the new parameter of each former one.
    """
    before = dict(model.named_parameters())
    sharded = shard_model(model, plan, run.sharding, run.context, islands)
    hooks = ParameterHooks(sharded, before)
    refuse_misuse(sharded)
    run.order.watch(sharded)
    fp8_gather = Fp8Gather(
        sharded,
        note=run.order.noting("scale", f"the weights of {class_name(model)}"),
        shares_scales=not run.settings.offload,  # the copy of a shard on the device has no scale
    )
    divided = [(name, p) for name, p in sharded.parameters.items() if name not in sharded.plain]
    retained = RetainedModel(
        sharded=sharded,
        hooks=hooks,
        fp8_gather=fp8_gather,
        use=ProgramUse(divided, partial(forward_is_open, sharded.blocks[-1])),
        writes=ForwardWrites(sharded),
    )
    _set_prefetch(sharded, run.settings.prefetch)
    model.register_forward_pre_hook(_allocate_outside_inference_mode(sharded), prepend=True)
    model.register_forward_hook(_finish_without_gradients(retained, run.order))
    run.successors.update({former: sharded.parameters[name] for name, former in before.items()})
    return retained


def shard_model(
    model: nn.Module, plan: BlockPlan, sharding: Sharding, context: Context, islands: frozenset[nn.Module]
) -> ShardedModel:
    """Shard a model's parameters over the ranks, in place. Called on all ranks.

    Values come from rank 0; modules initialise tensors that are on meta on all ranks. The parameters of modules that
    stay in fp32 are not divided: every rank holds these parameters in full.
    """
    sources = _agree(model, context)
    names = {module: name for name, module in model.named_modules()}
    groups = block_groups(model, plan)
    storage = TensorStorage(model, sharding.dtypes, islands)
    upcast = tuple(n for n, p in model.named_parameters() if storage.upcasts(p))
    on_meta = [[p for p in _parameters_of(modules) if p.is_meta] for modules in groups.values()]
    scratch = Scratch(
        context.device,
        [
            sum(room_for(p, storage.dtype_of(p)) for p in group if not storage.is_whole(p))
            for group in on_meta
        ],
    )
    blocks: list[FSDPModule] = []
    for name, modules in groups.items():
        scratch.clear()
        _bring_values(modules, model, names, sources, scratch, storage, context)
        blocks.append(
            shard_block(
                model.get_submodule(name),
                modules,
                sharding,
                storage,
                is_root=not name,
                is_alone=not plan.blocks,
            )
        )
    return ShardedModel(
        module=model, plan=plan, blocks=tuple(blocks), places=tuple(find_places(model)), upcast=upcast
    )


def block_groups(model: nn.Module, plan: BlockPlan) -> dict[str, list[nn.Module]]:
    """Return the modules of each block by the block's name, without those of inner blocks; the root comes last."""
    done: set[nn.Module] = set()
    groups: dict[str, list[nn.Module]] = {}
    for name in (*plan.blocks, ""):
        groups[name] = [module for module in model.get_submodule(name).modules() if module not in done]
        done.update(groups[name])
    return groups


def _parameters_of(modules: list[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters that modules hold directly, without duplicates."""
    return list(dict.fromkeys(p for module in modules for p in module.parameters(recurse=False)))


def check_dtypes(model: nn.Module, plan: BlockPlan, dtypes: DtypePlan, islands: frozenset[nn.Module]) -> None:
    """Refuse trainable parameters of several dtypes in one block, which `fully_shard` cannot reduce."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    storage = TensorStorage(model, dtypes, islands)
    for modules in block_groups(model, plan).values():
        found: dict[torch.dtype, str] = {}
        for parameter in _parameters_of(modules):
            if parameter.requires_grad and not storage.is_whole(parameter):
                found.setdefault(storage.dtype_of(parameter), names[parameter])
        if len(found) > 1:
            shown = " and ".join(f"{key} in {str(dtype)[6:]}" for dtype, key in found.items())
            raise ValueError(
                f"{shown} are trained in one block, whose gradients are reduced in one dtype: bring them to one: "
                "precision.param_dtype holds all in one dtype, and fsdp.upcast=True all trainable ones in fp32"
            )


def check_sources(model: nn.Module, context: Context) -> None:
    """Refuse a model whose values have no origin, before anything is changed. Called on all ranks."""
    check_ways(model, _agree(model, context).initialised)


def _agree(model: nn.Module, context: Context) -> _Sources:
    """Return the origin of the tensors' values, which ranks agree on by one all-gather. Called on all ranks.

    Ranks that hold the same part of the model have the same shapes; experts may be others on each.
    """
    tensors: dict[str, Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    meta = frozenset(name for name, tensor in tensors.items() if tensor.is_meta)
    experts = {p for module in model.modules() if holds_experts(module) for p in module.parameters()}
    shapes = [
        (name, tuple(tensor.shape), str(tensor.dtype))
        for name, tensor in tensors.items()
        if tensor not in experts
    ]
    own = (crc32(repr(shapes).encode()), meta, int(torch.randint(2**31, ()).item()) if meta else 0)
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    (_, first_meta, seed), *others = known = cast("list[tuple[int, frozenset[str], int]]", by_rank)
    kind = type(model).__name__
    for rank, (shapes_there, _, _) in enumerate(known):
        first = 0 if context.plan is None else context.plan.members(rank, "counts")[0]
        if shapes_there != known[first][0]:
            raise ValueError(
                f"{kind} on rank {rank} has other parameters than on rank {first}: names, shapes and dtypes must be "
                "the same"
            )
    for rank, (_, theirs, _) in enumerate(others, start=1):
        if lacking := sorted(first_meta - theirs):
            raise ValueError(
                f"{kind}: {lacking[0]} is on the meta device on rank 0 and has values on rank {rank}, but they are "
                "taken from rank 0: build the model there with values, or on meta everywhere"
            )
    return _Sources(first_meta, seed)


def _bring_values(
    group: list[nn.Module],
    model: nn.Module,
    names: Mapping[nn.Module, str],
    sources: _Sources,
    scratch: Scratch,
    storage: TensorStorage,
    context: Context,
) -> None:
    """Materialise the tensors of some modules on the device, with rank 0's values."""

    def new_tensor(tensor: Tensor) -> Tensor:
        dtype = storage.dtype_of(tensor)
        if isinstance(tensor, nn.Parameter) and not storage.is_whole(tensor):
            return scratch.like(tensor, dtype)
        return torch.empty_like(tensor, dtype=dtype, device=context.device)

    empty = replace_meta_tensors(group, new_tensor)
    made = {
        module: tuple(a for a in attributes if f"{names[module]}.{a}".lstrip(".") in sources.initialised)
        for module, attributes in empty.items()
    }
    made = {module: attributes for module, attributes in made.items() if attributes}
    around = [module for module in model.modules() if callable(getattr(module, "_init_weights", None))]
    # The outermost `_init_weights` covers the modules inside.
    initialise(made, dict(names), around[:1], sources.seed)
    filled = {
        tensors_of(module)[attribute] for module, attributes in made.items() for attribute in attributes
    }
    seen: set[Tensor] = set()
    for module in group:
        for name, tensor in tensors_of(module).items():
            if tensor in seen:
                continue
            seen.add(tensor)
            is_parameter = isinstance(tensor, nn.Parameter)
            if is_wrapper(tensor):
                _bring_packed(tensor, context)
                continue
            values = tensor.detach().to(context.device, storage.dtype_of(tensor)).contiguous()
            if tensor not in filled and not holds_experts(module):  # which have theirs
                broadcast_from_first(values, context)
            if is_parameter:
                tensor.data = values
            elif values.device != tensor.device or values.dtype != tensor.dtype:
                setattr(module, name, values)
            else:
                tensor.copy_(values)


def _bring_packed(weight: Tensor, context: Context) -> None:
    """Move a weight that torchao packed to the device, with rank 0's values."""
    if weight.device != context.device:
        # `data` of a class that wraps others cannot be set to one of another device.
        torch.utils.swap_tensors(
            weight, nn.Parameter(weight.detach().to(context.device), requires_grad=False)
        )
    broadcast_parts(parts_of(weight), context)


def shard_block(
    block: nn.Module,
    group: list[nn.Module],
    sharding: Sharding,
    storage: TensorStorage,
    *,
    is_root: bool,
    is_alone: bool,
) -> FSDPModule:
    """Shard a block's parameters outside its inner blocks, and release the full ones."""
    held = _parameters_of(group)
    # Backward needs the root's own parameters first; by default (None), torch keeps them gathered until then.
    reshards = None if is_root and not is_alone and sharding.reshards else sharding.reshards
    offload = CPUOffloadPolicy(pin_memory=sharding.pin_memory) if sharding.offload else OffloadPolicy()
    for module in group:
        if gathers_in_fp8(module):
            # The optimizer is matched by name, and a weight that is shared is never converted.
            form = module.weight_for_all_gather()
            module.weight = nn.Parameter(form, requires_grad=module.weight.requires_grad)
    fully_shard(
        block,
        mesh=sharding.mesh_of(block),
        reshard_after_forward=reshards,
        mp_policy=sharding.policy_of(block),
        offload_policy=offload,
        ignored_params={p for p in held if storage.is_whole(p)},
    )
    for parameter in held:
        if not storage.is_whole(parameter):
            # An optimizer built before prepare() still holds it, which must not cost memory.
            parameter.data = parameter.data.new_empty(0)
    return cast("FSDPModule", block)


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
