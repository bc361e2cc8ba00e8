import copy
import pickle
from inspect import signature

import pytest
import torch
from torch import Tensor, nn

from drivetrain_precision import PrecisionError, find_islands, keep_in_fp32

CPU = torch.device("cpu")


class Router(nn.Module):
    """Notes the dtype that it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.gate(x)
        self.seen.append(logits.dtype)
        return {"logits": logits if mask is None else logits + mask, "index": logits.argmax(-1)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(4), "fc": nn.Linear(4, 4)}) for _ in range(2)
        )
        self.router = Router()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["fc"](layer["norm"](x))
        return self.router(x)["logits"]


def names(model: nn.Module, *patterns: str) -> set[str]:
    islands = find_islands([model], patterns)[model]
    return {name for name, module in model.named_modules() if module in islands}


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.norm", {"layers.0.norm", "layers.1.norm"}),
        ("layers.1.*", {"layers.1.norm", "layers.1.fc"}),
        ("LayerNorm", {"layers.0.norm", "layers.1.norm"}),
        ("router", {"router", "router.gate"}),
        ("router.gate.weight", {"router.gate"}),
    ],
)
def test_modules_match_by_name_by_class_and_by_the_name_of_a_parameter(pattern: str, found: set[str]) -> None:
    assert names(Net(), pattern) == found


def test_a_pattern_that_matches_nothing_names_the_nearest() -> None:
    with pytest.raises(PrecisionError, match=r"'\*.norms' matches no module .* of Net.*LayerNorm"):
        find_islands([Net()], ["*.norms"])


def test_a_pattern_may_match_in_another_model() -> None:
    net, plain = Net(), nn.Linear(2, 2)
    assert find_islands([plain], ["*.norm"], known=[net])[plain] == frozenset()


def test_a_pattern_that_keeps_the_whole_model_is_refused() -> None:
    with pytest.raises(PrecisionError, match="it keeps every parameter of Net in fp32"):
        find_islands([Net()], ["*"])


def test_a_tie_across_the_border_is_refused_with_both_names() -> None:
    net = Net()
    net.layers[0]["fc"].weight = net.layers[1]["fc"].weight
    with pytest.raises(
        PrecisionError, match=r"layers.1.fc.weight stays in fp32 and is tied to layers.0.fc.weight"
    ):
        find_islands([net], ["layers.1.fc"])
    assert find_islands([net], ["*.fc"])[net]


@pytest.fixture
def half() -> Net:
    """A net in bf16 whose router is in fp32."""
    net = Net().to(torch.bfloat16)
    islands = find_islands([net], ["router"])[net]
    keep_in_fp32(islands, CPU, outside=torch.bfloat16)
    net.router.float()
    return net


def test_an_island_computes_in_fp32_and_returns_what_it_was_given(half: Net) -> None:
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    routed = half.router(x, mask=torch.ones(3, 2, dtype=torch.bfloat16))
    assert half.router.seen == [torch.float32]
    assert {name: value.dtype for name, value in routed.items()} == {
        "logits": torch.bfloat16,
        "index": torch.int64,
    }
    assert half.router(x.float())["logits"].dtype is torch.float32


def test_an_island_leaves_autocast() -> None:
    net = Net()
    keep_in_fp32(find_islands([net], ["router"])[net], CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert net(torch.randn(3, 4)).dtype is torch.bfloat16  # that of what it was given
    assert net.router.seen == [torch.float32]


def test_a_module_without_a_floating_input_returns_the_dtype_around_it() -> None:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2).to(torch.bfloat16))
    keep_in_fp32(find_islands([model], ["Embedding"])[model], CPU, outside=torch.bfloat16)
    assert model(torch.arange(3)).dtype is torch.bfloat16


def test_copies_and_pickles_are_islands_too(half: Net) -> None:
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    expected = half(x)
    for twin in (copy.deepcopy(half), pickle.loads(pickle.dumps(half))):
        twin.router.seen.clear()
        assert torch.equal(twin(x), expected)
        assert twin.router.seen == [torch.float32]
        assert type(twin.router).__name__ == "Router"
        assert isinstance(twin.router, Router)


def test_names_of_the_state_stay(half: Net) -> None:
    assert half.state_dict().keys() == Net().state_dict().keys()


def test_an_island_is_traced_without_a_graph_break() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)).to(torch.bfloat16)
    islands = find_islands([net], ["LayerNorm"])[net]
    keep_in_fp32(islands, CPU, outside=torch.bfloat16)
    net[1].float()
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    assert torch.equal(torch.compile(net, backend="eager", fullgraph=True)(x), net(x))


def test_a_forward_of_the_module_itself_is_refused() -> None:
    net = Net()
    net.router.forward = net.router.forward
    with pytest.raises(PrecisionError, match="a Router has a forward that was set on the module itself"):
        keep_in_fp32(find_islands([net], ["router"])[net], CPU)


def test_a_forward_keeps_its_signature() -> None:
    router = Router()
    before = signature(router.forward)
    keep_in_fp32([router], CPU)
    assert signature(router.forward) == before
