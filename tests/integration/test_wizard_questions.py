from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from drivetrain_config import sections
from drivetrain_launcher.wizard.questionnaire import GivenAnswer, Key, plan_questions

BACKENDS = {"single": "One.", "ddp": "Replicas.", "fsdp": "Shards.", "deepspeed": "ZeRO."}
UNKNOWN: dict[str, Any] = {
    "machine.host": "localhost",
    "machine.folder": "run",
    "machine.num_cpus": 1,
    "machine.memory_bytes": None,
    "machine.accelerator": None,
    "machine.accelerator_count": 0,
    "machine.accelerator_name": "",
    "machine.accelerator_memory_bytes": None,
    "machine.can_fp16": False,
    "machine.can_bf16": False,
    "cluster.name": None,
    "cluster.num_nodes": None,
    "installed.backends": BACKENDS,
    "installed.trackers": {},
}
EIGHT = UNKNOWN | {
    "machine.accelerator": "cuda",
    "machine.accelerator_count": 8,
    "machine.accelerator_name": "NVIDIA H100",
    "machine.accelerator_memory_bytes": 80 * 2**30,
    "machine.can_bf16": True,
    "machine.can_fp16": True,
    "machine.num_cpus": 96,
    "machine.host": "node0",
    "machine.folder": "llm",
    "installed.trackers": {"jsonl": "A file."},
}
OLD = UNKNOWN | {
    "machine.accelerator": "cuda",
    "machine.accelerator_count": 1,
    "machine.accelerator_name": "Tesla V100",
    "machine.can_fp16": True,
}
NONE = UNKNOWN | {"machine.num_cpus": 4}
IN_A_JOB = UNKNOWN | {
    "cluster.name": "slurm",
    "cluster.num_nodes": 4,
    "machine.accelerator": "cuda",
    "machine.accelerator_count": 8,
}


def answered(
    facts: dict[str, Any], said: dict[str, Any], kinds: dict[str, type[Any]] | None = None
) -> dict[str, Any]:
    """Answer as `said`, or else as recommended; return every question asked with its recommendation."""
    known = sections() if kinds is None else kinds
    answers: dict[Key, GivenAnswer] = {}
    asked: dict[str, Any] = {}
    while questions := plan_questions(known, facts, answers).questions:
        question = questions[0]
        name = f"{question.section}.{question.field}"
        assert name not in asked
        asked[name] = question.recommended
        answers[question.key] = GivenAnswer(value=said.get(name, question.recommended), why="")
    return asked


def test_on_eight_devices_processes_precision_and_backend_are_asked() -> None:
    asked = answered(EIGHT, {})
    assert list(asked)[:4] == [
        "launch.num_nodes",
        "launch.num_processes",
        "run.mixed_precision",
        "run.backend",
    ]
    assert asked["launch.num_processes"] is None
    assert asked["run.mixed_precision"] == "bf16"
    assert asked["run.backend"] == "auto"
    assert not [name for name in asked if name.startswith(("fsdp.", "deepspeed.", "ddp."))]


def test_one_old_device_leaves_no_choice_of_processes_and_backend() -> None:
    asked = answered(OLD, {})
    assert "launch.num_processes" not in asked
    assert "run.backend" not in asked
    assert asked["run.mixed_precision"] == "fp16"


def test_an_old_device_is_not_offered_what_it_cannot_do() -> None:
    plan = plan_questions(sections(), OLD, {})
    (precision,) = (question for question in plan.questions if question.field == "mixed_precision")
    assert [choice.value for choice in precision.choices] == ["fp16", "no"]
    assert "Tesla V100 has no units for bf16" in precision.why


def test_without_an_accelerator_no_precision_is_asked_and_one_process_recommended() -> None:
    asked = answered(NONE, {})
    assert "run.mixed_precision" not in asked
    assert asked["launch.num_processes"] == 1


@pytest.mark.parametrize(
    ("said", "more"),
    [
        ({"run.backend": "fsdp"}, ["fsdp.strategy", "fsdp.offload"]),
        (
            {"run.backend": "deepspeed"},
            ["deepspeed.stage", "deepspeed.offload_optimizer"],
        ),
        (
            {"run.backend": "deepspeed", "deepspeed.stage": 3, "deepspeed.offload_param": "nvme"},
            [
                "deepspeed.stage",
                "deepspeed.offload_optimizer",
                "deepspeed.offload_param",
                "deepspeed.nvme_path",
            ],
        ),
        (
            {"run.backend": "deepspeed", "deepspeed.stage": 0},
            ["deepspeed.stage"],
        ),
    ],
)
def test_a_backends_questions_come_when_it_is_chosen(said: dict[str, Any], more: list[str]) -> None:
    asked = answered(EIGHT, said)
    assert [name for name in asked if name.startswith(("fsdp.", "deepspeed.", "ddp."))] == more


@pytest.mark.parametrize(
    ("said", "asked", "not_asked"),
    [
        ({"launch.num_nodes": 2}, ["launch.rdzv_backend", "launch.master_addr"], ["launch.rdzv_id"]),
        (
            {"launch.num_nodes": 2, "launch.rdzv_backend": "c10d"},
            ["launch.rdzv_id"],
            ["launch.num_processes"],
        ),
        ({"run.project_dir": None}, ["run.project_dir"], ["run.log_with", "checkpoint.keep_last"]),
    ],
)
def test_an_answer_raises_and_settles_questions(
    said: dict[str, Any], asked: list[str], not_asked: list[str]
) -> None:
    found = answered(EIGHT, said)
    assert set(asked) <= found.keys()
    assert not set(not_asked) & found.keys()


def test_what_a_cluster_has_decided_is_not_asked() -> None:
    assert not [name for name in answered(IN_A_JOB, {}) if name.startswith("launch.")]
    assert "run.backend" in answered(IN_A_JOB, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The model of a third party."""

    name: str = field(metadata={"help": "name of the model"})
    width: int = field(default=128, metadata={"help": "size of the layers"})
    kind: Literal["small", "large"] = field(
        default="small",
        metadata={
            "help": "the kind",
            "ask": lambda known: (
                {"value": "large", "why": "it fits"} if known["machine.num_cpus"] > 8 else None
            ),
        },
    )
    key: str | None = field(default=None, metadata={"help": "a key", "secret": True})


def test_a_third_partys_section_appears_by_itself() -> None:
    kinds = {**sections(), "model": ModelSettings}
    asked = answered(EIGHT, {"model.name": "tiny"}, kinds)
    assert [name for name in asked if name.startswith("model.")] == ["model.name", "model.kind"]
    assert asked["model.kind"] == "large"
    assert "model.kind" not in answered(NONE, {"model.name": "tiny"}, kinds)
    plan = plan_questions(kinds, EIGHT, {})
    assert plan.further["model"] == "The model of a third party."


def test_a_section_that_is_opened_asks_for_every_field_but_secrets() -> None:
    plan = plan_questions({"model": ModelSettings}, NONE, {}, opened=("model",))
    assert [question.field for question in plan.questions] == ["name", "width", "kind"]
    assert plan.questions[1].text == "Size of the layers?"
    assert plan.further == {}


def test_settings_of_an_earlier_file_are_recommended_with_their_source() -> None:
    earlier = {("launch", "num_nodes"): GivenAnswer(value=4, why="as before, in drivetrain.yaml:3")}
    (question, *_) = plan_questions(sections(), EIGHT, {}, earlier=earlier).questions
    assert (question.recommended, question.why) == (4, "as before, in drivetrain.yaml:3")


@pytest.mark.parametrize("facts", [EIGHT, OLD, NONE, IN_A_JOB])
def test_the_recommended_choice_comes_first_and_every_recommendation_has_a_reason(
    facts: dict[str, Any],
) -> None:
    for backend in BACKENDS:
        answers = {("run", "backend"): GivenAnswer(value=backend, why="")}
        for question in plan_questions(sections(), facts, answers).questions:
            assert question.why
            assert not question.choices or question.choices[0].value == question.recommended
