"""Parsers whose flags may be written in two ways, against the real ones."""

from typing import Any

import pytest

from drivetrain_accelerate.commands.command_line import CustomArgumentGroup, CustomArgumentParser

pytest.importorskip("accelerate", reason="the interface is held against the real one")

from accelerate.commands.utils import CustomArgumentParser as RealParser


def built(kind: Any) -> Any:
    parser = kind("program", allow_abbrev=False)
    parser.add_argument("--a_b", default="x")
    parser.add_argument("--c-d", action="store_true")
    parser.add_argument("-m", "--mod_x", type=int, default=3)
    parser.add_argument("place")
    parser.add_argument_group("more").add_argument("--e_f", action="append")
    return parser


@pytest.mark.parametrize(
    "line",
    [["p"], ["--a-b", "y", "p"], ["--a_b", "x", "--c-d", "p"], ["-m", "4", "--e_f", "1", "--e_f", "2", "p"]],
)
def test_lines_are_parsed_as_by_the_real_one(line: list[str]) -> None:
    assert vars(built(CustomArgumentParser).parse_args(line)) == vars(built(RealParser).parse_args(line))


def test_groups_are_of_the_class_that_takes_both_spellings() -> None:
    assert isinstance(CustomArgumentParser().add_argument_group("x"), CustomArgumentGroup)
