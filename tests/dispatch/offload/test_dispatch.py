"""Dispatched models compute bit by bit what they compute without, wherever their weights are."""

import copy
import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from dispatch.models import (
    WIDTH,
    Coder,
    Gate,
    Pair,
    Stack,
    Tree,
    assert_same_gradients,
    file_of,
    full_disk,
    same_values,
    streamed,
    trees,
)
from drivetrain_dispatch.errors import DeviceMapError, OffloadedError, WeightFilesError
from drivetrain_dispatch.offload.dispatch import dispatch_model, is_dispatched, remove_hooks


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
    assert same_values(tree.state_dict(), stored)
    remove_hooks(tree)
    assert not is_dispatched(tree)
    assert same_values(tree.state_dict(), stored)
    assert {type(parameter) for parameter in tree.parameters()} == {nn.Parameter}
    copy.deepcopy(tree)
    for module in tree.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


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
        assert {file_of(parameter) for parameter in model.parameters()} == {str(file)}

    @pytest.mark.parametrize("change", ["replaced", "written", "deleted"])
    def test_a_file_that_is_written_to_stops_the_next_forward_and_one_that_is_replaced_does_not(
        self, tmp_path: Path, change: str
    ) -> None:
        model = dispatch_model(Stack(), {"": "disk"}, offload_dir=tmp_path)
        model(torch.randn(2, WIDTH))
        (file,) = tmp_path.iterdir()
        content = file.read_bytes()
        if change == "written":
            file.write_bytes(content[:-4] + b"abcd")
            with pytest.raises(WeightFilesError, match="has changed since the model was loaded"):
                model(torch.randn(2, WIDTH))
            return
        x = torch.randn(2, WIDTH)
        expected = model(x)
        file.unlink()
        if change == "replaced":
            file.write_bytes(bytes(len(content)))
        assert torch.equal(model(x), expected)

    def test_without_a_folder_nothing_is_done(self) -> None:
        model = Stack()
        with pytest.raises(DeviceMapError, match="name a folder for them, offload_dir"):
            dispatch_model(model, {"": "disk"})
        assert not is_dispatched(model)

    def test_a_folder_that_cannot_be_written_leaves_the_model_alone(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        model = Stack()
        with pytest.raises(WeightFilesError, match="could not be written"):
            dispatch_model(model, {"": "disk"}, offload_dir=tmp_path / "file")
        assert not is_dispatched(model)

    def test_a_disk_that_is_full_leaves_nothing_behind(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
        values = [parameter.data_ptr() for parameter in model.parameters()]
        with full_disk(300_000):
            with pytest.raises(WeightFilesError, match=r"of weights could not be written .* free the disk"):
                dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
        assert list(tmp_path.iterdir()) == []
        assert not is_dispatched(model)
        assert [parameter.data_ptr() for parameter in model.parameters()] == values

    def test_a_method_that_computes_looks_at_the_file_too(self, tmp_path: Path) -> None:
        model = dispatch_model(Coder(), {"": "disk"}, offload_dir=tmp_path)
        x = torch.randn(2, WIDTH)
        assert torch.equal(model.decode(model.encode(x)), model(x))
        (file,) = tmp_path.iterdir()
        file.touch()
        with pytest.raises(WeightFilesError, match="has changed since"):
            model.decode(x)

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
    assert not is_dispatched(model)


@pytest.mark.parametrize(
    ("device_map", "given", "message"),
    [
        ("auto", {}, r"device_map='auto': give a map .*infer_auto_device_map\(model\) plans one"),
        ({"": -1}, {}, "-1 is no device: give the number of an accelerator"),
        ({"": True}, {}, "True is no device"),
        ({"": "cpu"}, {"dtypes": {"layers": torch.float32}}, r"dtypes=\['layers'\]: the model has no such"),
        (
            {"": "cpu"},
            {"dtypes": {"layers.0.weight": "float16"}},
            r"dtypes\['layers\.0\.weight'\]='float16' is no torch\.dtype: give torch\.float16",
        ),
        ({"": "cpu"}, {"release_pages": "yes"}, "release_pages='yes': give True or False"),
        ({"": "cpu"}, {"write_back": True}, "write_back=True: device_map puts nothing on 'disk'"),
    ],
)
def test_arguments_that_cannot_be_change_nothing(
    device_map: object, given: dict[str, object], message: str
) -> None:
    model = Stack()
    with pytest.raises(ValueError, match=message):
        dispatch_model(model, device_map, **given)
    assert not is_dispatched(model)


class TestLeaving:
    """What becomes of a model when it is no longer dispatched."""

    @pytest.mark.parametrize("name", ["forward", "decode"])
    def test_hooks_are_removed_all_or_none(self, name: str) -> None:
        plain = Coder()
        model = streamed(copy.deepcopy(plain))
        ours, x = getattr(model, name), torch.randn(2, WIDTH)
        setattr(model, name, lambda x: ours(x))
        with pytest.raises(OffloadedError, match=f"the {name} of Coder was replaced"):
            remove_hooks(model)
        assert torch.equal(model(x), plain(x))
        setattr(model, name, ours)
        remove_hooks(model)
        assert torch.equal(model(x), plain(x))
        assert name not in model.__dict__

    def test_hooks_are_not_removed_while_the_model_computes(self, stack: Pair) -> None:
        model, _ = stack
        handle = model.layers[2].register_forward_hook(lambda *_: remove_hooks(model))
        with pytest.raises(OffloadedError, match="a forward of the model is under way"):
            model(torch.randn(2, WIDTH))
        handle.remove()
        remove_hooks(model)

    def test_a_backward_may_follow(self, stack: Pair) -> None:
        model, plain = stack
        x = torch.randn(2, WIDTH)
        losses = [one(x).sum() for one in (model, plain)]
        remove_hooks(model)
        for loss in losses:
            loss.backward()
        assert_same_gradients(model, plain)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="wants fork")
    def test_a_fork_goes_on(self) -> None:
        model = streamed(nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))))
        with torch.inference_mode():
            expected = model(torch.ones(1, 256))
            child = os.fork()
            if not child:
                signal.alarm(30)
                torch.set_num_threads(1)  # a fork has none of its parent's
                os._exit(0 if torch.equal(model(torch.ones(1, 256)), expected) else 1)
        assert os.waitpid(child, 0)[1] == 0

    def test_a_parameter_is_copied_and_pickled_as_an_ordinary_one(self, stack: Pair, tmp_path: Path) -> None:
        weight = stack[0].layers[0].weight
        torch.save({"weight": weight}, tmp_path / "weight.pt")
        for copied in (copy.deepcopy(weight), torch.load(tmp_path / "weight.pt")["weight"]):
            assert type(copied) is nn.Parameter
            assert torch.equal(copied, stack[1].layers[0].weight)
