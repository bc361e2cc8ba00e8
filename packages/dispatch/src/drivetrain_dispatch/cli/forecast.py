"""Forecast generation with a model: its device map, the memory of each device, the seconds per token. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drivetrain_dispatch.planning.block_groups import BlockCost
from drivetrain_dispatch.planning.blocks import Block
from drivetrain_dispatch.planning.device_map import Device, DeviceMap, Tier
from drivetrain_dispatch.planning.infer_device_map import build_device_map, split_budgets
from drivetrain_dispatch.planning.pipeline_model import Bandwidths
from drivetrain_dispatch.planning.solver import PlacePlan, plan_places, predicted_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """The memory of a device at its peak."""

    budget_bytes: int | None  # the memory budget; None for no limit
    weight_bytes: int = 0
    moving_bytes: int = 0  # the transfer window, for weights that are fetched at use
    kept_bytes: int = 0  # the bytes that a forward leaves for later ones, such as keys and values
    activation_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The bytes of weights, window, kept tensors and activations together."""
        return self.weight_bytes + self.moving_bytes + self.kept_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A plan for generation, with the peak memory of each device. The map's times are for one token."""

    device_map: DeviceMap
    holdings: Mapping[Device, DeviceUse]
    prefill_seconds: float
    token_seconds: float


def forecast(
    blocks: Sequence[Block],
    budgets: Mapping[Device, int],
    rates: Bandwidths,
    *,
    prefill: Mapping[str, BlockCost],
    token: Mapping[str, BlockCost],
) -> Forecast:
    """Plan generation: the prompt's and a token's forward fit in memory, and a token is as fast as possible."""
    computing, room = split_budgets(budgets)
    costs: dict[str, BlockCost] = {}
    for name, cost in prefill.items():  # the time of a token, with the memory that the larger forward takes
        one = token.get(name, BlockCost())
        peak_bytes, kept_bytes = max(one.peak_bytes, cost.peak_bytes), max(one.kept_bytes, cost.kept_bytes)
        costs[name] = BlockCost(seconds=one.seconds, peak_bytes=peak_bytes, kept_bytes=kept_bytes)
    plan = plan_places(blocks, costs, room, rates)
    holdings = {
        device: _holding(blocks, plan, costs, at, room.devices[at]) for at, device in enumerate(computing)
    }
    for device, source in (("cpu", Tier.HOST), ("disk", Tier.DISK)):
        held = sum(
            block.size_bytes - block.stay_bytes
            for block, where in zip(blocks, plan.sources, strict=True)
            if where is source
        )
        if device not in holdings and (held or device in budgets):
            holdings[device] = DeviceUse(budget_bytes=budgets.get(device), weight_bytes=held)
    return Forecast(
        device_map=build_device_map(plan, blocks, computing, token),
        holdings=holdings,
        prefill_seconds=predicted_seconds(plan, blocks, prefill, rates, in_place=room.in_place),
        token_seconds=predicted_seconds(plan, blocks, token, rates, in_place=room.in_place),
    )


def _holding(
    blocks: Sequence[Block], plan: PlacePlan, costs: Mapping[str, BlockCost], at: int, budget_bytes: int
) -> DeviceUse:
    """Return the memory of a computing device at its peak."""
    mine = [index for index, device in enumerate(plan.devices) if device == at]
    each = [costs.get(blocks[index].name, BlockCost()) for index in mine]
    return DeviceUse(
        budget_bytes=budget_bytes,
        weight_bytes=sum(
            blocks[index].size_bytes if plan.sources[index] is Tier.DEVICE else blocks[index].stay_bytes
            for index in mine
        ),
        moving_bytes=plan.windows[at],
        kept_bytes=sum(cost.kept_bytes for cost in each),
        activation_bytes=max((cost.peak_bytes for cost in each), default=0),
    )
