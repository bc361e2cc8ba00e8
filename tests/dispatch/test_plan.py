import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain_dispatch.blocks import Block
from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.plan import Budgets, Cost, PlacePlan, plan_places
from drivetrain_dispatch.timeline import Rates

RATES = Rates(to_device=100.0, from_disk=50.0)


def layers(number: int, size_bytes: int = 100) -> list[Block]:
    return [Block(f"layer.{index}", size_bytes, index) for index in range(number)]


def costs_of(blocks: list[Block], *, peak_bytes: int = 0, kept_bytes: int = 0) -> dict[str, Cost]:
    return {block.name: Cost(seconds=1.0, peak_bytes=peak_bytes, kept_bytes=kept_bytes) for block in blocks}


def drawn(plan: PlacePlan) -> str:
    return "".join({"device": "D", "host": "h", "disk": "."}[source] for source in plan.sources)


def test_what_fits_stays_and_the_devices_are_filled_in_order() -> None:
    plan = plan_places(layers(6), {}, Budgets(devices=(250, 450), host=0), RATES)
    assert drawn(plan) == "DDDDDD"
    assert plan.devices == (0, 0, 1, 1, 1, 1)


def test_what_does_not_fit_is_spread_evenly() -> None:
    blocks = layers(12)
    plan = plan_places(blocks, costs_of(blocks), Budgets(devices=(800,), host=10_000), RATES)
    assert drawn(plan) == "DhDhDDhDhDhD"
    assert plan.depth == 0  # room for one that comes: it does so while one that stays computes
    assert plan.seconds == 12  # nothing is waited for


def test_the_disk_takes_what_the_host_cannot_hold() -> None:
    blocks = layers(12)
    plan = plan_places(blocks, costs_of(blocks), Budgets(devices=(800,), host=300), RATES)
    assert drawn(plan) == "DhD.DhD.DhD."
    assert plan.seconds == 12


def test_each_device_computes_its_run_of_layers_and_streams_into_itself() -> None:
    blocks = layers(12)
    plan = plan_places(blocks, costs_of(blocks), Budgets(devices=(500, 500), host=10_000), RATES)
    assert plan.devices == (0,) * 6 + (1,) * 6
    assert drawn(plan)[:6].count("D") == drawn(plan)[6:].count("D") > 0


def test_activations_and_what_stays_behind_take_their_room() -> None:
    blocks = layers(4)
    fits = costs_of(blocks, peak_bytes=50, kept_bytes=10)
    assert drawn(plan_places(blocks, fits, Budgets(devices=(490,), host=1000), RATES)) == "DDDD"
    assert "h" in drawn(plan_places(blocks, fits, Budgets(devices=(489,), host=1000), RATES))


def test_shared_weights_are_in_one_place() -> None:
    blocks = [Block("embed", 500, 0), *(Block(f"{i}", 100, i) for i in range(1, 9)), Block("head", 0, 0)]
    plan = plan_places(blocks, {}, Budgets(devices=(800, 700), host=1000), RATES)
    assert (plan.sources[0], plan.devices[0]) == (plan.sources[-1], plan.devices[-1])


def test_a_few_large_ones_stay_where_room_for_them_would_cost_more() -> None:
    blocks = [Block("embed", 1000, 0), *(Block(f"{i}", 100, i) for i in range(1, 20))]
    plan = plan_places(blocks, costs_of(blocks), Budgets(devices=(2000,), host=5000), RATES)
    assert drawn(plan)[0] == "D"


@pytest.mark.parametrize(
    ("budgets", "told"),
    [
        (Budgets(devices=(90,), host=1000), r"'layer.0' takes 100 B, activations up to 0 B, 0 B stay"),
        (Budgets(devices=(150,), host=10, disk=20), r"the model takes 400 B and the devices may hold 180 B"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_is_told(budgets: Budgets, told: str) -> None:
    with pytest.raises(DeviceMapError, match=f"max_memory: {told}"):
        plan_places(layers(4), {}, budgets, RATES)


def test_the_block_that_is_too_large_is_named_with_what_it_needs() -> None:
    blocks = [*layers(3, 10**9), Block("head", 6 * 10**9, 3)]
    costs = {"head": Cost(peak_bytes=5 * 10**8, kept_bytes=0)}
    with pytest.raises(
        DeviceMapError, match=r"'head' takes 6.00 GB, activations up to 500.00 MB.* give one at least 6.50 GB"
    ):
        plan_places(blocks, costs, Budgets(devices=(4 * 10**9,), host=10**12), RATES)


@pytest.mark.parametrize("devices", [(50, 800), (800, 50), (50, 0, 800, 90)])
def test_a_device_without_room_for_a_block_leaves_it_to_the_others(devices: tuple[int, ...]) -> None:
    blocks = layers(12)
    alone = plan_places(blocks, costs_of(blocks), Budgets(devices=(800,), host=10_000), RATES)
    plan = plan_places(blocks, costs_of(blocks), Budgets(devices=devices, host=10_000), RATES)
    assert plan.sources == alone.sources
    assert {devices[at] for at in plan.devices} == {800}


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 60), st.integers(0, 20)), min_size=1, max_size=15)
)
def test_what_an_error_asks_for_is_enough(model: list[tuple[int, int, int]]) -> None:
    blocks = [Block(f"{index}", size_bytes, index) for index, (size_bytes, _, _) in enumerate(model)]
    costs = {
        f"{index}": Cost(peak_bytes=peak, kept_bytes=kept) for index, (_, peak, kept) in enumerate(model)
    }
    asked = (
        max(size for size, _, _ in model)
        + max(peak for _, peak, _ in model)
        + sum(kept for _, _, kept in model)
    )
    plan = plan_places(blocks, costs, Budgets(devices=(1, asked), host=0), RATES)
    assert len(plan.sources) == len(blocks)
    assert "host" not in plan.sources  # which may hold nothing


models = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 60), st.integers(0, 20)), min_size=1, max_size=25
)


@settings(max_examples=300)
@given(
    models,
    st.lists(st.integers(0, 3000), min_size=1, max_size=3),
    st.integers(0, 4000),
    st.data(),
)
def test_no_budget_is_exceeded_at_the_peak(
    model: list[tuple[int, int, int]], devices: list[int], host: int, data: st.DataObject
) -> None:
    blocks: list[Block] = []
    for index, (size_bytes, _, _) in enumerate(model):
        other = data.draw(st.integers(0, index)) if data.draw(st.integers(0, 9)) == 0 else index
        group = blocks[other].group if other < index else index
        blocks.append(Block(f"{index}", size_bytes, group))
    costs = {
        f"{index}": Cost(seconds=0.1, peak_bytes=peak, kept_bytes=kept)
        for index, (_, peak, kept) in enumerate(model)
    }
    try:
        plan = plan_places(blocks, costs, Budgets(devices=tuple(devices), host=host), RATES)
    except DeviceMapError:
        whole = sum(block.size_bytes for block in blocks) + sum(cost.kept_bytes for cost in costs.values())
        assert whole + max(cost.peak_bytes for cost in costs.values()) > max(devices)
        return
    assert len(plan.sources) == len(plan.devices) == len(blocks)
    for at, budget in enumerate(devices):
        mine = [index for index in range(len(blocks)) if plan.devices[index] == at]
        stays = sum(blocks[index].size_bytes for index in mine if plan.sources[index] == "device")
        kept = sum(costs[f"{index}"].kept_bytes for index in mine)
        peak = max((costs[f"{index}"].peak_bytes for index in mine), default=0)
        coming = [blocks[index].size_bytes for index in mine if plan.sources[index] != "device"]
        assert stays + kept + peak + sum(sorted(coming)[-plan.depth - 1 :]) <= budget
    assert (
        sum(block.size_bytes for block, source in zip(blocks, plan.sources, strict=True) if source == "host")
        <= host
    )
    for block, source, device in zip(blocks, plan.sources, plan.devices, strict=True):
        first = block.group
        assert (source, device) == (plan.sources[first], plan.devices[first])
