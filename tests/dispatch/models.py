"""Models for the tests of dispatching, and ways to dispatch them."""

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drivetrain_dispatch.offload.dispatch import dispatch_model

WIDTH = 8
Pair: TypeAlias = tuple[nn.Module, nn.Module]  # a dispatched model, and the same that is not
RunRanks: TypeAlias = Callable[..., list[Any]]  # the fixture that calls a function on every rank


class Gate(nn.Module):
    """A module with a parameter and a buffer of its own, and one inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("shift", torch.rand(WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale + self.shift


class Listed(nn.Module):
    """Weights in a list that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.rand(WIDTH)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weights[0] + self.weights[1]


class Attention(nn.Module):
    """Attention over the batch, whose output projection is used without being called."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class Recurrent(nn.Module):
    """An LSTM keeps references to its weights beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Borrows(nn.Module):
    """Computes with the weight of another module that it does not call."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.rand(WIDTH))
        self._other = [other]  # no submodule

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self._other[0].weight.t(), self.bias)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "gate": Gate,
    "listed": Listed,
    "attention": Attention,
    "recurrent": Recurrent,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0),
    "batch_norm": lambda: nn.BatchNorm1d(WIDTH),
}


class Tree(nn.Module):
    """Parts called in any order, some several times, some never; the last may borrow and share weights."""

    def __init__(self, kinds: list[str], calls: list[int], *, tied: bool, borrows: bool) -> None:
        super().__init__()
        first = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList([first, *(KINDS[kind]() for kind in kinds)])
        self.head = Borrows(first) if borrows else nn.Linear(WIDTH, WIDTH)
        if tied and isinstance(self.head, nn.Linear):
            self.head.weight = first.weight
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        for call in self.calls:
            x = self.parts[call % len(self.parts)](x)
        return self.head(x)


trees = st.builds(
    Tree,
    st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4),
    st.lists(st.integers(0, 4), min_size=1, max_size=8),
    tied=st.booleans(),
    borrows=st.booleans(),
)


class Stack(nn.Module):
    """Layers that are called one after the other."""

    def __init__(self, num_layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, x: Tensor, *, skip: int = -1) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index != skip:
                x = layer(x).tanh()
        return x


class Coder(nn.Module):
    """Used by two methods beside its forward, each in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.encoder = Stack(), Stack()

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def decode(self, x: Tensor, *, shift: Tensor | None = None) -> Tensor:
        return self.decoder(x) if shift is None else self.decoder(x) + shift

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


class Checkpointed(Stack):
    """Its layers are computed again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda layer, x: layer(x).tanh(), layer, x, use_reentrant=False)
        return x


class CheckpointedBlocks(nn.Module):
    """Blocks of several layers, each block computed again in the backward; `shared` has one layer in all of them."""

    def __init__(self, num_blocks: int = 4, *, use_reentrant: bool, shared: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Tanh()) for _ in range(num_blocks)
        )
        self.head = nn.Linear(WIDTH, WIDTH)
        if shared:
            for block in self.blocks:
                block[1] = self.blocks[0][1]
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


class Uses(nn.Module):
    """Does something with a weight."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.weight)


class Writes(nn.Module):
    """Writes to a weight in its forward, by a view, from outside of the module that holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            self.embed.weight[0].zero_()
        return self.embed(tokens)


class Converts(nn.Module):
    """Converts a layer in its forward to a dtype that it has, as routers of mixtures of experts do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        self.layer = self.layer.to(self.dtype)
        return self.layer(x)


def streamed(model: nn.Module, **options: object) -> nn.Module:
    """The model with all weights copied before their use."""
    names = [name for name, _ in model.named_parameters()]
    return dispatch_model(model, {"": "cpu"}, dtypes=dict.fromkeys(names, torch.float32), **options)


def same_values(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def copied(model: nn.Module, place: str = "cpu", **options: object) -> nn.Module:
    """The model with all weights copied before their use, each in its own dtype."""
    dtypes = {name: tensor.dtype for name, tensor in model.named_parameters(remove_duplicate=False)}
    return dispatch_model(model, {"": place}, dtypes=dtypes, **options)


def assert_same_gradients(one: nn.Module, other: nn.Module) -> None:
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad) if ours.grad is not None else theirs.grad is None


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def file_of(tensor: Tensor) -> str:
    """Return the path of the file in whose pages a tensor lies; "" if in none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split(maxsplit=5)
        begin, end = (int(each, 16) for each in span.split("-"))
        if begin <= tensor.data_ptr() < end:
            return name if name.startswith("/") else ""
    return ""


def run_threads(work: Callable[[int], object], count: int) -> None:
    """Run a function with each index in a thread of its own."""
    with ThreadPoolExecutor(count) as threads:
        wait(futures := [threads.submit(work, index) for index in range(count)], timeout=60)
    for future in futures:
        future.result()


@contextmanager
def full_disk(size_bytes: int) -> Generator[None]:
    """A block in which no file grows beyond a size, as on a full disk."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
