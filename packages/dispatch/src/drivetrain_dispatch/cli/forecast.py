"""What it will be to generate with a model: where its parts are, what each device holds, seconds a token. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drivetrain_dispatch.planning.block_groups import Cost
from drivetrain_dispatch.planning.blocks import Block
from drivetrain_dispatch.planning.device_map import Device, DeviceMap
from drivetrain_dispatch.planning.infer_device_map import map_of, rooms_of
from drivetrain_dispatch.planning.pipeline_model import Rates
from drivetrain_dispatch.planning.solver import PlacePlan, plan_places, predicted_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a device holds when it holds the most.

    Attributes:
        budget_bytes: What it may; None for as much as there is.
        weight_bytes: Of weights that stay there, and of buffers.
        moving_bytes: Room for weights that come when it is their turn: its window.
        kept_bytes: Keys and values, and whatever else a forward leaves.
        activation_bytes: Of activations at their peak.
    """

    budget_bytes: int | None
    weight_bytes: int = 0
    moving_bytes: int = 0
    kept_bytes: int = 0
    activation_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.moving_bytes + self.kept_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A plan for generating, and what it will take.

    Attributes:
        device_map: Where each part is; its times are those of a token.
        holdings: What each device holds, by device.
        prefill_seconds: Of the forward over the prompt.
        token_seconds: Of the forward for each token after it.
    """

    device_map: DeviceMap
    holdings: Mapping[Device, Holding]
    prefill_seconds: float
    token_seconds: float


def forecast(
    blocks: Sequence[Block],
    budgets: Mapping[Device, int],
    rates: Rates,
    *,
    prefill: Mapping[str, Cost],
    token: Mapping[str, Cost],
) -> Forecast:
    """Plan for both forwards of generating: it fits the larger of them, and is as fast as may be for a token.

    Args:
        blocks: Of the model, in the order of the forward.
        budgets: What each device may hold.
        rates: How fast weights come.
        prefill: What each block does in the forward over the prompt.
        token: What each does in the forward for a token when the prompt is in the cache.

    Raises:
        DeviceMapError: The budgets cannot hold the model.
    """
    computing, room = rooms_of(budgets)
    costs = {name: _larger(token.get(name, Cost()), cost) for name, cost in prefill.items()}
    plan = plan_places(blocks, costs, room, rates)
    holdings = {
        device: _holding(blocks, plan, costs, at, room.devices[at]) for at, device in enumerate(computing)
    }
    for device, source in (("cpu", "host"), ("disk", "disk")):
        held = sum(
            block.size_bytes - block.stay_bytes
            for block, where in zip(blocks, plan.sources, strict=True)
            if where == source
        )
        if device not in holdings and (held or device in budgets):
            holdings[device] = Holding(budget_bytes=budgets.get(device), weight_bytes=held)
    return Forecast(
        device_map=map_of(plan, blocks, computing, token),
        holdings=holdings,
        prefill_seconds=predicted_seconds(plan, blocks, prefill, rates, in_place=room.in_place),
        token_seconds=predicted_seconds(plan, blocks, token, rates, in_place=room.in_place),
    )


def _larger(token: Cost, prefill: Cost) -> Cost:
    """The time of a token, in the memory that either forward takes."""
    return Cost(
        seconds=token.seconds,
        peak_bytes=max(token.peak_bytes, prefill.peak_bytes),
        kept_bytes=max(token.kept_bytes, prefill.kept_bytes),
    )


def _holding(
    blocks: Sequence[Block], plan: PlacePlan, costs: Mapping[str, Cost], at: int, budget_bytes: int
) -> Holding:
    """What a device that computes holds."""
    mine = [index for index, device in enumerate(plan.devices) if device == at]
    each = [costs.get(blocks[index].name, Cost()) for index in mine]
    return Holding(
        budget_bytes=budget_bytes,
        weight_bytes=sum(
            blocks[index].size_bytes if plan.sources[index] == "device" else blocks[index].stay_bytes
            for index in mine
        ),
        moving_bytes=plan.windows[at],
        kept_bytes=sum(cost.kept_bytes for cost in each),
        activation_bytes=max((cost.peak_bytes for cost in each), default=0),
    )
