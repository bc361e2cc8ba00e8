"""What the training loop holds in the place of an engine's optimizer."""

from collections.abc import Callable
from typing import Any, NoReturn

from torch.optim import Optimizer

from drivetrain_backends.optim.optimizer import PreparedOptimizer, uncopyable


class PartitionedOptimizer(PreparedOptimizer):
    """An optimizer whose parameters DeepSpeed has cut into parts: it takes no further group, and is not copied."""

    def check_copyable(self) -> NoReturn:
        """Refused: its parameters are parts of an engine's; see `PreparedOptimizer.check_copyable`.

        Raises:
            TypeError: Raised by every call.
        """
        raise TypeError(uncopyable(self.optimizer))

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Refused: DeepSpeed (0.19) keeps its own lists of groups, made when the engine starts.

        Raises:
            RuntimeError: Always; nothing was changed.
        """
        raise RuntimeError(
            f"add_param_group() with {len(param_group.get('params', ()))} parameters after prepare(): ZeRO stages 1 "
            "to 3 partition the groups that the optimizer has when prepare() starts its engine. Add the group before "
            "prepare(), with lr=0 until it is to be trained; or free_memory() and prepare() again"
        )


def share_groups(source: Optimizer, other: Optimizer) -> None:
    """Have two optimizers hold the same groups and state from now on, those of `source`, also once one loads a state.

    Args:
        source: The one that DeepSpeed built.
        other: The user's, which schedulers and the loop hold.
    """

    def follow(one: Optimizer, loaded: Optimizer) -> None:
        one.param_groups, one.state = loaded.param_groups, loaded.state

    follow(other, source)
    # torch makes new groups when it loads a state.
    source.register_load_state_dict_post_hook(lambda loaded: follow(other, loaded))
    other.register_load_state_dict_post_hook(lambda loaded: follow(source, loaded))


def remember_groups(optimizer: Optimizer) -> Callable[[], None]:
    """Remember what an optimizer holds; what is returned gives it back, where an engine was started in vain."""
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
