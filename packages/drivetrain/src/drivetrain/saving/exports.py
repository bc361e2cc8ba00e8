"""Export prepared models for other programs, and load such exports into prepared models, under any backend."""

from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from drivetrain.saving.adapters import has_adapters, save_adapters
from drivetrain.saving.divided import name_parameters
from drivetrain_backends import (
    Prepared,
    full_tensor,
    iter_full_tensors,
    load_full_state_dict,
    strip_wrapper_prefix,
    unwrap_compiled,
)
from drivetrain_checkpoint import (
    ExportedTensors,
    ExportPlan,
    IncompatibleNames,
    match_export,
    open_export,
    plan_export,
    write_export,
)
from drivetrain_state import Context, ProgressMark
from drivetrain_state.collectives.collective_errors import on_all_ranks, on_each_rank
from drivetrain_weights import find_ties


def save(
    prepared: Prepared,
    context: Context,
    folder: Path,
    *,
    max_shard_size: int | str,
    metadata: Mapping[str, str],
    trained_only: bool = False,
) -> ExportPlan:
    """Write a model, gathering one tensor at a time; see `Accelerator.save_model`. Called on all ranks."""
    if has_adapters(inner := unwrap_compiled(prepared.unwrap())):
        if not trained_only:
            raise ValueError(
                f"save_model({type(inner).__name__}): it holds adapters of PEFT beside its base model, under "
                "names that from_pretrained would pass over. Say trained_only=True to write the adapters alone, "
                "as PEFT reads them; for one merged model, load them in one process: "
                "PeftModel.from_pretrained(base, folder).merge_and_unload().save_pretrained(...)"
            )
        return save_adapters(prepared, context, folder, metadata=metadata)
    is_main = context.topology.is_main
    doing = f"the export into {folder}"

    def plan_on_main() -> ExportPlan | None:
        state = prepared.state_dict()["model"]
        if trained_only:
            state = {name: state[name] for name in trained_names(prepared)}
        found = find_ties(prepared.unwrap(), rename=strip_wrapper_prefix)
        ties = {name: first for name, first in found.items() if name in state}
        plan = plan_export(state, max_shard_size=max_shard_size, ties=ties)
        return plan if is_main else None

    plan = cast("ExportPlan", on_all_ranks(context, plan_on_main, doing=doing)[0])

    def write_on_main() -> None:
        gathered = iter_full_tensors(prepared, context)
        try:
            if is_main:
                known = plan.tensors.keys() | plan.ties.keys()
                pairs = ((name, tensor) for name, tensor in gathered if tensor is not None and name in known)
                write_export(plan, pairs, folder, metadata=metadata)
        finally:
            for _ in gathered:  # collective: all ranks finish gathering, even if the write failed
                pass

    context.progress.mark(ProgressMark.EXPORT)
    on_each_rank(context, write_on_main, doing=doing)
    context.progress.mark(ProgressMark.EXPORT_DONE)
    return plan


def trained_names(prepared: Prepared) -> list[str]:
    """Return the names of the trained parameters, including every name of a tied parameter.

    Raises:
        ValueError: No parameter requires a gradient.
    """
    names = [name for name, parameter in name_parameters(prepared).items() if parameter.requires_grad]
    if not names:
        kind = type(unwrap_compiled(prepared.unwrap())).__name__
        raise ValueError(f"trained_only=True: no parameter of {kind} requires a gradient; omit trained_only")
    return names


def load(prepared: Prepared, context: Context, folder: Path, *, strict: bool) -> IncompatibleNames:
    """Load a model; see `Accelerator.load_model`. Called on all ranks."""
    state: dict[str, Any] = prepared.state_dict()["model"]
    shapes = {
        name: tuple(value.shape)
        for name, value in state.items()
        if isinstance(value, Tensor) or hasattr(value, "full_tensor")
    }
    # Live tensors are the parameters themselves: the main process alone can read, and the others receive the values.
    is_live = all(isinstance(state[name], Tensor) for name in shapes)
    found: dict[str, ExportedTensors] = {}

    def match_names() -> IncompatibleNames | None:
        if is_live and not context.topology.is_main:
            return None
        exported = open_export(folder)
        match = match_export(
            exported,
            shapes,
            ties=find_ties(prepared.unwrap(), rename=strip_wrapper_prefix),
            strict=strict,
            kind=type(prepared.unwrap()).__name__,
        )
        found["here"] = exported.renamed(match.sources)
        return match.incompatible

    incompatible = cast(
        "IncompatibleNames", on_all_ranks(context, match_names, doing=f"the load of {folder}")[0]
    )
    context.progress.mark(ProgressMark.LOAD)
    if is_live:
        kept = {name: full_tensor(state[name]).detach().cpu() for name in incompatible.missing_keys}
        load_full_state_dict(prepared, _join(kept, found.get("here", {})), context)
    else:
        kept = {name: value for name, value in state.items() if name not in found["here"]}
        prepared.load_state_dict({**prepared.state_dict(), "model": _join(kept, found["here"])})
    return incompatible


def _join(kept: Mapping[str, Any], exported: Mapping[str, Tensor]) -> Mapping[str, Any]:
    """Join two states without copying: exported tensors are still read on demand."""
    return ChainMap(cast("Any", kept), cast("Any", exported))
