"""The optimizer that the training loop holds in place of an engine's optimizer."""

from collections.abc import Callable
from typing import Any, NoReturn

from torch.optim import Optimizer

from drivetrain_backends.optim.optimizer import PreparedOptimizer, uncopyable


class PartitionedOptimizer(PreparedOptimizer):
    """An optimizer whose parameters DeepSpeed has partitioned: it accepts no more groups, and cannot be copied."""

    def check_copyable(self) -> NoReturn:
        """Refuse to copy, because an engine has partitioned the parameters."""
        raise TypeError(uncopyable(self.optimizer))

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Refuse a new group, because DeepSpeed (0.19) builds its lists of groups when the engine starts."""
        raise RuntimeError(
            f"add_param_group() with {len(param_group.get('params', ()))} parameters after prepare(): ZeRO stages 1 "
            "to 3 partition the groups that the optimizer has when prepare() starts its engine. Add the group before "
            "prepare(), with lr=0 until it is to be trained; or free_memory() and prepare() again"
        )


def share_groups(source: Optimizer, other: Optimizer) -> None:
    """Make two optimizers share the groups and state of `source` from now on, also after one loads a state."""

    def follow(one: Optimizer, loaded: Optimizer) -> None:
        one.param_groups, one.state = loaded.param_groups, loaded.state

    follow(other, source)
    # torch creates new groups when it loads a state.
    source.register_load_state_dict_post_hook(lambda loaded: follow(other, loaded))
    other.register_load_state_dict_post_hook(lambda loaded: follow(source, loaded))


def remember_groups(optimizer: Optimizer) -> Callable[[], None]:
    """Return a function that restores an optimizer's groups and state, in case an engine fails to start."""
    groups, state = optimizer.param_groups, optimizer.state
    parameters = [list(group["params"]) for group in groups]
    kept = dict(state)

    def give_back() -> None:
        optimizer.param_groups, optimizer.state = groups, state
        for group, own in zip(groups, parameters, strict=True):
            group["params"] = own
        state.clear()
        state.update(kept)

    return give_back
