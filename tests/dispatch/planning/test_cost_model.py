import copy
import gc
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain_dispatch.errors import CostError
from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_dispatch.planning.block_groups import BlockCost
from drivetrain_dispatch.planning.blocks import blocks_of
from drivetrain_dispatch.planning.cost_model import ComputeRate, measure_costs

FLOPS = ComputeRate(flops_per_second=1.0, bytes_per_second=1e30, operation_seconds=0)  # seconds are FLOPs
BYTES = ComputeRate(flops_per_second=1e30, bytes_per_second=1.0, operation_seconds=0)  # seconds are bytes
STARTS = ComputeRate(flops_per_second=1e30, bytes_per_second=1e30, operation_seconds=1.0)


def costs_of(
    model: nn.Module, *args: Any, rate: ComputeRate = FLOPS, no_split: tuple[str, ...] = (), **kwargs: Any
) -> dict[str, BlockCost]:
    return measure_costs(
        model, args, kwargs, blocks=blocks_of(ModelLayout.of(model), no_split=no_split), rate=rate
    )


def seconds_of(costs: dict[str, BlockCost]) -> dict[str, float]:
    return {name: round(cost.seconds, 6) for name, cost in costs.items()}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32, bias=False), nn.ReLU(), nn.Linear(32, 4, bias=False))


BOTH = ComputeRate(flops_per_second=10.0, bytes_per_second=1.0, operation_seconds=3.0)
READ_AND_WRITTEN = (4 * (10 * 8 + 8 * 32 + 10 * 32), 4 * (10 * 32 + 10 * 32), 4 * (10 * 32 + 32 * 4 + 10 * 4))


@pytest.mark.parametrize(
    ("rate", "seconds"),
    [
        (FLOPS, (2 * 10 * 8 * 32, 0, 2 * 10 * 32 * 4)),
        (BYTES, READ_AND_WRITTEN),
        (STARTS, (1, 1, 1)),
        (BOTH, tuple(size + 3 for size in READ_AND_WRITTEN)),  # the longer of its two times, and its start
    ],
    ids=["flops", "bytes", "starts", "all"],
)
def test_each_operation_takes_its_time(rate: ComputeRate, seconds: tuple[float, ...]) -> None:
    costs = costs_of(mlp(), torch.zeros(10, 8), rate=rate)
    assert seconds_of(costs) == dict(zip("012", seconds, strict=True))


def test_the_peak_is_all_activations_that_live_while_a_block_runs() -> None:
    costs = costs_of(mlp(), torch.zeros(10, 8))
    given, wide, narrow = 4 * 10 * 8, 4 * 10 * 32, 4 * 10 * 4
    peaks = [cost.peak_bytes for cost in costs.values()]
    assert peaks == [given + wide, given + 2 * wide, given + wide + narrow]
    assert [cost.kept_bytes for cost in costs.values()] == [0, 0, 0]  # a result is the caller's


def test_an_embedding_reads_only_the_rows_it_looks_up() -> None:
    model = nn.Embedding(100_000, 8)
    assert costs_of(model, torch.zeros(3, dtype=torch.long), rate=BYTES)[""].seconds == 2 * 3 * 8 * 4 + 3 * 8


def test_nothing_takes_memory_and_the_model_stays_as_it_is() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(100_000, 100_000, bias=False) for _ in range(3)))  # 120 GB
    given = torch.zeros(10, 100_000, device="meta")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    costs = costs_of(model, given)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * (1 if sys.platform == "darwin" else 1024) < 1e9
    assert costs["2"].seconds == 2 * 10 * 10**10


class Counting(nn.Module):
    """Its forward changes a buffer, a plain attribute, and keeps a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))
        self.scale = torch.full((4,), 2.0)
        self.num_calls = 0
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.num_calls += 1
        self.scale = self.scale * 2
        self.seen.append(x)
        return self.layer(x) * self.scale


def test_a_forward_that_changes_its_module_changes_the_copy_alone() -> None:
    model = Counting()
    before = copy.deepcopy(model.state_dict())
    given = torch.ones(2, 4)
    costs_of(model, given)
    assert model.num_calls == 0
    assert model.seen == []
    assert model.scale.tolist() == [2.0] * 4
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert given.tolist() == torch.ones(2, 4).tolist()
    assert model(given).requires_grad


class Layer(nn.Module):
    """Attention by keys and values of its own, which it appends to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.keys, self.values = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor, cache: list[tuple[Tensor, Tensor]], at: int) -> Tensor:
        keys, values = self.keys(self.norm(x)), self.values(x)
        if len(cache) > at:
            keys = torch.cat([cache[at][0], keys], dim=1)
            values = torch.cat([cache[at][1], values], dim=1)
            cache[at] = (keys, values)
        else:
            cache.append((keys, values))
        return x + F.scaled_dot_product_attention(x[:, None], keys[:, None], values[:, None])[:, 0]


@dataclass
class Output:
    logits: Tensor
    cache: list[tuple[Tensor, Tensor]] | None = None


class Decoder(nn.Module):
    def __init__(self, wrap: Callable[[Tensor, Any], Any] = Output, *, tied: bool = False) -> None:
        super().__init__()
        self.wrap = wrap
        self.embed = nn.Embedding(50, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, cache: list[tuple[Tensor, Tensor]] | None = None) -> Any:
        cache = [] if cache is None else cache
        x = self.embed(ids) * self.scale
        for at, layer in enumerate(self.layers):
            x = layer(x, cache, at)
        return self.wrap(self.head(x), cache)


@pytest.mark.parametrize(
    "wrap",
    [
        Output,
        lambda logits, cache: (logits, cache),
        lambda logits, cache: {"logits": logits, "cache": cache},
        lambda logits, cache: [logits, tuple(cache)],
    ],
    ids=["dataclass", "tuple", "dict", "list"],
)
def test_keys_and_values_are_kept_and_logits_are_not(wrap: Callable[[Tensor, Any], Any]) -> None:
    model, ids = Decoder(wrap), torch.zeros(2, 7, dtype=torch.long)
    costs = costs_of(model, ids, no_split=("Layer",))
    kept = {name: cost.kept_bytes for name, cost in costs.items()}
    each = 2 * 2 * 7 * 8 * 4  # keys and values of 2 x 7 tokens
    assert kept == {"scale": 0, "embed": 0} | {f"layers.{at}": each for at in range(3)} | {"head": 0}
    # That of other layers is not counted to a layer's peak again.
    peaks = [costs[f"layers.{at}"].peak_bytes for at in range(3)]
    assert peaks[1] == peaks[2] < 10 * each


def test_a_cache_that_is_given_counts_to_the_layers_that_use_it() -> None:
    model = Decoder()
    cache = [(torch.zeros(2, 30, 8), torch.zeros(2, 30, 8)) for _ in range(3)]
    costs = costs_of(model, torch.zeros(2, 1, dtype=torch.long), cache, no_split=("Layer",))
    assert [costs[f"layers.{at}"].kept_bytes for at in range(3)] == [2 * 2 * 31 * 8 * 4] * 3
    # Of old keys and values only those of the layer that runs are there beside the new ones.
    assert all(
        2 * 30 * 8 * 4 < costs[f"layers.{at}"].peak_bytes < 2 * 2 * 30 * 8 * 4 + 2000 for at in range(3)
    )
    assert len(cache) == 3
    assert all(part.shape == (2, 30, 8) and not part.is_meta for pair in cache for part in pair)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        cache[0][:1] = self.layer(x)
        return x + cache[0].sum(0)


def test_a_cache_that_is_written_in_place_is_kept_too() -> None:
    costs = costs_of(InPlace(), torch.zeros(1, 8), [torch.zeros(1000, 8)])
    assert costs["layer"].kept_bytes == 1000 * 8 * 4
    assert costs["layer"].peak_bytes < 1000


def test_what_runs_between_blocks_counts_to_the_one_before_and_parameters_are_blocks() -> None:
    starts = seconds_of(costs_of(Decoder(), torch.zeros(2, 7, dtype=torch.long), rate=STARTS))
    assert starts["scale"] == 1  # its product with the embedding
    assert starts["embed"] == 1
    # The slow way of attention would be many operations. It is one here, and the sum after it.
    assert starts["layers.0.values"] == 3
    assert sum(starts.values()) == 2 + 3 * (1 + 1 + 3) + 1


def test_attention_keeps_no_scores() -> None:
    costs = costs_of(Decoder(), torch.zeros(1, 5000, dtype=torch.long), no_split=("Layer",))
    assert costs["layers.0"].peak_bytes < 5000 * 5000
    flops = 2 * 2 * 5000 * 8 * 8 + 2 * 5000 * 5000 * (8 + 8)
    assert costs["layers.0"].seconds == flops


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.again = self.used

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x)  # before any block
        return self.again(self.used(self.used(x)))


def test_a_module_that_runs_several_times_adds_up_and_one_that_never_runs_costs_nothing() -> None:
    costs = costs_of(Twice(), torch.zeros(3, 8))
    assert seconds_of(costs) == {"used": 3 * 2 * 3 * 64, "unused": 0, "again": 0}
    assert costs["unused"] == BlockCost()
    assert costs_of(Twice(), torch.zeros(3, 8), rate=STARTS)["used"].seconds == 4


def test_weights_that_are_used_without_their_module_count_to_it() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.zeros(1, 5, 8)
    costs = costs_of(model, x, x, x)
    assert costs[""].seconds >= 2 * 5 * 8 * 8


def test_tied_weights_run_where_they_are_used() -> None:
    ids = torch.zeros(2, 7, dtype=torch.long)
    tied, plain = costs_of(Decoder(tied=True), ids), costs_of(Decoder(), ids)
    assert seconds_of(tied) == seconds_of(plain)
    assert tied["head"].seconds == 2 * 14 * 8 * 50


def test_a_model_without_data_costs_what_one_with_data_does() -> None:
    ids = torch.zeros(2, 7, dtype=torch.long)
    with torch.device("meta"):
        empty = Decoder()
    assert costs_of(empty, ids.to("meta")) == costs_of(Decoder(), ids) == costs_of(empty, ids=ids)


class Beside(nn.Module):
    """Makes a table on the host, as a model that never leaves it does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.arange(8.0) + torch.cat([torch.zeros(4), x[0, :4]])


def test_a_table_made_on_the_host_will_do() -> None:
    assert costs_of(Beside(), torch.zeros(3, 8))["layer"].seconds == 2 * 3 * 64


class Choosing(nn.Module):
    def __init__(self, choose: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.choose = nn.Linear(8, 8), choose

    def forward(self, x: Tensor) -> Tensor:
        self.choose(x)
        return self.layer(x)


@pytest.mark.parametrize(
    "choose",
    [
        lambda x: x.sum().item(),
        lambda x: x.sum() > 0 or None,
        lambda x: x[x > 0],
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: torch.unique(x),
    ],
    ids=["item", "bool", "mask", "tolist", "numpy", "unique"],
)
def test_a_forward_that_depends_on_data_is_told_what_to_do(choose: Callable[[Tensor], Any]) -> None:
    with pytest.raises(CostError, match=r"depends on the values of tensors .* by hand: costs="):
        costs_of(Choosing(choose), torch.zeros(3, 8))


def test_inputs_that_do_not_fit_fail_as_with_data() -> None:
    with pytest.raises(RuntimeError, match=r"same reduction dim|cannot be multiplied") as caught:
        costs_of(mlp(), torch.zeros(3, 9))
    assert not isinstance(caught.value, CostError)
    with pytest.raises(TypeError, match="unexpected keyword argument 'labels'"):
        costs_of(mlp(), torch.zeros(3, 8), labels=None)


def test_a_model_that_cannot_be_copied_is_told_what_to_do() -> None:
    model = mlp()
    model.stream = open(__file__)  # noqa: SIM115
    with model.stream, pytest.raises(CostError, match=r"Sequential or its inputs cannot be copied.*by hand"):
        costs_of(model, torch.zeros(3, 8))


def num_empty_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(found), Tensor) and found.is_meta for found in gc.get_objects())


def test_nothing_stays_behind() -> None:
    ids = torch.zeros(2, 7, dtype=torch.long)
    costs_of(Decoder(), ids)
    before = num_empty_tensors()
    costs_of(Decoder(), ids)
    assert num_empty_tensors() <= before
