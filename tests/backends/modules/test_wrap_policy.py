import pytest
import torch
from torch import nn

from drivetrain_backends.modules.activation_checkpointing import checkpoint_activations
from drivetrain_backends.modules.wrap_policy import class_name, plan_blocks
from drivetrain_parallel.layers.divided_layers import with_forward


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)


class Model(nn.Module):
    def __init__(self, *, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(4, 10, bias=False)


def test_the_modules_of_lists_are_blocks_if_nothing_is_said() -> None:
    plan = plan_blocks(Model(), asked="")
    assert plan.blocks == ("layers.0", "layers.1")
    assert plan.reason == "the modules of its lists"


def test_a_model_without_lists_is_one_block() -> None:
    assert plan_blocks(nn.Sequential(nn.Linear(2, 2)), asked="").blocks == ()


def test_lists_within_the_items_of_a_list_are_theirs() -> None:
    model = nn.ModuleDict({"stages": nn.ModuleList([Model(depth=3)])})
    assert plan_blocks(model, asked="").blocks == ("stages.0",)


def test_a_models_own_word_wins_over_its_lists() -> None:
    model = Model()
    model._no_split_modules = ["Embedding", "NotHere"]
    plan = plan_blocks(model, asked="")
    assert plan.blocks == ("embedding",)
    assert plan.reason == "the model's _no_split_modules"


def test_inner_blocks_come_before_those_around_them() -> None:
    plan = plan_blocks(Model(depth=1), ("Block", "Linear"), asked="fsdp.wrap")
    assert plan.blocks == ("layers.0.up", "layers.0.down", "layers.0", "head")


@pytest.mark.parametrize(
    ("least", "blocks"),
    [(1000, ()), (60, ("layers.0", "layers.1")), (40, ("embedding", "layers.0.up", "layers.1.up", "head"))],
)
def test_by_size_a_block_holds_that_much_beyond_the_blocks_inside(
    least: int, blocks: tuple[str, ...]
) -> None:
    assert set(plan_blocks(Model(), asked="", min_num_params=least).blocks) == set(blocks)


def test_an_unknown_class_lists_those_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"fsdp.wrap=Blok: no model has .*; there are Block, Embedding, Linear, Model"
    ):
        plan_blocks(Model(), ("Blok",), asked="fsdp.wrap")


def test_a_class_of_another_model_of_the_run_is_known() -> None:
    assert plan_blocks(nn.Linear(2, 2), ("Block",), asked="fsdp.wrap", others=[Model()]).blocks == ()


def test_a_container_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"fsdp\.wrap=ModuleList: a container has no forward"):
        plan_blocks(Model(), ("ModuleList",), asked="fsdp.wrap")


def test_a_block_that_shares_a_parameter_with_the_outside_is_left_out_by_name() -> None:
    model = Model()
    model.head.weight = model.embedding.weight
    model.layers[1].up.weight = model.layers[0].up.weight
    plan = plan_blocks(model, ("Embedding", "Block", "Linear"), asked="fsdp.wrap")
    assert plan.blocks == ("layers.0.down", "layers.1.down")
    assert plan.left_out["embedding"] == "head.weight"
    assert plan.left_out["layers.1"] == "layers.0.up.weight"


def test_a_block_that_shares_within_itself_stays_a_block() -> None:
    model = Model(depth=1)
    model.layers[0].down.weight = nn.Parameter(torch.zeros(4, 8))
    model.layers[0].again = model.layers[0].down
    assert plan_blocks(model, asked="").blocks == ("layers.0",)


def test_a_class_has_the_name_that_the_user_wrote_whatever_has_replaced_it() -> None:
    layer = nn.Linear(1, 1)
    checkpoint_activations([layer], "full")
    with_forward(layer, lambda module, whole, *args: whole(module, *args))  # as a stage does
    assert class_name(layer) == "Linear"
