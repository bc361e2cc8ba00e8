from pathlib import Path

import pytest

from drivetrain_messages import find_near, suggest

KNOWN = ["ddp", "fsdp", "deepspeed"]


@pytest.mark.parametrize(
    ("name", "near"), [("fspd", "fsdp"), ("dpp", "ddp"), ("fsdp", "fsdp"), ("zzz", None), ("", None)]
)
def test_the_nearest_name_is_found(name: str, near: str | None) -> None:
    assert find_near(name, KNOWN) == near


def test_a_suggestion_ends_an_error_and_is_empty_without_a_near_name() -> None:
    assert suggest("fspd", iter(KNOWN)) == "; did you mean fsdp"
    assert suggest("fspd", KNOWN, show="--{}=".format) == "; did you mean --fsdp="
    assert suggest("fspd", KNOWN, show=Path("{run}").joinpath) == "; did you mean {run}/fsdp"
    assert suggest("zzz", KNOWN) == suggest("fspd", []) == ""


def test_names_that_are_less_alike_are_found_if_asked_for() -> None:
    assert find_near("speed", KNOWN) == "deepspeed"
    assert find_near("speed", KNOWN, likeness=0.9) is None
