"""Find tied parameters, which have several names, and tie them again after loading separated them."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from drivetrain_weights.errors import TiedParametersError


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter with several names, in the model's order. Works on the meta device.

    Example:
        >>> model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 2), "head": torch.nn.Linear(2, 4)})
        >>> model["head"].weight = model["embed"].weight
        >>> find_tied_parameters(model)
        [['embed.weight', 'head.weight']]
    """
    return _group_ties(model.named_parameters(remove_duplicate=False), key=id)


def find_ties(
    source: nn.Module | Mapping[str, Tensor], *, rename: Callable[[str], str] = str
) -> dict[str, str]:
    """Return a dict from the later names of tied tensors to the first name of the same tensor.

    Args:
        source: A module, whose parameters and buffers are tied if they are the same object; or tensors by name, which
            are tied if they are exactly the same memory. Views that overlap but differ are not tied.
        rename: A function from a name in `source` to the one in the result, such as one without a wrapper's prefix.

    Example:
        >>> weight = torch.ones(2)
        >>> find_ties({"embed": weight, "head": weight})
        {'head': 'embed'}
    """
    if isinstance(source, nn.Module):
        named = chain(
            source.named_parameters(remove_duplicate=False), source.named_buffers(remove_duplicate=False)
        )
        groups = _group_ties(named, key=id)
    else:
        groups = _group_ties(source.items(), key=memory_key)
    return {rename(name): rename(group[0]) for group in groups for name in group[1:]}


def _group_ties(named: Iterable[tuple[str, Tensor]], *, key: Callable[[Tensor], object]) -> list[list[str]]:
    """Return the names of each tensor with several names. `key` gives equal values for tied, live tensors."""
    groups: defaultdict[object, list[str]] = defaultdict(list)
    for name, tensor in named:
        groups[key(tensor)].append(name)
    return [group for group in groups.values() if len(group) > 1]


def memory_key(tensor: Tensor) -> object:
    """Return a key that is equal for tensors over exactly the same memory; without memory, the object's identity."""
    if tensor.is_meta or tensor.layout != torch.strided or tensor.numel() == 0:
        return id(tensor)
    view = (tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return tensor.device, tensor.data_ptr(), view  # views that overlap but differ have other keys


def retie_parameters(model: nn.Module, tied: Sequence[Sequence[str]]) -> None:
    """Tie the parameters of each group again, after loading. `find_tied_parameters` returns the groups before.

    The first parameter of a group that is not on the meta device replaces the others.

    Raises:
        TiedParametersError: The model lacks a name, or two parameters of a group differ, so that tying would lose one
            value. The model stays unchanged.

    Example:
        >>> model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 2), "head": torch.nn.Linear(2, 4)})
        >>> model["head"].weight = torch.nn.Parameter(model["embed"].weight.detach().clone())
        >>> retie_parameters(model, [["embed.weight", "head.weight"]])
        >>> model["head"].weight is model["embed"].weight
        True
    """
    by_name = dict(model.named_parameters(remove_duplicate=False))
    chosen = [_choose(by_name, group) for group in tied]
    for group, parameter in zip(tied, chosen, strict=True):
        for name in group:
            module_name, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module_name), leaf, parameter)


def _choose(by_name: dict[str, nn.Parameter], group: Sequence[str]) -> nn.Parameter:
    if missing := [name for name in group if name not in by_name]:
        raise TiedParametersError(
            f"tied={list(group)}: the model has no parameter {', '.join(map(repr, missing))}"
        )
    if not group:
        raise TiedParametersError("tied=[[]]: a group holds the names of one parameter, at least one of them")
    real = [name for name in group if not by_name[name].is_meta]
    keeper = real[0] if real else group[0]
    kept = by_name[keeper]
    for name in group:
        other = by_name[name]
        is_alike = (other.shape, other.dtype) == (kept.shape, kept.dtype)
        is_equal = is_alike and (other.is_meta or torch.equal(kept.detach(), other.detach().to(kept.device)))
        if not (other is kept or is_equal):
            raise TiedParametersError(
                f"{keeper!r} and {name!r} are to be one parameter but differ in shape, dtype or values, so one "
                "would be lost: load only one of the two, or leave the pair out of `tied`"
            )
    return kept
