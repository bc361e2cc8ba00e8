from dataclasses import dataclass, field

import pytest

from drivetrain.plan.effective_plan import PlanMismatchError, make_plan
from drivetrain.plan.plan_summary import summarize
from drivetrain_config import Resolved, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    mode: str = "auto"
    steps: int = 4
    token: str = field(default="hidden", metadata={"secret": True})


def resolved(**values: object) -> dict[str, Resolved[Section]]:
    section = Section(**values)
    sources = {
        name: Source("file", "run.yaml:3") if name in values else Source("default")
        for name in ("mode", "steps", "token")
    }
    return {"run": Resolved(value=section, sources=sources, disagreements=())}


def test_a_difference_that_nobody_asked_for_is_an_error_that_names_both() -> None:
    with pytest.raises(PlanMismatchError, match=r"run\.steps: asked 8 \(run\.yaml:3\), applied 4"):
        make_plan(resolved(steps=8), {"run": {"steps": 4}}, reasons={}, facts={})


def test_a_choice_left_open_is_shown_with_its_reason() -> None:
    plan = make_plan(
        resolved(), {"run": {"mode": "bf16"}}, reasons={"run.mode": "the hardware has it"}, facts={}
    )
    assert "run.mode  auto   bf16     default" in str(plan)
    assert "run.mode: the hardware has it" in str(plan)


def test_what_could_not_be_read_back_is_shown_as_asked() -> None:
    plan = make_plan(resolved(mode="bf16", steps=8), {"run": {"steps": 8}}, reasons={}, facts={})
    assert "run.mode   bf16   as asked  run.yaml:3" in str(plan)
    assert "run.steps  8      8         run.yaml:3" in str(plan)


def test_secrets_are_in_no_plan() -> None:
    plan = make_plan(resolved(token="abc"), {}, reasons={}, facts={})
    assert "abc" not in str(plan)
    assert "abc" not in str(plan.as_dict())


def test_what_stands_at_its_default_is_not_listed_but_stored() -> None:
    plan = make_plan(resolved(steps=8), {}, reasons={}, facts={"processes": 2})
    assert "run.steps" in str(plan)
    assert "run.mode" not in str(plan)
    assert plan.as_dict()["settings"]["run.mode"] == {
        "asked": "auto",
        "applied": "auto",
        "source": "default",
        "read_back": False,
        "reason": "",
    }
    assert plan.as_dict()["facts"] == {"processes": 2}


def test_details_of_facts_are_in_the_whole_plan() -> None:
    plan = make_plan(
        resolved(), {}, reasons={}, facts={"data 0": "shuffled"}, details={"data 0": "permutation 1"}
    )
    assert "data 0, in detail: permutation 1" in str(plan)
    assert plan.as_dict()["details"] == {"data 0": "permutation 1"}


FACTS = {
    "processes": "2 on 1 node",
    "device": "cpu",
    "backend": "DDPBackend",
    "precision": "bf16",
    "data 0": "batches of 8 x 2 processes = 16 samples in a step; shuffled, seed 3",
}


def test_the_summary_says_what_trains_where_it_is_kept_and_what_was_chosen_and_why() -> None:
    plan = make_plan(
        resolved(steps=8), {"run": {"mode": "bf16"}}, reasons={"run.mode": "the hardware has it"}, facts=FACTS
    )
    assert summarize(plan, whole="runs/plan.json").splitlines() == [
        "trains   2 on 1 node, cpu: DDPBackend in bf16",
        "a step   batches of 8 x 2 processes = 16 samples in a step; shuffled, seed 3",
        "kept     nothing: run.project_dir is not set",
        "chosen   run.mode = bf16: the hardware has it",
        "more     runs/plan.json",
    ]


def test_the_summary_tells_the_loader_that_shuffles_and_no_other() -> None:
    facts = {
        **FACTS,
        "data 0": "batches of 4; the dataset's own order",
        "data 1": "batches of 8; shuffled, seed 1",
    }
    lines = summarize(make_plan(resolved(), {}, reasons={}, facts=facts), whole="").splitlines()
    assert [line for line in lines if "batches" in line] == ["a step   batches of 8; shuffled, seed 1"]
