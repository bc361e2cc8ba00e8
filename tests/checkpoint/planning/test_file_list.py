from drivetrain_checkpoint.format.division import Division, starts_in_file
from drivetrain_checkpoint.planning.file_list import TensorFiles, WrittenBox
from drivetrain_checkpoint.planning.write_plan import TensorName
from drivetrain_weights.tensor_box import Box, whole

UPPER, LOWER = Box((0, 0), (2, 3)), Box((2, 0), (2, 3))
HALVES = Division("F32", 4, (4, 3), {0: (LOWER,), 1: (UPPER,)})
SCALAR = Division("I64", 8, (), {0: (whole(()),)})
DIVISIONS = {"weights-model": {"weight": HALVES, "bias": HALVES, "steps": SCALAR}, "state": {"step": SCALAR}}


def test_a_rank_has_a_file_for_each_part_that_it_writes_something_of() -> None:
    tensor_files = TensorFiles(DIVISIONS)
    assert [file.name(0) for file in tensor_files.files_of(0)] == [
        "weights-model.r0.safetensors", "state.r0.safetensors"
    ]  # fmt: skip
    assert [file.name(3) for file in tensor_files.files_of(1)] == ["weights-model.r1.3.safetensors"]


def test_what_was_worked_out_is_kept() -> None:
    tensor_files = TensorFiles(DIVISIONS)
    assert tensor_files.files_of(0) is tensor_files.files_of(0)


def test_the_widest_dtype_comes_first_and_then_the_order_of_the_state() -> None:
    [weights, _] = TensorFiles(DIVISIONS).files_of(0)
    assert weights.entries == tuple(
        WrittenBox(TensorName("weights-model", name), box)
        for name, box in {"steps": whole(()), "weight": LOWER, "bias": LOWER}.items()
    )
    assert weights.layout.order == (0, 1, 2)


def test_a_box_is_named_after_its_tensor_and_place() -> None:
    [file] = TensorFiles({"state": {"a": HALVES, "a[0:2, 0:3]": HALVES}}).files_of(1)
    for key in (b'"a[0:2, 0:3]\'"', b'"a[0:2, 0:3][0:2, 0:3]"'):
        assert file.layout.header.count(key) == 1


def test_the_places_follow_from_the_size_of_the_file() -> None:
    for rank in (0, 1):
        for file in TensorFiles(DIVISIONS).files_of(rank):
            starts = starts_in_file(DIVISIONS[file.part], rank, file.layout.size_bytes)
            assert list(starts.items()) == [
                (entry.tensor.name, start)
                for entry, start in zip(file.entries, file.layout.starts, strict=True)
            ]
