import json
import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

from dispatch.models import file_of
from drivetrain_dispatch import TiedParametersError, find_tied_parameters, init_empty_weights
from drivetrain_dispatch.errors import DeviceMapError, LoadError, WeightFilesError, WeightsMismatchError
from drivetrain_dispatch.loading.load_checkpoint import load_checkpoint_in_model

PIECE = 8 * 2**20


class Small(nn.Module):
    """Parameters, a tied one among them, and buffers of both kinds."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, width)
        self.block = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.arange(3.0), persistent=False)


def empty(build: Callable[[], nn.Module] = Small) -> nn.Module:
    with init_empty_weights():
        return build()


def saved(model: nn.Module, *leave_out: str) -> dict[str, Tensor]:
    return {
        name: value.clone()
        for name, value in model.state_dict().items()
        if not name.startswith(leave_out or "!")
    }


def write(folder: Path, tensors: dict[str, Tensor], *, num_shards: int = 1) -> Path:
    """A safetensors file, or shards and their index, in a folder."""
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = list(tensors)
    files = {name: f"model-{index % num_shards}.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def assert_untouched(model: nn.Module, before: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is before[name]
        assert tensor.is_meta or torch.equal(tensor, values[name])


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
layers = st.sampled_from(["linear", "norm", "embedding", "tied", "again", "nested"])


def build(kinds: list[str]) -> nn.Sequential:
    """A tree of modules in which `tied` shares the last embedding's weight and `again` is the last layer itself."""
    made: list[nn.Module] = [nn.Embedding(5, 3)]
    for kind in kinds:
        if kind == "linear":
            made.append(nn.Linear(3, 3))
        elif kind == "norm":
            made.append(nn.BatchNorm1d(3))
        elif kind == "embedding":
            made.append(nn.Embedding(5, 3))
        elif kind == "tied":
            tied = nn.Linear(3, 5)
            tied.weight = next(layer for layer in reversed(made) if isinstance(layer, nn.Embedding)).weight
            made.append(tied)
        elif kind == "again":
            made.append(made[-1])
        else:
            made = [nn.Sequential(*made), nn.Embedding(5, 3)]
    return nn.Sequential(*made)


@settings(max_examples=25)
@given(data=st.data(), kinds=st.lists(layers, max_size=5), real=st.booleans(), num_shards=st.integers(1, 3))
def test_any_model_gets_its_values(
    tmp_path_factory, data: st.DataObject, kinds: list[str], real: bool, num_shards: int
) -> None:
    """Any tree, from any shards, to the CPU and the disk, in any dtype; with one name of a tensor or with all."""
    reference = build(kinds)
    ties = find_tied_parameters(reference)
    stored_dtype, dtype = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([None, *DTYPES]))
    values = {
        name: (value.to(stored_dtype) if value.is_floating_point() else value).clone()
        for name, value in reference.state_dict().items()
    }
    for group in ties:
        for name in data.draw(st.lists(st.sampled_from(group), max_size=len(group) - 1, unique=True)):
            del values[name]
    folder = write(tmp_path_factory.mktemp("weights"), values, num_shards=num_shards)
    model = build(kinds) if real else empty(lambda: build(kinds))
    names = [str(index) for index in range(len(model))]
    places = data.draw(st.fixed_dictionaries({name: st.sampled_from(["cpu", "disk"]) for name in names}))
    objects = dict(model.named_parameters())
    report = load_checkpoint_in_model(model, folder, places, dtype=dtype)
    assert find_tied_parameters(model) == ties
    for name, tensor in model.state_dict(keep_vars=True).items():
        aliases = next((group for group in ties if name in group), [name])
        value = next(values[alias] for alias in aliases if alias in values)
        wanted = (
            dtype if dtype is not None and value.is_floating_point() else reference.state_dict()[name].dtype
        )
        if name in report.mapped:
            assert {places[alias.split(".")[0]] for alias in aliases} == {"disk"}
            assert tensor.dtype == value.dtype
            assert report.converted_at_use.get(name, value.dtype) == wanted
            assert file_of(tensor) == str(report.mapped[name].path) or tensor.numel() == 0
        else:
            assert tensor.dtype == wanted
            assert tensor.dtype == value.dtype or not file_of(tensor)
        assert torch.equal(tensor, value.to(tensor.dtype))
        assert isinstance(tensor, nn.Parameter) == (name in objects or len(aliases) > 1)
        assert not real or name not in objects or tensor is objects[name]


@pytest.mark.parametrize("strict", [True, False])
def test_all_that_does_not_fit_is_told_at_once_and_nothing_changes(tmp_path: Path, strict: bool) -> None:
    tensors = saved(Small(), "embed", "head", "block.0.bias") | {"other": torch.ones(2)}
    tensors["block.0.weight"] = torch.ones(2, 4)
    tensors["block.1.bias"] = torch.ones(4, dtype=torch.int8)
    write(tmp_path, tensors)
    model = Small()
    before, values = dict(model.state_dict(keep_vars=True)), saved(model)
    with pytest.raises(WeightsMismatchError, match="does not fit the model, which is as it was") as caught:
        load_checkpoint_in_model(model, tmp_path, strict=strict)
    differing = (
        "2 that differ: 'block.0.weight' is (2, 4) float32, in the model (4, 4) float32, 'block.1.bias' is (4,) "
        "int8, in the model (4,) float32"
    )
    assert differing in str(caught.value)
    assert (
        "2 missing: 'embed.weight' (6, 4) float32, 'block.0.bias' (4,) float32" in str(caught.value)
    ) == strict
    assert ("1 unexpected: 'other' (2,) float32" in str(caught.value)) == strict
    assert_untouched(model, before, values)


def test_what_is_left_out_on_purpose_stays(tmp_path: Path) -> None:
    write(tmp_path, saved(Small(), "head", "block.0.bias") | {"other": torch.ones(2)})
    model = Small()
    bias = model.block[0].bias
    kept = bias.detach().clone()
    report = load_checkpoint_in_model(model, tmp_path, strict=False)
    assert (report.missing, report.unexpected) == (("block.0.bias",), ("other",))
    assert model.block[0].bias is bias
    assert torch.equal(bias, kept)
    with pytest.raises(
        WeightsMismatchError, match=r"1 on the meta device that would get no values: 'block.0.bias' \(4,\)"
    ):
        load_checkpoint_in_model(empty(), tmp_path, strict=False)


def test_a_buffer_that_no_checkpoint_has_must_have_values(tmp_path: Path) -> None:
    write(tmp_path, saved(Small(), "head"))
    model = empty()
    load_checkpoint_in_model(model, tmp_path)
    assert torch.equal(model.scratch, torch.arange(3.0))
    with init_empty_weights(include_buffers=True):
        model = Small()
    with pytest.raises(
        WeightsMismatchError, match=r"1 on the meta device .*: 'scratch' \(3,\) float32; give them"
    ):
        load_checkpoint_in_model(model, tmp_path)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_tie_whose_values_differ_is_refused(tmp_path: Path) -> None:
    tensors = saved(Small())
    tensors["head.weight"][5, 3] += 1
    write(tmp_path, tensors)
    model = empty()
    with pytest.raises(
        TiedParametersError, match=r"'embed.weight' and 'head.weight' are one tensor .* differ"
    ):
        load_checkpoint_in_model(model, tmp_path)
    assert all(parameter.is_meta for parameter in model.parameters())
    report = load_checkpoint_in_model(
        model, tmp_path, rename=lambda name: None if name == "head.weight" else name
    )
    assert report.unexpected == ()
    assert torch.equal(model.head.weight, tensors["embed.weight"])


@pytest.mark.parametrize("change", ["cut", "touch"])
@pytest.mark.parametrize("real", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.default_cases("None-True-touch", "dtype1-False-cut")
def test_a_file_that_changes_meanwhile_is_told_and_nothing_changes(
    tmp_path: Path, change: str, real: bool, dtype: torch.dtype | None
) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(6 * PIECE // 4))

    write(tmp_path, {"weight": torch.ones(6 * PIECE // 4)})
    file = tmp_path / "model.safetensors"
    model = Wide() if real else empty(Wide)
    weight = model.weight

    def meanwhile(done_bytes: int, all_bytes: int) -> None:
        if change == "cut":
            os.truncate(file, 100)
        else:
            os.utime(file, ns=(0, 0))

    is_read = change == "cut" and dtype is not None
    told = "was cut while it was read" if is_read else "has changed since the model was loaded"
    with pytest.raises(WeightFilesError, match=told):
        load_checkpoint_in_model(model, tmp_path, dtype=dtype, num_threads=1, progress=meanwhile)
    assert model.weight is weight
    assert weight.is_meta or not weight.any()


def test_progress_comes_piece_by_piece_and_ends_with_all(tmp_path: Path) -> None:
    def make() -> nn.Module:
        none = nn.ParameterList([torch.empty(0, 2)])
        return nn.Sequential(nn.Linear(2048, 2500, bias=False), nn.Linear(3, 3), none)

    model, reference = empty(make), make()
    write(tmp_path, reference.state_dict())
    told: list[tuple[int, int]] = []
    load_checkpoint_in_model(model, tmp_path, dtype=torch.bfloat16, progress=lambda *both: told.append(both))
    all_bytes = sum(value.nbytes for value in reference.parameters())
    assert told[-1] == (all_bytes, all_bytes)
    assert told == sorted(told)
    assert len(told) == math.ceil(2048 * 2500 * 4 / PIECE) + 2
    assert torch.equal(model[0].weight, reference[0].weight.bfloat16())


def test_an_error_of_the_progress_ends_the_load_and_nothing_changes(tmp_path: Path) -> None:
    write(tmp_path, saved(Small(), "head"))
    model = empty()

    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_checkpoint_in_model(model, tmp_path, progress=stop)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_parameter_keeps_what_it_is(tmp_path: Path) -> None:
    class Marked(nn.Parameter):
        pass

    model = Small()
    model.block[0].weight = Marked(torch.zeros(4, 4, device="meta"), requires_grad=False)
    model.block[0].weight.note = "kept"
    optimizer = torch.optim.SGD([model.embed.weight], lr=1.0)
    tensors = saved(Small(), "head")
    write(tmp_path, tensors)
    load_checkpoint_in_model(model, tmp_path, dtype=torch.float64)
    weight = model.block[0].weight
    assert (type(weight), weight.note, weight.requires_grad) == (Marked, "kept", False)
    model.embed.weight.grad = torch.ones(6, 4, dtype=torch.float64)
    optimizer.step()
    assert torch.equal(model.head.weight, tensors["embed.weight"].double() - 1)


def test_dtypes_of_single_tensors(tmp_path: Path) -> None:
    write(tmp_path, saved(Small(), "head"))
    model = empty()
    load_checkpoint_in_model(
        model,
        tmp_path,
        dtype=torch.bfloat16,
        special_dtypes={"head.weight": torch.float32, "block.0.bias": torch.int8},
    )
    assert model.embed.weight.dtype == torch.float32
    assert model.block[0].bias.dtype == torch.int8
    assert not model.block[0].bias.requires_grad
    assert (model.block[0].weight.dtype, model.block[1].num_batches_tracked.dtype) == (
        torch.bfloat16,
        torch.int64,
    )
    with pytest.raises(ValueError, match=r"special_dtypes=\['nothing'\]: the model has no such parameter"):
        load_checkpoint_in_model(model, tmp_path, special_dtypes={"nothing": torch.float32})


def test_wrong_arguments_and_maps_are_told(tmp_path: Path) -> None:
    write(tmp_path, saved(Small(), "head"))
    model = empty()
    with pytest.raises(DeviceMapError, match="no device for"):
        load_checkpoint_in_model(model, tmp_path, {"block": "cpu"})
    with pytest.raises(DeviceMapError, match="is not here"):
        load_checkpoint_in_model(model, tmp_path, {"": "cuda:99"})
    with pytest.raises(ValueError, match="num_threads=0: must be at least 1"):
        load_checkpoint_in_model(model, tmp_path, num_threads=0)
    with pytest.raises(ValueError, match="read_by='rank 1': must be one of 'each', 'rank 0'"):
        load_checkpoint_in_model(model, tmp_path, read_by="rank 1")
    with pytest.raises(ValueError, match="both become 'x': give each its own name"):
        load_checkpoint_in_model(model, tmp_path, rename=lambda _: "x")
    with pytest.raises(RuntimeError, match="init_process_group first"):
        load_checkpoint_in_model(model, tmp_path, read_by="rank 0")
    assert all(parameter.is_meta for parameter in model.parameters())
    load_checkpoint_in_model(model, tmp_path, {"": "meta", "embed": "cpu", "scratch": "cpu"})
    assert not model.embed.weight.is_meta
    assert all(tensor.is_meta for tensor in model.block.state_dict().values())  # these get no values


def with_hole(file: Path, numel: int) -> Path:
    """A file of a small tensor and one of `numel` eight-bit numbers, which takes no room on the disk."""
    header = {"weight": {"dtype": "F8_E4M3", "shape": [numel], "data_offsets": [0, numel]}}
    header["first"] = {"dtype": "F32", "shape": [2], "data_offsets": [numel, numel + 8]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + numel + 8)
    return file


class Vast(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(2))
        self.weight = nn.Parameter(torch.empty(numel, device="meta", dtype=torch.float64))


def test_a_host_without_room_is_told_before_anything_is_read(tmp_path: Path) -> None:
    numel = psutil.virtual_memory().total // 2
    model = Vast(numel)
    first = model.first.detach()
    with pytest.raises(
        LoadError,
        match=rf"cpu has no room for 'weight' \({8 * numel / 1e9:.2f} GB\): of the [\d.]* .B that device_map puts "
        r"there 0 B went before, [\d.]* .B are left, so about [\d.]* .B fit. Put less there .* as it was",
    ):
        load_checkpoint_in_model(model, with_hole(tmp_path / "model.safetensors", numel))
    assert model.weight.is_meta
    assert model.first.data_ptr() == first.data_ptr()


_LIMITED = """
import resource, sys, torch
from torch import nn
from drivetrain_dispatch import init_empty_weights
from drivetrain_dispatch.errors import LoadError
from drivetrain_dispatch.loading.load_checkpoint import load_checkpoint_in_model

with init_empty_weights():
    model = nn.Sequential(*(nn.Linear(4096, 2048, bias=False, dtype=torch.float64) for _ in range(6)))
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (192 + 4 * 64 - 32) * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
try:
    load_checkpoint_in_model(model, sys.argv[1])
except LoadError as error:
    print(error, all(parameter.is_meta for parameter in model.parameters()))
    assert "allocate memory" in str(error.__cause__)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
load_checkpoint_in_model(model, sys.argv[1])
print(model[5].weight.sum().item())
"""


@pytest.mark.slow
def test_memory_that_ends_on_the_way_names_the_tensor_and_what_fits(python: str, tmp_path: Path) -> None:
    """The process may take the files' pages and less than four tensors of 64 MiB."""
    write(tmp_path, {f"{index}.weight": torch.full((2048, 4096), float(index)) for index in range(6)})
    run = subprocess.run(
        [python, "-c", _LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    told, total = run.stdout.splitlines()
    assert told.startswith(
        "cpu has no room for '3.weight' (67.11 MB): of the 402.65 MB that device_map puts there 201.33 MB"
    )
    assert told.endswith("The model is as it was True")
    assert float(total) == 5 * 2048 * 4096


def test_a_file_larger_than_the_system_maps_is_told(tmp_path: Path) -> None:
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() != "0":
        pytest.skip("this system maps any file")
    numel = 2**42
    with pytest.raises(
        WeightFilesError, match=r"model.safetensors cannot be mapped .*: store it as several files"
    ):
        load_checkpoint_in_model(Vast(numel), with_hole(tmp_path / "model.safetensors", numel))


_PEAK = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from torch import nn
from host_peak import peak_above, reset_peak
from drivetrain_dispatch import init_empty_weights
from drivetrain_dispatch.loading.load_checkpoint import load_checkpoint_in_model

with init_empty_weights():
    model = nn.Sequential(*(nn.Linear(4096, 2048, bias=False) for _ in range(6)))
small = nn.Sequential(nn.Linear(4, 4))
devices = {"": "cpu", "1": "disk", "2": "disk"}
dtype = getattr(torch, sys.argv[3])
torch.ones(10).to(dtype).to(torch.float32)
before = reset_peak()
load_checkpoint_in_model(model, sys.argv[2], devices, dtype=dtype, num_threads=2)
print(peak_above(before))
"""


@pytest.mark.parametrize(("dtype", "placed"), [("float32", 0), ("bfloat16", 4 * 16), ("float64", 4 * 64)])
@pytest.mark.default_cases("float32-0")
def test_the_peak_is_what_is_placed_and_a_piece_a_thread(
    python: str, tmp_path: Path, dtype: str, placed: int
) -> None:
    """Six tensors of 32 MiB, of which two stay on disk; none is copied in the file's dtype."""
    tensors = {f"{index}.weight": torch.full((2048, 4096), float(index)) for index in range(6)}
    write(tmp_path, tensors, num_shards=3)
    tests = Path(__file__).parents[2]
    run = subprocess.run(
        [python, "-c", _PEAK, str(tests), str(tmp_path), dtype],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    peak: Any = float(run.stdout)
    assert placed - 16 <= peak <= placed + 2 * 8 + 4  # pages freed while loading serve again
