"""Weights packed while they are loaded, by the real libraries, held to what those make of a whole model."""

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dispatch.models import copied, run_threads
from drivetrain_dispatch import (
    CostError,
    compute_module_sizes,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    offload_stats,
    remove_hooks,
)
from drivetrain_dispatch.errors import DeviceMapError, OffloadedError, WeightFilesError
from drivetrain_dispatch.model.quantized_tensor import is_quantized, size_in_bytes
from drivetrain_dispatch.offload.dispatch import dispatch_model
from drivetrain_dispatch.planning.cost_model import ComputeRate, measure_costs
from drivetrain_dispatch.quantization.libraries import BitsAndBytes4Bit, BitsAndBytes8Bit, TorchAO
from drivetrain_dispatch.quantization.protocol import Quantization, quantized_sizes
from optional_modules import import_later

bnb = import_later("bitsandbytes")
torchao = import_later("torchao.quantization")
granularity = import_later("torchao.quantization.granularity")

BF16 = torch.bfloat16
IDS = torch.arange(6)[None]


class Small(nn.Module):
    """Layers with and without a bias, one that stands in two places, a norm, and a head that shares its weight."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 128)
        self.up = nn.Linear(128, 192)
        self.norm = nn.LayerNorm(192)
        self.down = nn.Linear(192, 128, bias=False)
        self.again = self.down
        self.lm_head = nn.Linear(128, 32, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for down in (self.down, self.again):
            x = down(self.norm(self.up(x)).relu()) + x
        return self.lm_head(x)


def bitsandbytes_of(model: nn.Module, quantization: BitsAndBytes4Bit | BitsAndBytes8Bit) -> None:
    """As bitsandbytes' own pages have it: its layers given full weights, which they pack when they are moved."""
    replaced = {}
    for name in ("up", "down"):
        linear = getattr(model, name)
        sizes = (linear.in_features, linear.out_features, linear.bias is not None)
        if isinstance(quantization, BitsAndBytes8Bit):
            layer = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=quantization.threshold)
            layer.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
        else:
            layer = bnb.nn.Linear4bit(*sizes, compute_dtype=quantization.compute_dtype)
            layer.weight = bnb.nn.Params4bit(
                linear.weight.data,
                requires_grad=False,
                quant_type=quantization.quant_type,
                compress_statistics=quantization.double_quant,
                module=layer,
            )
        layer.bias = linear.bias
        replaced[name] = layer.to("cpu").eval()
    model.up, model.down, model.again = replaced["up"], replaced["down"], replaced["down"]


def leave_layouts(model: nn.Module) -> None:
    """Have 4-bit layers leave their weights as they are on any processor, as those of dispatched models do."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def torchao_of(model: nn.Module, quantization: TorchAO) -> None:
    torchao.quantize_(
        model, quantization.config, filter_fn=lambda module, name: name in ("up", "down", "again")
    )


KINDS: dict[str, tuple[Callable[[], Quantization], Callable[[nn.Module, Any], None]]] = {
    "bitsandbytes 8": (BitsAndBytes8Bit, bitsandbytes_of),
    "bitsandbytes nf4": (BitsAndBytes4Bit, bitsandbytes_of),
    "bitsandbytes fp4, double": (
        lambda: BitsAndBytes4Bit(quant_type="fp4", double_quant=True, compute_dtype=torch.float32),
        bitsandbytes_of,
    ),
    "torchao int8": (lambda: TorchAO(torchao.Int8WeightOnlyConfig()), torchao_of),
    "torchao fp8": (lambda: TorchAO(torchao.Float8WeightOnlyConfig()), torchao_of),
    "torchao int4": (
        lambda: TorchAO(
            torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=granularity.PerGroup(32))
        ),
        torchao_of,
    ),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def plain() -> nn.Module:
    torch.manual_seed(0)
    return Small().to(BF16).eval()


@pytest.fixture
def checkpoint(plain: nn.Module, tmp_path: Path) -> Path:
    values = {
        name: value for name, value in plain.state_dict().items() if not name.startswith(("again", "unused"))
    }
    save_file(values, tmp_path / "model.safetensors")
    return tmp_path


def empty(*, tied: bool = False) -> nn.Module:
    with init_empty_weights():
        return Small(tied=tied).eval()


def computed(model: nn.Module) -> Tensor:
    with torch.no_grad():  # in inference mode a layer of bitsandbytes may make its bias anew
        return model(IDS)


@pytest.mark.default_cases("cpu", "copied from the disk")
@pytest.mark.parametrize("place", ["cpu", "disk", "copied", "copied from the disk"])
@pytest.mark.slow
def test_what_is_loaded_computes_what_the_library_makes_of_the_whole_model(
    plain: nn.Module, checkpoint: Path, kind: str, place: str
) -> None:
    make, as_a_whole = KINDS[kind]
    quantization = make()
    reference = copy.deepcopy(plain)
    as_a_whole(reference, quantization)
    if place != "cpu":
        leave_layouts(reference)
    assert not torch.equal(computed(reference), computed(plain))
    folder = checkpoint / "offloaded"
    home = "disk" if "disk" in place else "cpu"
    model = load_checkpoint_and_dispatch(
        empty(), checkpoint, {"": home}, dtype=BF16, quantization=quantization, offload_folder=folder
    )
    if "copied" in place:  # what an accelerator does: brought before its turn, and gone after it
        remove_hooks(model)
        dtypes = {name: tensor.dtype for name, tensor in model.named_parameters(remove_duplicate=False)}
        dispatch_model(model, {"": home}, dtypes=dtypes, offload_dir=folder)
    assert torch.equal(computed(model), computed(reference))
    num_missed = offload_stats(model).num_missed  # in the first forward, which nobody has seen yet
    assert torch.equal(computed(model), computed(reference))
    if "copied" in place:
        stats = offload_stats(model)
        held = sum(size_in_bytes(tensor) for tensor in model.parameters())
        assert stats.num_missed == num_missed
        assert stats.bytes_fetched >= 2 * held
        assert not any("weight" in module.__dict__ for module in model.modules())
        states = [module.state for module in model.modules() if hasattr(module, "state")]
        assert all(state.CB is None for state in states)  # what came has gone
    assert type(model.up) is type(reference.up)
    assert type(model.up.weight) is type(reference.up.weight)
    assert model.again is model.down
    remove_hooks(model)
    leave_layouts(model)
    leave_layouts(reference)
    assert torch.equal(computed(model), computed(reference))
    saved, expected = model.state_dict(), reference.state_dict()
    assert list(saved) == list(expected)
    for name, value in saved.items():
        if not is_quantized(value):
            assert torch.equal(value, expected[name])


def test_sizes_are_what_the_weights_take(plain: nn.Module, checkpoint: Path, kind: str) -> None:
    quantization = KINDS[kind][0]()
    model = empty()
    sizes = quantized_sizes(model, quantization, dtype=BF16)
    assert set(sizes) == {"up.weight", "down.weight", "again.weight"}
    planned = compute_module_sizes(model, dtype=BF16, special_sizes=sizes)
    load_checkpoint_in_model(model, checkpoint, dtype=BF16, quantization=quantization)
    assert {name: size_in_bytes(model.get_parameter(name)) for name in sizes} == sizes
    assert compute_module_sizes(model) == planned
    assert planned[""] < compute_module_sizes(plain)[""]


def test_a_planned_map_counts_packed_weights(plain: nn.Module, checkpoint: Path) -> None:
    quantization = TorchAO(torchao.Int8WeightOnlyConfig())
    sizes = quantized_sizes(empty(), quantization, dtype=BF16)
    budget = compute_module_sizes(empty(), dtype=BF16, special_sizes=sizes)[""]
    assert set(infer_auto_device_map(empty(), {"cpu": budget}, dtype=BF16, special_sizes=sizes).values()) == {
        "cpu"
    }
    with pytest.raises(DeviceMapError):
        infer_auto_device_map(empty(), {"cpu": budget - 1, "disk": 0}, dtype=BF16, special_sizes=sizes)
    model = load_checkpoint_and_dispatch(
        empty(), checkpoint, "auto", {"cpu": budget}, dtype=BF16, quantization=quantization
    )
    assert set(model.hf_device_map.values()) == {"cpu"}


def test_what_stays_as_it_is(plain: nn.Module, checkpoint: Path) -> None:
    """The head, tied weights, modules that are named, and those in fp32; also beside weights that are packed."""
    quantization = TorchAO(torchao.Int8WeightOnlyConfig())
    model = load_checkpoint_and_dispatch(
        empty(), checkpoint, {"": "cpu"}, dtype=BF16, quantization=quantization, keep_in_fp32_modules=["up"]
    )
    packed = {name for name, tensor in model.named_parameters() if is_quantized(tensor)}
    assert packed == {"down.weight"}
    assert model.up.weight.dtype == torch.float32
    for skipped, expected in (
        (("down", "again"), {"up", "lm_head"}),
        ((), {"up", "down", "again", "lm_head"}),
    ):
        chosen = TorchAO(torchao.Int8WeightOnlyConfig(), skip_modules=skipped)
        assert {name.partition(".")[0] for name in quantized_sizes(empty(), chosen)} == expected
    everything = TorchAO(torchao.Int8WeightOnlyConfig(), skip_modules=())
    assert "lm_head.weight" not in quantized_sizes(empty(tied=True), everything)
    assert not any(parameter.requires_grad for parameter in (model.down.weight,))


@pytest.mark.parametrize("named", ["down", "again"])
def test_a_layer_of_two_names_is_skipped_by_either(checkpoint: Path, named: str) -> None:
    quantization = TorchAO(torchao.Int8WeightOnlyConfig(), skip_modules=(named,))
    assert set(quantized_sizes(empty(), quantization)) == {"up.weight", "lm_head.weight"}
    model = load_checkpoint_and_dispatch(
        empty(),
        checkpoint,
        {"": "cpu"},
        dtype=BF16,
        quantization=TorchAO(torchao.Int8WeightOnlyConfig()),
        keep_in_fp32_modules=[named],
    )
    assert model.down.weight.dtype == torch.float32


class Repeats(nn.Module):
    """One layer several times in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(self.layer(x)))


def test_a_layer_that_is_used_again_before_it_has_gone(tmp_path: Path, kind: str) -> None:
    """The same values that came are used for its next call; also by several threads."""
    model = Repeats().to(BF16).eval()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    load_checkpoint_in_model(model, tmp_path, dtype=BF16, quantization=KINDS[kind][0]())
    leave_layouts(model)
    inputs = [torch.randn(2, 128, dtype=BF16) for _ in range(2)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
        copied(model)
        wrong: list[int] = []

        def work(index: int) -> None:
            with torch.no_grad():
                wrong.extend(
                    index for _ in range(20) if not torch.equal(model(inputs[index]), expected[index])
                )

        work(0)
        run_threads(work, 2)
    assert wrong == []


@pytest.mark.parametrize("double", [False, True])
def test_a_model_that_bitsandbytes_packed_is_used_from_the_disk_in_place(
    plain: nn.Module, tmp_path: Path, double: bool
) -> None:
    """Two layers have one table of values, which the file holds for each; nothing moves into memory."""
    bitsandbytes_of(plain, BitsAndBytes4Bit(double_quant=double))
    leave_layouts(plain)
    expected = computed(plain)
    dispatch_model(plain, {"": "disk"}, offload_dir=tmp_path)
    where = plain.up.weight.data_ptr()
    assert torch.equal(computed(plain), expected)
    assert plain.up.weight.data_ptr() == where
    assert plain.up.quant_state is plain.up.weight.quant_state
    remove_hooks(plain)
    assert torch.equal(computed(plain), expected)


def test_a_weight_that_others_refer_to_stops_and_leaves_all_as_it_was(
    plain: nn.Module, tmp_path: Path, kind: str
) -> None:
    KINDS[kind][1](plain, KINDS[kind][0]())
    leave_layouts(plain)
    expected = computed(plain)
    before = {name: type(tensor) for name, tensor in plain.named_parameters()}
    referred = weakref.ref(plain.down.weight)
    with pytest.raises(DeviceMapError, match="while others refer to it"):
        dispatch_model(plain, {"": "disk"}, offload_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert {name: type(tensor) for name, tensor in plain.named_parameters()} == before
    assert torch.equal(computed(plain), expected)
    del referred
    dispatch_model(plain, {"": "disk"}, offload_dir=tmp_path)


def test_packed_weights_that_come_cannot_be_moved(plain: nn.Module, checkpoint: Path, kind: str) -> None:
    model = empty()
    load_checkpoint_in_model(model, checkpoint, dtype=BF16, quantization=KINDS[kind][0]())
    copied(model)
    for move in (lambda: model.up.to("meta"), lambda: model.up.half()):
        with pytest.raises(OffloadedError, match="cannot be replaced, moved or converted"):
            move()
    remove_hooks(model)
    assert "_apply" not in vars(model.up)


def test_layers_whose_weights_torch_uses_without_calling_them_stay(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.TransformerEncoderLayer(64, 2, 64), nn.Linear(64, 64)])
    assert set(quantized_sizes(model, BitsAndBytes8Bit())) == {"1.weight"}


def test_bad_input_is_said_before_anything_is_read(checkpoint: Path) -> None:
    int8 = torchao.Int8WeightOnlyConfig()
    group = torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=granularity.PerGroup(56))
    hooked, linears = empty(), ["up", "down", "again", "lm_head"]
    hooked.up.register_forward_hook(print)
    bad: list[tuple[str, Callable[[], object]]] = [
        (r"skip_modules=\['nope'\]", lambda: quantized_sizes(empty(), TorchAO(int8, skip_modules=["nope"]))),
        ("no weight to pack", lambda: quantized_sizes(empty(), TorchAO(int8, skip_modules=linears))),
        ("must be a configuration of torchao", lambda: TorchAO("int8")),
        ("must be a configuration of torchao", lambda: TorchAO(torchao.Int8WeightOnlyConfig)),
        ("quant_type", lambda: BitsAndBytes4Bit(quant_type="int4")),
        ("threshold", lambda: BitsAndBytes8Bit(threshold=-1)),
        (
            "not of torch.float64: give dtype",
            lambda: quantized_sizes(Small(), BitsAndBytes4Bit(), dtype=torch.float64),
        ),
    ]
    loads: list[tuple[str, nn.Module, str, Quantization]] = [
        ("offload_folder", empty(), "disk", BitsAndBytes4Bit()),
        ("no weight to pack", nn.Linear(2, 2, device="meta"), "cpu", TorchAO(int8)),
        ("skip_modules", empty(), "cpu", TorchAO(group)),
        (r"'up\.weight'.*hooks", hooked, "cpu", TorchAO(int8)),
    ]
    for message, act in bad:
        with pytest.raises(ValueError, match=message):
            act()
    for message, model, place, quantization in loads:
        with pytest.raises(ValueError, match=message):
            load_checkpoint_in_model(model, checkpoint, {"": place}, quantization=quantization)


def test_what_is_quantised_already_is_not_loaded_again_nor_measured(checkpoint: Path) -> None:
    model = empty()
    load_checkpoint_in_model(model, checkpoint, quantization=BitsAndBytes4Bit())
    with pytest.raises(ValueError, match="quantised already"):
        load_checkpoint_in_model(model, checkpoint)
    with pytest.raises(CostError, match="is quantised"):
        measure_costs(
            model, (IDS,), blocks=[], rate=ComputeRate(flops_per_second=1e12, bytes_per_second=1e11)
        )


def test_weights_that_are_not_packed_yet_or_learn_are_not_dispatched(
    plain: nn.Module, tmp_path: Path
) -> None:
    plain.up = bnb.nn.Linear4bit(128, 192)  # packs what it has when it is moved
    with pytest.raises(DeviceMapError, match=r"'up\.weight'.*no quantised values yet"):
        dispatch_model(plain, {"": "disk"}, offload_dir=tmp_path)
    plain.up = bnb.nn.Linear8bitLt(128, 192, has_fp16_weights=True)
    with pytest.raises(DeviceMapError, match=r"'up\.weight'.*learns"):
        dispatch_model(plain, {"": "disk"}, offload_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_for_a_packed_weight_is_refused(checkpoint: Path) -> None:
    model = empty()
    load_checkpoint_in_model(model, checkpoint, dtype=BF16, quantization=BitsAndBytes4Bit())
    with pytest.raises(DeviceMapError, match="quantised weight"):
        dispatch_model(model, {"": "cpu"}, dtypes={"up.weight": torch.float16})


def test_a_layer_that_was_used_before_is_dispatched_whole(plain: nn.Module, tmp_path: Path) -> None:
    """A forward of bitsandbytes' 8-bit layer takes the scales from its weight."""
    bitsandbytes_of(plain, BitsAndBytes8Bit())
    expected = computed(plain)
    dispatch_model(plain, {"": "disk"}, offload_dir=tmp_path)
    assert torch.equal(computed(plain), expected)
    remove_hooks(plain)
    assert torch.equal(computed(plain), expected)


def test_gradients_go_through_packed_weights(plain: nn.Module, checkpoint: Path, kind: str) -> None:
    """As adapters train beside frozen weights; those of the layers that come and go."""
    quantization = KINDS[kind][0]()
    gradients = []
    for dispatched in (False, True):
        model = empty()
        load_checkpoint_in_model(model, checkpoint, dtype=BF16, quantization=quantization)
        model.requires_grad_(False)
        model.embed.weight.requires_grad_(True)
        if dispatched:
            copied(model)
        model(IDS).float().sum().backward()
        gradients.append(model.embed.weight.grad)
    assert torch.equal(*gradients)


def test_a_file_of_packed_weights_that_changes_stops_the_next_forward(checkpoint: Path) -> None:
    folder = checkpoint / "offloaded"
    model = load_checkpoint_and_dispatch(
        empty(), checkpoint, {"": "disk"}, dtype=BF16, quantization=BitsAndBytes4Bit(), offload_folder=folder
    )
    computed(model)
    files = sorted(folder.iterdir())
    assert len(files) == 2  # one for each packed weight; the others stay in the checkpoint
    files[0].write_bytes(files[0].read_bytes()[:-1])
    with pytest.raises(WeightFilesError, match="has changed"):
        computed(model)
