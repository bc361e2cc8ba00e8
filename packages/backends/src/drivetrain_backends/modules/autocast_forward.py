"""The forward of a prepared model: under autocast, and with a readable error for a batch that does not fit.

The model keeps its identity, attributes and parameters: only its class is replaced by a subclass with another
`__call__`. A copy or pickle of a prepared model is a plain model, because a copy with the wrapper would call the
original's weights.
"""

import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import nn

from drivetrain_backends.errors import BatchMismatchError
from drivetrain_precision import Policy, autocast
from drivetrain_precision.dtypes.dtype_policy import HALF
from drivetrain_precision.nested_tensors import cast_floating, floating_tensors
from drivetrain_state import ProgressMark, ProgressRecord

Note = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
_MIXED = (
    "the weights are held in half precision (precision.param_dtype) and nothing casts between layers: a buffer, or "
    "what forward creates in fp32, makes what it is added to fp32 as well. Say precision.buffer_dtype, or "
    "mixed_precision='bf16', under which layers cast what they are given"
)


class PreparedForward:
    """The base of the classes that `prepare_forward` makes."""

    original_class: type[nn.Module]  # the class that the subclass replaces
    # The dtype that floating-point outputs are cast to; None returns them as computed.
    output_dtype: torch.dtype | None


def prepare_forward(
    model: nn.Module,
    policy: Policy,
    device: torch.device,
    *,
    progress: ProgressRecord | None = None,
    uncopyable: str | None = None,
    explain: Callable[[RuntimeError], Exception | None] | None = None,
    note: Note | None = None,
) -> None:
    """Make `model(...)` compute as `policy` says, in place; refuse a TorchScript module, whose class is fixed.

    `progress` records when a forward begins ("forward", and the model) and ends ("forward done"). A copy or pickle
    gives the plain model; if `uncopyable` is given, it fails with that message. `explain` may return the error to
    raise in place of a RuntimeError of the forward. `note` gets the model and the arguments of each forward with
    gradients.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            f"{type(model).__name__} is a TorchScript module, which cannot be prepared; "
            "prepare the nn.Module it was made from, or compile that with torch.compile"
        )
    restore_forward(model)
    original = type(model)

    def reduce_as_original(self: nn.Module, protocol: Any) -> Any:
        function, arguments, *rest = original.__reduce_ex__(self, protocol)
        if function is type(self):  # a class that is called to rebuild, as that of torch.compile's wrapper
            return original, arguments, *rest
        return _new, tuple(original if a is type(self) else a for a in arguments), *rest

    def refuse(*_: object) -> NoReturn:
        raise TypeError(uncopyable)

    members: dict[str, Any] = {
        "__call__": _call_of(original, policy, device, progress, explain, note),
        "__reduce_ex__": reduce_as_original,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "original_class": original,
        "output_dtype": policy.dtypes.output,
    }
    if uncopyable is not None:
        members |= dict.fromkeys(("__copy__", "__deepcopy__", "__reduce_ex__"), refuse)
    model.__class__ = type(original.__name__, (PreparedForward, original), members)


def _call_of(
    original: type[nn.Module],
    policy: Policy,
    device: torch.device,
    progress: ProgressRecord | None,
    explain: Callable[[RuntimeError], Exception | None] | None,
    note: Note | None,
) -> Callable[..., Any]:
    """Return the `__call__` of the subclass that `prepare_forward` makes."""
    called = original.__call__
    is_plain, recipe = policy.autocast_dtype is None, policy.recipe
    output_dtype = policy.dtypes.output
    # Without autocast a model computes in the dtype of its weights, which a batch must have too.
    input_dtype = policy.dtypes.param if is_plain else None

    def cast_and_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if input_dtype is not None:
            args, kwargs = cast_floating(args, input_dtype), cast_floating(kwargs, input_dtype)
        output = called(self, *args, **kwargs)
        return output if output_dtype is None else cast_floating(output, output_dtype)

    run = called if input_dtype is None and output_dtype is None else cast_and_call

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        heard = progress if progress is not None and progress.is_heard else None
        if heard is not None:
            heard.note_forward(self)
        if note is not None and torch.is_grad_enabled():
            note(self, args, kwargs)
        try:
            if is_plain:
                return run(self, *args, **kwargs)
            with autocast(policy, device), nullcontext() if recipe is None else recipe.computing():
                return run(self, *args, **kwargs)
        except TypeError as error:
            if (mismatch := _mismatch(original, self, args, kwargs)) is not None:
                raise BatchMismatchError(mismatch) from error
            raise
        except RuntimeError as error:
            if explain is not None and (explained := explain(error)) is not None:
                raise explained from error
            # A batch that was cast to the weights' dtype is not the cause.
            mismatch = None if input_dtype is not None else _dtype_mismatch(self, args, kwargs, error)
            if mismatch is not None:
                raise BatchMismatchError(mismatch) from error
            if input_dtype in HALF and "dtype" in str(error):
                error.add_note(_MIXED)
            raise
        finally:
            if heard is not None:
                heard.note(ProgressMark.FORWARD_DONE)

    return call


def _dtype_mismatch(model: nn.Module, args: Any, kwargs: Any, error: RuntimeError) -> str | None:
    """Return a message on the dtypes of batch and weights; None unless an error of the forward is about dtypes."""
    if re.search(r"dtype|scalar type|[Ii]nput type", str(error)) is None:
        return None
    held = {p.dtype for p in model.parameters() if p.is_floating_point()}
    given = dict.fromkeys(each.dtype for each in floating_tensors((args, kwargs)))
    odd = [str(dtype)[6:] for dtype in given if dtype not in held]
    if not odd or not held:
        return None
    names = " and ".join(sorted(str(dtype)[6:] for dtype in held))
    return (
        f"the batch holds {' and '.join(odd)}, the model's weights are {names}, and nothing casts "
        "between them: convert the batch; or leave the model in fp32 and say mixed_precision='bf16' or 'fp16', or "
        "precision.param_dtype, which cast what a forward is given"
    )


def restore_forward(model: nn.Module) -> nn.Module:
    """Undo `prepare_forward` in place; do not change an unprepared model."""
    if isinstance(model, PreparedForward):
        model.__class__ = model.original_class  # pyright: ignore[reportAttributeAccessIssue]
    return model


def _new(kind: type[nn.Module], *arguments: Any) -> nn.Module:
    """Return an empty instance of `kind` that copy and pickle fill; pickle's function refuses a plain class."""
    return kind.__new__(kind, *arguments)


def _mismatch(original: type[nn.Module], model: nn.Module, args: Any, kwargs: dict[str, Any]) -> str | None:
    """Return a message on how the arguments differ from the forward's signature; None if the arguments fit."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        parameters = list(signature.parameters.values())
        named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        needed = [p.name for p in parameters if p.name in named and p.default is p.empty]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        unexpected = [] if takes_any else sorted(set(kwargs) - set(named))
        missing = [name for name in needed[len(args) :] if name not in kwargs]
        found = [f"missing: {', '.join(missing)}"] if missing else []
        found += [f"unexpected: {', '.join(unexpected)}"] if unexpected else []
        found += [f"{len(args)} positional arguments"] if not found else []
        return (
            f"the batch does not fit {original.__name__}.forward{signature}: {'; '.join(found)}. "
            "Rename or drop these keys in the dataset or collate_fn, or pass the fields by hand"
        )
    return None
