"""Models, forwards and backwards that FSDP would train wrongly, or refuse with a cryptic error.

The guards during training wrap the methods of torch's objects by which FSDP starts to gather and to run backward.
They therefore cover every strategy and blocks that are called directly, and torch.compile does not trace them.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from drivetrain_backends.compat import names_of_hooks
from drivetrain_backends.errors import SecondDerivativeError, UnshardedParameterError
from drivetrain_backends.fsdp import compat
from drivetrain_backends.fsdp.models.sharded_model import ShardedModel
from drivetrain_backends.modules.model_checks import check_no_renormalising, check_not_lazy
from drivetrain_backends.modules.packed_weights import is_packed, is_wrapper
from drivetrain_backends.modules.wrap_policy import class_name

_SPARSE = (nn.Embedding, nn.EmbeddingBag)


def check_trainable(model: nn.Module) -> None:
    """Refuse trainable parameters whose gradients cannot be sharded, and weights packed in a floating dtype."""
    check_not_lazy(model)
    check_no_renormalising(model, "FSDP drops what is written into gathered parameters")
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{attribute}".lstrip(".")
            if not parameter.requires_grad:
                _check_packed(name, parameter)
                continue
            if parameter.is_complex():
                raise ValueError(
                    f"{class_name(model)}: {name} is complex ({str(parameter.dtype)[6:]}), and FSDP divides and "
                    "reduces real numbers: keep it as two real parts (torch.view_as_real), or use backend='ddp'"
                )
            if isinstance(module, _SPARSE) and module.sparse and parameter.layout is torch.strided:
                raise ValueError(
                    f"{class_name(model)}: {name} gets sparse gradients ({type(module).__name__}(sparse=True)), "
                    "which FSDP does not reduce: say sparse=False, or use backend='ddp'"
                )
            if any(hook.startswith("register_multi_grad_hook.") for hook in names_of_hooks(parameter)):
                raise ValueError(
                    f"{class_name(model)}: {name} has a hook of register_multi_grad_hook, which would never run, as "
                    "FSDP lets gradients come to gathered parameters: set a hook on each by "
                    "parameter.register_hook, or use backend='ddp'"
                )


def _check_packed(name: str, parameter: nn.Parameter) -> None:
    """Refuse a weight of bitsandbytes that FSDP would divide, because the layer's forward replaces the weight."""
    kind = type(parameter)
    if is_packed(parameter) and not is_wrapper(parameter) and parameter.is_floating_point():
        raise ValueError(
            f"{name} is a {kind.__name__} of bitsandbytes held in {str(parameter.dtype)[6:]}: FSDP2 would divide "
            "it, and the forward of bitsandbytes replaces a weight that was gathered. Build the layer with "
            "quant_storage=torch.uint8 (bnb_4bit_quant_storage in transformers) and move the model to its device "
            "before prepare(): packed weights are then kept whole on each rank, and the adapters are divided; or use "
            "backend='ddp'"
        )


def refuse_misuse(sharded: ShardedModel) -> None:
    """Refuse forwards with parameters other than the model's own, and second derivatives, from now on."""
    kind = class_name(sharded.module)
    names = {place.parameter: place.name for place in sharded.places}

    def refuse(name: str) -> NoReturn:
        _begin_anew(sharded)
        raise UnshardedParameterError(
            f"a forward of {kind} with another tensor in the place of {name}, as torch.func.functional_call and "
            "gathered() put there: FSDP would compute with its own. Run such a forward on a model that is not "
            "prepared, or under backend='single'; values go in inside gathered(write=True)"
        )

    def check(held: Sequence[tuple[Any, dict[str, Any], str]]) -> None:
        for parameter, slots, attribute in held:
            if slots.get(attribute) is not parameter.sharded_param:
                refuse(names[parameter.sharded_param])

    def refuse_second_derivative() -> None:
        if torch.is_grad_enabled():
            raise SecondDerivativeError(
                f"a backward through {kind} with create_graph=True, as a gradient penalty takes: FSDP lets gathered "
                "parameters go in backward, and a second one would need them. Use backend='single' or 'ddp'; or "
                "take the penalty of a difference of outputs instead of a gradient"
            )

    every: list[tuple[Any, dict[str, Any], str]] = []  # parameters, with the slots of modules that hold them
    for block in sharded.blocks:
        for group in compat.parameter_groups(block):
            held = [(parameter, *compat.module_slot(parameter)) for parameter in group.fsdp_params]
            every += held
            compat.check_before_gathering(group, partial(check, held))
    for block in sharded.blocks:
        compat.check_before_first_forward(block, partial(check, every))
        compat.check_before_backward(block, refuse_second_derivative)


def explain_ungathered(sharded: ShardedModel, error: RuntimeError) -> UnshardedParameterError | None:
    """Return a clear error if `error` comes from a forward that used a block's shards as parameters; else None."""
    _begin_anew(sharded)
    check_unconverted([sharded], error)
    if "got mixed torch.Tensor and DTensor" not in str(error):
        return None
    sharded.reshard()
    classes = {class_name(sharded.module.get_submodule(name)) for name in sharded.plan.blocks}
    return UnshardedParameterError(
        f"a forward of {class_name(sharded.module)} used parameters of a block that is not gathered: it calls "
        "block.forward(...) where FSDP sees block(...) alone, or reads the block's weights from outside. Blocks are "
        f"{', '.join(sorted(classes)) or 'the whole model'}: have the model call them, name classes that it calls "
        "(--fsdp-wrap), gather all at once (--fsdp-min-num-params above the model's size), or use backend='ddp'"
    )


def check_unconverted(models: Iterable[ShardedModel], error: BaseException | None = None) -> None:
    """Refuse models whose shards were converted to another dtype: FSDP has no memory for that dtype."""
    for sharded in models:
        dtypes = {id(p.sharded_param): p.orig_dtype for p in sharded.divided() if hasattr(p, "orig_dtype")}
        for name, parameter in sharded.parameters.items():
            if parameter.dtype is not (dtype := dtypes.get(id(parameter), parameter.dtype)):
                raise UnshardedParameterError(
                    f"{name} of {class_name(sharded.module)} was converted from {str(dtype)[6:]} to "
                    f"{str(parameter.dtype)[6:]} after prepare(), as by model.to(...): FSDP gathers and reduces in "
                    "what it was prepared with. Convert a model before prepare(); for an export, convert what "
                    "get_state_dict() returns"
                ) from error


def _begin_anew(sharded: ShardedModel) -> None:
    for block in sharded.blocks:
        compat.begin_anew(block)
