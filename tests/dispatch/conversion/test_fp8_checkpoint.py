"""Checkpoints in fp8 with a scale for each block, as DeepSeek-V3 is published: dequantised, or kept."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from drivetrain_dispatch import (
    DeviceMapError,
    OffloadedError,
    StoredFP8,
    WeightFilesError,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    load_pretrained,
    remove_hooks,
)
from drivetrain_dispatch.conversion.fp8_checkpoint import can_be_kept
from drivetrain_dispatch.conversion.lazy_tensor import LazyTensor
from drivetrain_dispatch.loading.checkpoint_tensors import WeightLoadOptions, open_checkpoint
from drivetrain_dispatch.loading.quantize_on_load import with_quantized_sizes
from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_dispatch.quantization.block_scaled import BlockScaledTensor
from drivetrain_weights import MappedFile
from optional_modules import import_later

transformers = import_later("transformers")

SMALL = {
    "vocab_size": 97, "num_hidden_layers": 2, "num_attention_heads": 4, "n_routed_experts": 4, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1, "hidden_size": 160, "intermediate_size": 288,
}  # fmt: skip


def assert_equal(model: nn.Module, wanted: nn.Module) -> None:
    """Compare all that checkpoints hold."""
    held, expected = model.state_dict(), wanted.state_dict()
    assert held.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(held[name], tensor), name


def blocks(weight: torch.Tensor, size: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight as fp8 and its scales, by the definition, block after block."""
    rows, columns = (-(-length // size) for length in weight.shape)
    scales = torch.empty(rows, columns)
    packed = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            place = (slice(row * size, (row + 1) * size), slice(column * size, (column + 1) * size))
            scales[row, column] = weight[place].abs().max() / 448
            packed[place] = (weight[place] / scales[row, column]).to(torch.float8_e4m3fn)
    return packed, scales


def unpacked(packed: torch.Tensor, scales: torch.Tensor, size: int = 128) -> torch.Tensor:
    """The weight again."""
    full = packed.float()
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            full[row * size : (row + 1) * size, column * size : (column + 1) * size] *= scales[row, column]
    return full


def published_in_fp8(folder: Path, expert_width: int = 136) -> nn.Module:
    """Write DeepSeek-V3 as it is published, with blocks that are cut at the edges; return the model as it is then."""
    torch.manual_seed(0)
    model = (
        transformers.DeepseekV3ForCausalLM(
            transformers.DeepseekV3Config(**SMALL, moe_intermediate_size=expert_width)
        )
        .to(torch.bfloat16)
        .eval()
    )
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    plain = dict(tensors)
    for name, tensor in plain.items():
        if tensor.dim() == 2 and "proj" in name:
            tensors[name], tensors[f"{name}_scale_inv"] = blocks(tensor.float())
            plain[name] = unpacked(tensors[name], tensors[f"{name}_scale_inv"]).to(torch.bfloat16)
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    wanted = transformers.DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    (folder / "config.json").write_text(json.dumps(config))
    return wanted


def load(folder: Path, **options: object) -> nn.Module:
    return load_pretrained(transformers.AutoModelForCausalLM, folder, **options)


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_fp8_with_block_scales_is_dequantised_while_it_is_read(tmp_path: Path, place: str) -> None:
    wanted = published_in_fp8(tmp_path)
    model = load(tmp_path, device_map={"": place}, offload_folder=tmp_path / "offload")
    assert_equal(model, wanted)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, wanted(ids).logits)
    assert not hasattr(model.config, "quantization_config")


def test_scales_of_other_blocks_are_refused(tmp_path: Path) -> None:
    save_file(
        {"weight": torch.zeros(256, 256).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(4, 4)},
        tmp_path / "x.safetensors",
    )
    with pytest.raises(WeightFilesError, match=r"has scales of shape \(4, 4\)"):
        load_checkpoint_in_model(nn.Linear(256, 256, bias=False), tmp_path)


# ---- kept


def weight_of(rows: int, columns: int, *outer: int) -> tuple[BlockScaledTensor, torch.Tensor]:
    """A weight in fp8, and the same in bf16."""
    each = [blocks(torch.randn(rows, columns)) for _ in range(outer[0] if outer else 1)]
    values, scales = (torch.stack(parts) if outer else parts[0] for parts in zip(*each, strict=True))
    full = torch.stack([unpacked(*one) for one in each]) if outer else unpacked(*each[0])
    return BlockScaledTensor(values, scales, torch.bfloat16), full.to(torch.bfloat16)


@pytest.mark.parametrize("shape", [(128, 128), (256, 130), (5, 300), (200, 7)])
def test_a_kept_weight_computes_as_it_does_in_full(shape: tuple[int, int]) -> None:
    kept, full = weight_of(*shape)
    inputs = torch.randn(3, shape[1], dtype=torch.bfloat16)
    assert (kept.shape, kept.dtype) == (full.shape, full.dtype)
    assert torch.equal(F.linear(inputs, kept), F.linear(inputs, full))
    assert torch.equal(inputs @ kept.T, inputs @ full.T)
    assert torch.equal(kept + 1, full + 1)
    assert torch.equal(kept[1:3], full[1:3])
    for copied in (
        kept.clone(),
        kept.detach(),
        copy.deepcopy(kept),
        kept.to("cpu"),
        nn.Parameter(kept, False),
    ):
        assert isinstance(copied, BlockScaledTensor)
        assert torch.equal(F.linear(inputs, copied), F.linear(inputs, full))
    assert torch.equal(
        F.linear(inputs.float(), kept.to(torch.float32)),
        F.linear(inputs.float(), unpacked(kept.values, kept.scales)),
    )


def test_an_expert_is_selected_without_dequantising_the_others() -> None:
    kept, full = weight_of(130, 256, 3)
    assert isinstance(kept[1], BlockScaledTensor)
    inputs = torch.randn(3, 256, dtype=torch.bfloat16)
    assert torch.equal(F.linear(inputs, kept[1]), F.linear(inputs, full[1]))
    assert torch.equal(kept[:, 1], full[:, 1])


def test_gradients_go_through_a_kept_weight() -> None:
    kept, full = weight_of(128, 128)
    grads: list[torch.Tensor] = []
    for weight in (kept, full):
        inputs = torch.ones(2, 128, dtype=torch.bfloat16, requires_grad=True)
        F.linear(inputs, weight).sum().backward()
        assert inputs.grad is not None
        grads.append(inputs.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("expert_width", [128, 136])
@pytest.mark.parametrize("place", [{"": "cpu"}, {"": "disk"}, "half"])
@pytest.mark.default_cases("half-128", "place0-136")
def test_what_is_kept_computes_what_is_dequantised(tmp_path: Path, place: object, expert_width: int) -> None:
    wanted = published_in_fp8(tmp_path / "model", expert_width)
    how = {"max_memory": {"cpu": "800kB"}} if place == "half" else {"device_map": place}
    told: list[tuple[int, int]] = []
    model = load(tmp_path / "model", quantization=StoredFP8(),
        offload_folder=tmp_path / "offload", progress=lambda *both: told.append(both), **how,
    )  # fmt: skip
    assert told == sorted(told)
    assert all(done == total for done, total in told[-1:])
    kept = {name for name, weight in model.named_parameters() if isinstance(weight, BlockScaledTensor)}
    experts = {name for name in wanted.state_dict() if ".mlp.experts." in name}
    others = {name for name in wanted.state_dict() if "proj" in name} - experts
    assert kept - experts == others
    assert any("experts.down_proj" in name for name in kept & experts)
    # Two matrices of 136 rows, one upon the other, are not three blocks.
    assert any("experts.gate_up_proj" in name for name in kept & experts) is (expert_width == 128)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, wanted(ids).logits)
        assert torch.equal(model(ids).logits, wanted(ids).logits)
    assert torch.equal(
        model.generate(ids, max_new_tokens=5, do_sample=False),
        wanted.generate(ids, max_new_tokens=5, do_sample=False),
    )
    remove_hooks(model)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, wanted(ids).logits)


def test_a_map_counts_what_kept_weights_take(tmp_path: Path) -> None:
    published_in_fp8(tmp_path, 128)
    kept = load(tmp_path, quantization=StoredFP8())
    with init_empty_weights():
        empty = transformers.AutoModelForCausalLM.from_config(kept.config)
    held = {
        name: weight.values.nbytes + weight.scales.nbytes
        for name, weight in kept.named_parameters()
        if isinstance(weight, BlockScaledTensor)
    }
    layout, options = ModelLayout.of(empty), WeightLoadOptions(quantization=StoredFP8())
    stored = open_checkpoint(layout, tmp_path, options).specs
    assert with_quantized_sizes(layout, stored, options.quantization).special_sizes == held
    total = sum(held.values()) + sum(
        weight.nbytes for name, weight in kept.named_parameters() if name not in held
    )
    load(tmp_path, quantization=StoredFP8(), max_memory={"cpu": 2 * total, "disk": 0})
    with pytest.raises(DeviceMapError, match="max_memory"):  # they would take more in full
        load(tmp_path, max_memory={"cpu": total, "disk": 0})


def test_on_the_disk_published_layers_stay_in_their_files(tmp_path: Path) -> None:
    published_in_fp8(tmp_path / "model", 128)
    offload = tmp_path / "offload"
    for _ in range(2):
        model = load(tmp_path / "model", device_map={"": "disk"}, quantization=StoredFP8(),
            offload_folder=offload,
        )  # fmt: skip
    (written,) = offload.iterdir()
    experts = [weight for name, weight in model.named_parameters() if ".mlp.experts." in name]
    parts = [part for weight in experts for part in (weight.values, weight.scales)]
    assert (
        sum(part.nbytes for part in parts)
        <= written.stat().st_size
        < sum(part.nbytes for part in parts) + 4096
    )


def test_nothing_to_keep_is_refused(tmp_path: Path) -> None:
    save_file(nn.Linear(8, 8).state_dict(), tmp_path / "x.safetensors")
    with init_empty_weights():
        model = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="has none that the model can compute with: leave it out"):
        load_checkpoint_and_dispatch(model, tmp_path, {"": "cpu"}, quantization=StoredFP8())
    assert model.weight.is_meta


@pytest.mark.parametrize(
    ("rows", "kept"), [((128, 128), True), ((128, 64), True), ((64, 128), False), ((64, 64), False)]
)
def test_blocks_that_a_join_would_cut_are_not_kept(tmp_path: Path, rows: tuple[int, int], kept: bool) -> None:
    each = [blocks(torch.randn(count, 256)) for count in rows]
    tensors = {
        f"{name}{end}": part
        for name, parts in zip("ab", each, strict=True)
        for end, part in zip(("", "_scale_inv"), parts, strict=True)
    }
    save_file(tensors, tmp_path / "x.safetensors")
    lazy = {name: LazyTensor.in_file(MappedFile(tmp_path / "x.safetensors"), name) for name in tensors}
    values, scales = (torch.cat([lazy[f"a{end}"], lazy[f"b{end}"]]) for end in ("", "_scale_inv"))
    assert can_be_kept(values, scales) is kept
    transposed = (torch.cat([lazy[f"a{end}"], lazy[f"b{end}"]]).transpose(0, 1) for end in ("", "_scale_inv"))
    assert not can_be_kept(*transposed)


def test_a_weight_without_its_scales_is_told(tmp_path: Path) -> None:
    published_in_fp8(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightFilesError, match=r"o_proj\.weight' is fp8 and has no scales"):
        load(tmp_path, strict=False)


def test_other_blocks_that_a_configuration_names_are_refused(tmp_path: Path) -> None:
    published_in_fp8(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [96, 96]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"weight_block_size=\[96, 96\]"):
        load(tmp_path)


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.mul_(2),
        lambda w: w.zero_(),
        lambda w: w.copy_(torch.ones(w.shape)),
        lambda w: w.data.add_(1),
    ],
)
def test_a_kept_weight_cannot_be_written_to(write: Callable[[torch.Tensor], object]) -> None:
    kept, full = weight_of(128, 128)
    with pytest.raises(OffloadedError, match="cannot be written to"):
        write(kept)
    assert torch.equal(kept + 0, full)
