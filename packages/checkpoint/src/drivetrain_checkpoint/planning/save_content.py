"""Split the states of this rank into trees of plain values and shards of tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from drivetrain_checkpoint.errors import StateError
from drivetrain_checkpoint.format.layout import STATE_PART, check_model_names, model_part, rank_part
from drivetrain_checkpoint.format.shards import Leaf, TensorShard, piece_of, shards_of
from drivetrain_checkpoint.format.state_tree import Json, StateTree, encode
from drivetrain_checkpoint.planning.file_list import WrittenBox
from drivetrain_checkpoint.planning.holdings import Holdings
from drivetrain_checkpoint.planning.write_plan import AvailableBoxes, TensorName
from drivetrain_weights.safetensors_layout import DTYPE_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The states to save; see the arguments of `Checkpointer.save`."""

    models: Mapping[str, Mapping[str, StateTree]]
    replicated: Mapping[str, StateTree]
    per_rank: Mapping[str, StateTree]
    plan: Mapping[str, Any] | None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class OwnContent:
    """The content that this rank contributes to a checkpoint."""

    trees: dict[str, Json] = field(default_factory=dict[str, Json])
    holdings: Holdings = field(default_factory=Holdings)
    shards: dict[TensorName, tuple[TensorShard, ...]] = field(
        default_factory=dict[TensorName, tuple[TensorShard, ...]]
    )

    def tensor(self, entry: WrittenBox) -> Tensor:
        """Return the elements of a box to write, as a view."""
        return piece_of(self.shards[entry.tensor], entry.box)


def own_content(content: Content, rank: int, *, allow_pickle: bool) -> OwnContent:
    """Split this rank's states into plain values and uncopied tensors; raise `StateError` for any other value."""
    given: dict[str, Any] = {
        "models": content.models, "replicated": content.replicated, "per_rank": content.per_rank
    }  # fmt: skip
    for name, state in given.items():
        if not isinstance(state, Mapping):
            raise StateError(f"{name} is a {type(state).__name__}: give a mapping from names to states")
    for name, state in given["models"].items():
        if not isinstance(state, Mapping):
            raise StateError(f"models[{name!r}] is a {type(state).__name__}: give its state_dict()")
    check_model_names(content.models)
    own = OwnContent()
    kinds: dict[AvailableBoxes, AvailableBoxes] = {}
    states = {model_part(name): (f"models[{name!r}]", dict(state)) for name, state in content.models.items()}
    states[STATE_PART] = ("replicated", dict(content.replicated))
    for part, (root, state) in states.items():
        encoded = encode(state, root=root, allow_pickle=allow_pickle)
        if rank == 0:
            own.trees[part] = encoded.json
            own.holdings.aliases.update(
                TensorName(part, name) for name in encoded.leaves.keys() - encoded.tensors
            )
        for name, leaf in (encoded.tensors if rank == 0 else encoded.leaves).items():
            _add(own, TensorName(part, name), leaf, own.holdings.shared, kinds, is_main=rank == 0)
    encoded = encode(dict(content.per_rank), root="per_rank", allow_pickle=allow_pickle)
    own.trees[rank_part(rank)] = encoded.json
    for name, leaf in encoded.tensors.items():
        _add(own, TensorName(rank_part(rank), name), leaf, own.holdings.own, kinds, is_main=True)
    return own


def _add(
    own: OwnContent,
    name: TensorName,
    leaf: Leaf,
    holdings: dict[TensorName, AvailableBoxes],
    kinds: dict[AvailableBoxes, AvailableBoxes],
    *,
    is_main: bool,
) -> None:
    shards = shards_of(leaf, is_main=is_main)
    if not shards and not is_main:
        return
    own.shards[name] = shards
    kind = AvailableBoxes(
        DTYPE_NAMES[leaf.dtype],
        leaf.dtype.itemsize,
        tuple(leaf.shape),
        tuple([shard.box for shard in shards]),
    )
    holdings[name] = kinds.setdefault(kind, kind)  # one object for all tensors that are held alike
