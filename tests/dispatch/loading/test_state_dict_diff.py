import pytest
import torch

from drivetrain_dispatch.errors import WeightsMismatchError
from drivetrain_dispatch.loading.checkpoint_tensors import TensorSpec
from drivetrain_dispatch.loading.state_dict_diff import StateDictDiff

FLOATS = TensorSpec((2, 3), torch.float32)


def told(diff: StateDictDiff, known: set[str] | None = None, found: set[str] | None = None) -> str:
    with pytest.raises(WeightsMismatchError) as caught:
        diff.check(known=known or set(), found=found or set())
    return str(caught.value)


def test_nothing_that_does_not_fit_is_no_error() -> None:
    diff = StateDictDiff(checkpoint="x", strict=True)
    diff.compare("a", FLOATS, FLOATS, converts=False)
    diff.compare("a", TensorSpec((2, 3), torch.bfloat16), FLOATS, converts=False)
    diff.compare("a", TensorSpec((2, 3), torch.int8), FLOATS, converts=True)
    diff.compare_copies(["a", "b"], FLOATS, FLOATS)
    diff.absent("scratch", FLOATS, persistent=False, empty=False)
    diff.check(known={"a"}, found={"a"})
    diff.compare("a", FLOATS, TensorSpec((3, 2), torch.float32), converts=False)
    assert "'a'" in told(diff)  # the same calls tell what does not fit


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
def test_numbers_of_another_kind_are_told(dtype: torch.dtype) -> None:
    diff = StateDictDiff(checkpoint="x", strict=False)
    diff.compare("a", TensorSpec((2, 3), dtype), FLOATS, converts=False)
    name = str(dtype).removeprefix("torch.")
    assert f"1 that differ: 'a' is (2, 3) {name}, in the model (2, 3) float32" in told(diff)


def test_the_first_of_many_are_named_and_the_others_counted() -> None:
    diff = StateDictDiff(checkpoint="weights.safetensors", strict=True)
    for index in range(8):
        diff.absent(f"m{index}", FLOATS, persistent=True, empty=False)
    diff.unexpected["other"] = FLOATS
    text = told(diff)
    assert text.startswith("weights.safetensors does not fit the model, which is as it was:\n")
    assert "8 missing: 'm0' (2, 3) float32, " in text
    assert "'m4' (2, 3) float32 and 3 more\n" in text
    assert "1 unexpected: 'other' (2, 3) float32" in text
    assert "strict=False leaves what is missing" in text
    assert "meta device" not in text


@pytest.mark.parametrize(
    ("known", "found", "hint"),
    [
        ({"a", "b.c"}, {"p.a", "p.b.c"}, "all names fit without 'p.': give rename=lambda name: name.removepref"),
        ({"a", "b"}, {"p.a", "p.b", "z"}, "are there without 'p.': give rename=lambda name: name.removepref"),
        ({"a", "b"}, {"p.a", "p.b", "z"}, "('p.'), and strict=False for the others of the checkpoint"),
        ({"p.a", "p.b"}, {"a", "b"}, "all names fit with 'p.' before them: give rename=lambda name: 'p.' + name"),
        ({"p.q.a", "h"}, {"a"}, "names of the checkpoint fit with 'p.q.' before them: give rename=lambda name: 'p"),
        ({"a", "b"}, {"p.a", "q.b"}, None),
        ({"a", "b"}, {"a"}, None),
        ({"a"}, {"c"}, None),
    ],
)  # fmt: skip
def test_a_prefix_is_hinted_at_where_all_names_fit_with_it(
    known: set[str], found: set[str], hint: str | None
) -> None:
    diff = StateDictDiff(checkpoint="x", strict=True)
    diff.absent("a", FLOATS, persistent=True, empty=False)
    text = told(diff, known, found)
    assert ("rename=" in text) == (hint is not None)
    assert hint is None or hint in text


def test_what_would_stay_without_values_is_not_said_to_stay_as_it_is() -> None:
    diff = StateDictDiff(checkpoint="weights.safetensors", strict=True)
    diff.absent("head.weight", FLOATS, persistent=True, empty=True)
    text = told(diff)
    assert "1 missing: 'head.weight'" in text
    assert "what is missing has no values to keep" in text
    assert "strict=False" not in text
