"""Dispatched models compute bit by bit what they compute without, wherever their weights are."""

import copy
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drivetrain_dispatch.dispatching import (
    dispatch_model,
    dispatched,
    offload_stats,
    remove_hooks,
    trace_offload,
)
from drivetrain_dispatch.errors import DeviceMapError, OffloadedError, WeightFilesError
from drivetrain_dispatch.trace import OffloadTrace

WIDTH = 8


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


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=trees, data=st.data())
def test_every_placement_computes_the_same(tree: Tree, data: st.DataObject, tmp_path: Path) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]), label="dtype")
    tree.to(dtype).eval()
    names = ["head", *(f"parts.{index}" for index in range(len(tree.parts)))]
    device_map = {name: data.draw(st.sampled_from(["cpu", "disk"]), label=name) for name in names}
    tensors = [name for name, _ in tree.named_parameters(remove_duplicate=False)]
    # What is copied before its use goes the way of an accelerator's weights, here as on any device.
    copied = data.draw(st.lists(st.sampled_from(tensors), unique=True), label="copied")
    compute = data.draw(st.sampled_from([dtype, torch.float32]), label="compute")
    whole = data.draw(st.sampled_from([(), ("Gate",), ("Tree",)]), label="whole")
    if whole == ("Gate",) and not any(isinstance(part, Gate) for part in tree.parts):
        whole = ()
    plain = copy.deepcopy(tree)
    if compute != dtype:
        copied = tensors
        plain.to(compute)
    x = torch.randn(3, WIDTH, dtype=compute)
    buffers = compute == dtype and data.draw(st.booleans(), label="offload_buffers")
    if compute != dtype:
        for buffer in tree.buffers():
            buffer.data = buffer.data.to(compute) if buffer.is_floating_point() else buffer.data
    stored = {name: tensor.clone() for name, tensor in tree.state_dict().items()}
    dispatch_model(
        tree,
        device_map,
        offload_dir=tmp_path,
        offload_buffers=buffers,
        preload_module_classes=whole,
        dtypes=dict.fromkeys(copied, compute),
    )
    with torch.inference_mode(data.draw(st.booleans(), label="inference_mode")), torch.no_grad():
        for _ in range(3):
            calls = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6), label="calls")
            tree.calls = plain.calls = calls
            assert torch.equal(tree(x), plain(x))
    assert _same(tree.state_dict(), stored)
    remove_hooks(tree)
    assert not dispatched(tree)
    assert _same(tree.state_dict(), stored)
    assert {type(parameter) for parameter in tree.parameters()} == {nn.Parameter}
    copy.deepcopy(tree)
    for module in tree.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


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


def streamed(model: nn.Module, **options: object) -> nn.Module:
    """The model with all weights copied before their use."""
    names = [name for name, _ in model.named_parameters()]
    return dispatch_model(model, {"": "cpu"}, dtypes=dict.fromkeys(names, torch.float32), **options)


@pytest.fixture
def stack() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Stack().eval()
    return streamed(copy.deepcopy(model)), model


def test_every_part_is_on_its_way_before_its_turn(stack: tuple[nn.Module, nn.Module]) -> None:
    model, _ = stack
    for _ in range(3):
        model(torch.randn(2, WIDTH))
    stats = offload_stats(model)
    assert (stats.num_used, stats.num_missed) == (18, 0)


def test_a_part_that_nobody_expected_is_brought_and_counted(stack: tuple[nn.Module, nn.Module]) -> None:
    model, plain = stack
    x = torch.randn(2, WIDTH)
    model(x, skip=4)
    missed = offload_stats(model).num_missed
    assert torch.equal(model(x), plain(x))  # layer 4 comes though the last forward left it out
    assert offload_stats(model).num_missed == missed + 1
    assert torch.equal(model.layers[3](x), plain.layers[3](x))  # by itself


def test_two_threads_may_use_one_model(stack: tuple[nn.Module, nn.Module]) -> None:
    model, plain = stack
    wrong: list[str] = []

    def use(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for turn in range(40):
            x = torch.randn(2, WIDTH, generator=generator)
            skip = (seed + turn) % 7
            with torch.no_grad():
                if not torch.equal(model(x, skip=skip), plain(x, skip=skip)):
                    wrong.append(f"thread {seed}, turn {turn}")

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_a_forward_that_fails_leaves_weights_away_and_the_next_one_goes_on(
    stack: tuple[nn.Module, nn.Module],
) -> None:
    model, plain = stack
    handle = model.layers[2].register_forward_hook(_fail)
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        model(torch.randn(2, WIDTH))
    handle.remove()
    x = torch.randn(2, WIDTH)
    assert torch.equal(model(x), plain(x))
    remove_hooks(model)
    assert torch.equal(model(x), plain(x))


def _fail(*_: object) -> None:
    raise ZeroDivisionError("in the middle")


def test_hooks_of_others_stay_and_are_called(stack: tuple[nn.Module, nn.Module]) -> None:
    model, _ = stack
    seen: list[str] = []
    model.layers[1].register_forward_hook(lambda *_: seen.append("after"))
    model.layers[1].register_forward_pre_hook(lambda *_: seen.append("before"))
    model(torch.randn(2, WIDTH))
    remove_hooks(model)(torch.randn(2, WIDTH))
    assert seen == ["before", "after"] * 2


def test_layers_that_are_compiled_stream_their_weights() -> None:
    torch.manual_seed(0)
    model = Stack(3).eval()
    plain = copy.deepcopy(model)
    streamed(model)
    for layer in model.layers:
        layer.compile(backend="eager")
    x = torch.randn(2, WIDTH)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(x), plain(x))
    assert offload_stats(model).num_used == 9


def test_what_a_forward_writes_into_a_streamed_buffer_is_kept() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).train()
    plain = copy.deepcopy(model)
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert set(names) == set(dtypes)
    dispatch_model(model, {"": "cpu"}, offload_buffers=True, dtypes=dtypes)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(4, WIDTH)
            assert torch.equal(model(x), plain(x))
    assert _same(model.state_dict(), plain.state_dict())


def test_stored_weights_can_be_read_and_written_while_they_are_away(
    stack: tuple[nn.Module, nn.Module],
) -> None:
    model, plain = stack
    assert model.layers[0].weight.shape == (WIDTH, WIDTH)
    with torch.no_grad():
        for one in (model, plain):
            one.layers[0].weight.mul_(2)
    x = torch.randn(2, WIDTH)
    assert torch.equal(model(x), plain(x))
    weights = {name: torch.full_like(tensor, 0.1) for name, tensor in plain.state_dict().items()}
    model.load_state_dict(weights)
    plain.load_state_dict(weights)
    assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("change", [nn.Module.half, nn.Module.double, lambda model: model.to(torch.bfloat16)])
def test_streamed_weights_cannot_be_converted(
    stack: tuple[nn.Module, nn.Module], change: Callable[[nn.Module], object]
) -> None:
    with pytest.raises(OffloadedError, match=r"remove_hooks\(model\) first"):
        change(stack[0])


def test_a_dispatched_model_is_not_copied_with_its_hooks(stack: tuple[nn.Module, nn.Module]) -> None:
    with pytest.raises(OffloadedError, match=r"save its state_dict\(\)"):
        copy.deepcopy(stack[0])


def test_a_model_is_dispatched_once(stack: tuple[nn.Module, nn.Module]) -> None:
    with pytest.raises(OffloadedError, match="dispatched already"):
        dispatch_model(stack[0], {"": "cpu"})
    with pytest.raises(OffloadedError, match="not dispatched"):
        offload_stats(stack[1])


def test_a_trace_tells_what_came_while_others_computed(stack: tuple[nn.Module, nn.Module]) -> None:
    model, _ = stack
    with trace_offload(model) as trace:
        model(torch.randn(2, WIDTH))
    model(torch.randn(2, WIDTH))
    assert [turn.name for turn in trace.turns] == [f"layers.{index}" for index in range(6)]
    for turn in trace.turns:
        assert turn.brought[0] <= turn.brought[1] <= turn.waited[1] == turn.computed[0] <= turn.computed[1]
    for turn, later in pairwise(trace.turns):
        assert later.brought[0] < turn.computed[1]  # on its way before the one in front was through
    picture = trace.svg()
    assert picture.count("<rect") >= 1 + 2 * 6
    assert "layers.3" in picture
    with pytest.raises(ValueError, match="nothing was traced"):
        OffloadTrace().svg()
    with pytest.raises(OffloadedError, match="not dispatched"), trace_offload(nn.Linear(1, 1)):
        pass


class TestOnTheDisk:
    """Weights that the host uses in the pages of their file."""

    def test_the_file_is_used_in_place(self, tmp_path: Path) -> None:
        model = Stack()
        plain = copy.deepcopy(model)
        dispatch_model(model, {"": "disk"}, offload_dir=tmp_path / "new" / "folder")
        (file,) = (tmp_path / "new" / "folder").iterdir()
        assert file.stat().st_size > sum(parameter.nbytes for parameter in model.parameters())
        x = torch.randn(2, WIDTH)
        assert torch.equal(model(x), plain(x))
        mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(file) in line]
        places = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in mapped]
        for parameter in model.parameters():
            assert any(start <= parameter.data_ptr() < end for start, end in places)

    @pytest.mark.parametrize("change", ["replaced", "written", "deleted"])
    def test_a_file_that_changes_stops_the_next_forward(self, tmp_path: Path, change: str) -> None:
        model = dispatch_model(Stack(), {"": "disk"}, offload_dir=tmp_path)
        model(torch.randn(2, WIDTH))
        (file,) = tmp_path.iterdir()
        content = file.read_bytes()
        if change == "written":
            file.write_bytes(content[:-4] + b"abcd")
        else:
            file.unlink()
        if change == "replaced":
            file.write_bytes(content)
        with pytest.raises(WeightFilesError, match="has changed since the model was loaded"):
            model(torch.randn(2, WIDTH))

    def test_without_a_folder_nothing_is_done(self) -> None:
        model = Stack()
        with pytest.raises(DeviceMapError, match="name a folder for them, offload_dir"):
            dispatch_model(model, {"": "disk"})
        assert not dispatched(model)

    def test_a_folder_that_cannot_be_written_leaves_the_model_alone(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        model = Stack()
        with pytest.raises(WeightFilesError, match="could not be written"):
            dispatch_model(model, {"": "disk"}, offload_dir=tmp_path / "file")
        assert not dispatched(model)

    def test_a_disk_that_is_full_leaves_nothing_behind(self, tmp_path: Path) -> None:
        resource = pytest.importorskip("resource")
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
        values = [parameter.data_ptr() for parameter in model.parameters()]
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (300_000, hard)
        )  # no file grows beyond: as a full disk does
        try:
            with pytest.raises(
                WeightFilesError, match=r"0\.00 GB of weights could not be written .* free the disk"
            ):
                dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert list(tmp_path.iterdir()) == []
        assert not dispatched(model)
        assert [parameter.data_ptr() for parameter in model.parameters()] == values

    def test_training_writes_to_memory_and_never_to_the_file(self, tmp_path: Path) -> None:
        model = dispatch_model(Stack(), {"": "disk"}, offload_dir=tmp_path)
        (file,) = tmp_path.iterdir()
        before = file.read_bytes()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(2, WIDTH)).sum().backward()
        optimizer.step()
        assert file.read_bytes() == before


def test_a_map_that_does_not_fit_changes_nothing() -> None:
    model = Stack()
    with pytest.raises(DeviceMapError, match=r"no device for 'layers\.1\.weight'"):
        dispatch_model(model, {"layers.0": "cpu"})
    with pytest.raises(DeviceMapError, match="is not here"):
        dispatch_model(model, {"": "cuda:7"})
    with pytest.raises(ValueError, match="no module of such a class"):
        streamed(model, preload_module_classes=["Block"])
    with pytest.raises(DeviceMapError, match="on the meta device"):
        dispatch_model(Stack().to("meta"), {"": "cpu"})
    assert not dispatched(model)


class TestTraining:
    """Weights and what the optimizer keeps are on the host; forward and backward bring what they need."""

    @pytest.mark.parametrize("kind", ["stack", "tree", "checkpointed"])
    def test_training_is_the_same_bit_by_bit(self, kind: str) -> None:
        torch.manual_seed(0)
        kinds = ["gate", "attention", "recurrent", "listed", "norm", "linear"]
        model: nn.Module = Tree(kinds, [0, 1, 2, 3, 1, 4, 5, 6], tied=True, borrows=False)
        if kind == "stack":
            model = Stack()
        if kind == "checkpointed":
            model = Checkpointed()
        plain = copy.deepcopy(model)
        streamed(model)
        optimizers = [torch.optim.AdamW(one.parameters(), lr=0.05) for one in (model, plain)]
        for step in range(4):
            for _ in range(1 + step % 2):  # gradients of two backwards add up
                x = torch.randn(3, WIDTH)
                losses = [one(x).square().sum() for one in (model, plain)]
                assert torch.equal(*losses)
                for loss in losses:
                    loss.backward()
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(one.grad, other.grad) if one.grad is not None else other.grad is None
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert _same(model.state_dict(), plain.state_dict())

    def test_a_graph_does_not_keep_the_weights_of_its_forward(self) -> None:
        model = streamed(Stack(8))
        loss = model(torch.randn(2, WIDTH)).sum()
        brought = offload_stats(model).bytes_brought
        loss.backward()
        assert offload_stats(model).bytes_brought > 1.8 * brought

    def test_a_weight_that_changes_before_its_backward_is_told(self) -> None:
        model = streamed(Stack())
        loss = model(torch.randn(2, WIDTH)).sum()
        with torch.no_grad():
            model.layers[4].weight.add_(1)
        with pytest.raises(OffloadedError, match=r"a weight of shape \[8, 8\] was changed after the forward"):
            loss.backward()

    def test_weights_of_another_dtype_are_trained(self) -> None:
        torch.manual_seed(0)
        model = Stack().bfloat16()
        streamed(model)
        x = torch.randn(4, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses: list[float] = []
        for _ in range(8):
            loss = (model(x) - 0.3).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        assert losses[-1] < losses[0] * 0.9
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


class Checkpointed(Stack):
    """Its layers are computed again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda layer, x: layer(x).tanh(), layer, x, use_reentrant=False)
        return x
