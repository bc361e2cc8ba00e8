from drivetrain_checkpoint.format.manifest import StoredBox
from drivetrain_checkpoint.planning.file_list import Catalogue
from drivetrain_checkpoint.planning.write_plan import AvailableBoxes, TensorName, WritePlan, WrittenBox
from drivetrain_weights.tensor_box import Box, whole

WEIGHT, STEP = TensorName("weights-model", "weight"), TensorName("state", "step")
UPPER, LOWER = Box((0, 0), (2, 3)), Box((2, 0), (2, 3))
PLAN = WritePlan(
    tensors={
        WEIGHT: AvailableBoxes("F32", 4, (4, 3), (whole((4, 3)),)),
        STEP: AvailableBoxes("I64", 8, (), (whole(()),)),
    },
    entries=((WrittenBox(WEIGHT, LOWER), WrittenBox(STEP, whole(()))), (WrittenBox(WEIGHT, UPPER),)),
)


def test_a_rank_has_a_file_for_each_part_that_it_writes_something_of() -> None:
    catalogue = Catalogue(PLAN)
    assert [file.name(0) for file in catalogue.files_of(0)] == [
        "weights-model.r0.safetensors", "state.r0.safetensors"
    ]  # fmt: skip
    assert [file.name(3) for file in catalogue.files_of(1)] == ["weights-model.r1.3.safetensors"]


def test_what_was_worked_out_is_kept() -> None:
    catalogue = Catalogue(PLAN)
    assert catalogue.files_of(0) is catalogue.files_of(0)


def test_the_manifest_lists_the_pieces_of_a_tensor_in_order_whoever_wrote_them() -> None:
    tensors = Catalogue(PLAN).tensors(["weights-model", "state", "rank-0"], attempt=0)
    assert tensors["rank-0"] == {}
    weight = tensors["weights-model"]["weight"]
    assert (weight.dtype, weight.shape) == ("F32", (4, 3))
    assert [(piece.file, piece.box) for piece in weight.pieces] == [
        ("weights-model.r1.safetensors", UPPER), ("weights-model.r0.safetensors", LOWER)
    ]  # fmt: skip


def test_another_attempt_has_other_names_and_the_same_places() -> None:
    catalogue = Catalogue(PLAN)
    parts = ["weights-model", "state"]
    first, again = (catalogue.tensors(parts, attempt)["state"]["step"].pieces for attempt in (0, 2))
    assert first == (StoredBox("state.r0.safetensors", first[0].start, whole(())),)
    assert again == (StoredBox("state.r0.2.safetensors", first[0].start, whole(())),)
