"""What ranks hold of a tensor, out of the boxes and marks of Megatron's layers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from drivetrain_megatron.backend import check_options, found_in_parts
from drivetrain_megatron.divisions import cut_of, find_cuts, marked_cut
from drivetrain_megatron.groups import close_parallel_state, open_parallel_state
from drivetrain_megatron.layers import block_spec
from drivetrain_megatron.library import GPTModel, TransformerConfig
from drivetrain_parallel import Cut, part_of
from drivetrain_state import ParallelDims
from drivetrain_weights import Box
from megatron_on_cpu import megatron_on_cpu
from plain_loop.backends import context


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(1, 4),
    st.data(),
)
def test_boxes_of_equal_runs_are_a_cut_of_which_each_rank_holds_them(
    runs: list[int], size: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, size - 1))
    whole, at, boxes = sum(runs) * size, 0, list[tuple[Box, tuple[int, ...]]]()
    for run in runs:
        boxes.append((Box((at + rank * run, 0), (run, 3)), (whole, 3)))
        at += run * size
    cut = cut_of(boxes, (sum(runs), 3), rank=rank, size=size, name="weight")
    if size == 1:
        assert cut is None
        return
    assert cut is not None
    tensor = torch.arange(whole * 3).view(whole, 3)
    held = torch.cat([tensor[box.slices()] for box, _ in boxes])
    assert torch.equal(part_of(tensor, cut, rank, size), held)


@pytest.mark.parametrize(
    "boxes",
    [
        [(Box((0, 0), (2, 4)), (8, 4))],  # not at the place of the second of two ranks
        [(Box((4, 2), (4, 2)), (8, 4))],  # two dimensions
        [(Box((3, 0), (4, 4)), (8, 4))],
    ],
)
def test_boxes_that_no_cut_describes_are_refused(boxes: list[tuple[Box, tuple[int, ...]]]) -> None:
    (box, _), *_ = boxes
    with pytest.raises(
        ValueError, match=r"^weight: this rank of 2 holds .* correct the sharded_state_dict\(\)"
    ):
        cut_of(boxes, box.sizes, rank=1, size=2, name="weight")


def test_marks_say_how_many_pieces_a_dimension_has() -> None:
    parameter = nn.Parameter(torch.zeros(4, 6))
    parameter.partition_dim, parameter.partition_stride = 0, 2  # type: ignore[attr-defined]
    assert marked_cut(parameter, 3) == Cut(dim=0, pieces=(6, 6), num_units=3)


def config_of(**options: object) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24,
        gated_linear_unit=True, activation_func=nn.functional.silu, use_cpu_initialization=True,
        tensor_model_parallel_size=2, add_qkv_bias=True, normalization="RMSNorm", bias_dropout_fusion=False,
        cuda_graph_scope=None,
        **options,
    )  # fmt: skip


def names_of(cuts: dict[torch.Tensor, Cut], model: nn.Module) -> dict[str, Cut]:
    return {name: cuts[parameter] for name, parameter in model.named_parameters() if parameter in cuts}


@pytest.mark.ranks(2, timeout_seconds=120)
def test_every_divided_parameter_of_a_model_has_the_cut_of_its_marks() -> None:
    with megatron_on_cpu(), context(parallelism=ParallelDims(tensor=2)) as where:
        open_parallel_state(where)
        config = config_of(sequence_parallel=True, qk_layernorm=True)
        model = GPTModel(
            config, block_spec(config), vocab_size=32, max_sequence_length=16, position_embedding_type="rope"
        )
        rank = where.ranks("tensor").index
        cuts = names_of(find_cuts(model, rank=rank, size=2), model)
        around = names_of(find_cuts(nn.ModuleDict({"inner": model}), rank=rank, size=2), model)
        marked = {
            name: marked_cut(p, 2)
            for name, p in model.named_parameters()
            if getattr(p, "tensor_model_parallel", False)
        }
        assert cuts == around == marked
        assert len(cuts) == 2 + 2 * 6
        in_parts = {id(parameter) for parameter, _ in found_in_parts(model)}
        between = {name for name, p in model.named_parameters() if id(p) in in_parts}
        added = ("linear_proj.bias", "linear_fc2.bias")  # after the parts of a layer's output are added up
        assert between == {
            name for name, _ in model.named_parameters() if "layernorm" in name or name.endswith(added)
        }
        close_parallel_state()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            {"gradient_accumulation_fusion": True},
            r"gradient_accumulation_fusion=True: gradients would go to a buffer",
        ),
        ({"moe_aux_loss_coeff": 0.1}, r"moe_aux_loss_coeff=0\.1: Megatron adds this loss in backward"),
        ({"mtp_num_layers": 1}, r"mtp_num_layers=1: Megatron adds this loss in backward"),
    ],
)
def test_options_that_only_megatrons_engine_carries_out_are_refused(
    option: dict[str, object], message: str
) -> None:
    model = nn.Linear(2, 2)
    model.config = config_of()  # type: ignore[assignment]
    check_options(model)
    for name, value in option.items():
        setattr(model.config, name, value)
    with pytest.raises(ValueError, match=message):
        check_options(model)
