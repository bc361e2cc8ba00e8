from dataclasses import MISSING, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from drivetrain_config import Flag, Prompt, flags, json_schema, markdown_table, questions
from drivetrain_config.settings.schema import flag_name


class Side(Enum):
    LEFT = "left"
    RIGHT = "right"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    size: int = field(default=1, metadata={"help": "items"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    data_path: Path = field(metadata={"help": "where the data stands"})
    mode: Literal["no", "bf16"] | None = field(default=None, metadata={"help": "what to compute in."})
    side: Side = field(default=Side.LEFT, metadata={"help": "a side"})
    shuffle: bool = field(default=True, metadata={"help": "50% | more"})
    verbose: bool | None = field(default=None, metadata={"help": "talk"})
    sizes: tuple[int, ...] = field(default=(), metadata={"help": "sizes in bytes"})
    pair: tuple[int, str] = field(default=(1, "a"), metadata={"help": "two"})
    inner: Inner = field(default_factory=Inner, metadata={"help": "more of it"})
    weights: dict[str, float] = field(default_factory=dict, metadata={"help": "by name"})
    api_key: str | None = field(default=None, metadata={"help": "the key", "secret": True})
    anything: Any = None
    derived: int = field(default=0, init=False)


FLAGS = {flag.field: flag for flag in flags(Settings, "probe")}
QUESTIONS = {question.field: question for question in questions(Settings, "probe")}


def test_flags_of_launch_and_run_are_bare_and_others_bear_their_section() -> None:
    assert flag_name("launch", "num_processes") == "--num-processes"
    assert flag_name("run", "cpu", negated=True) == "--no-cpu"
    assert flag_name("ddp", "static_graph") == "--ddp-static-graph"
    assert flag_name("ddp", "static_graph", negated=True) == "--no-ddp-static-graph"


def test_a_flag_says_all_a_parser_needs() -> None:
    assert FLAGS["mode"] == Flag(
        name="--probe-mode",
        section="probe",
        field="mode",
        is_switch=False,
        choices=("no", "bf16", "none"),
        help="what to compute in (default: not set)",
        metavar="MODE",
        brief="what to compute in",
    )
    assert FLAGS["side"].choices == ("left", "right")
    assert FLAGS["data_path"].help == "where the data stands (default: none, must be given)"


def test_a_bool_is_a_switch_with_a_negative_form() -> None:
    assert [name for name, flag in FLAGS.items() if flag.is_switch] == ["shuffle", "verbose"]
    assert FLAGS["shuffle"].help == "50% | more (default: true)"


def test_a_secret_has_no_flag_and_a_derived_field_none() -> None:
    assert {"api_key", "derived"}.isdisjoint(FLAGS)
    assert "derived" not in QUESTIONS


def test_a_question_says_all_a_wizard_needs() -> None:
    assert QUESTIONS["mode"] == Prompt(
        section="probe",
        field="mode",
        text="What to compute in?",
        default=None,
        choices=("no", "bf16", "none"),
        secret=False,
    )
    assert QUESTIONS["api_key"].secret
    assert QUESTIONS["data_path"].default is MISSING


def test_the_table_has_a_line_for_each_field() -> None:
    lines = markdown_table(Settings, "probe").splitlines()
    assert lines[0] == "| field | flag | type | default | what it does |"
    assert lines[2] == (
        "| `data_path` | `--probe-data-path` | a path | `none, must be given` | where the data stands |"
    )
    assert "| `shuffle` | `--probe-shuffle` | true or false | `true` | 50% &#124; more |" in lines
    assert "| `api_key` |  | text or null | `not set` | the key |" in lines
    assert len(lines) == 2 + 11


def test_a_secrets_default_is_shown_nowhere() -> None:
    @dataclass(frozen=True)
    class Login:
        password: str = field(default="hush", metadata={"secret": True, "help": "the word"})

    assert "hush" not in markdown_table(Login, "login")
    assert "hush" not in str(json_schema(Login, "login"))


def test_the_json_schema_says_what_a_file_may_hold() -> None:
    schema = json_schema(Settings, "probe")
    assert (schema["title"], schema["type"], schema["additionalProperties"]) == ("probe", "object", False)
    assert schema["required"] == ["data_path"]
    properties = schema["properties"]
    assert properties["data_path"] == {"type": "string", "description": "where the data stands"}
    assert properties["mode"]["anyOf"] == [{"enum": ["no", "bf16"]}, {"type": "null"}]
    assert properties["side"] == {"enum": ["left", "right"], "description": "a side", "default": "left"}
    assert properties["sizes"]["items"] == {"type": "integer"}
    assert properties["sizes"]["default"] == []
    assert properties["pair"]["prefixItems"] == [{"type": "integer"}, {"type": "string"}]
    assert properties["pair"]["minItems"] == properties["pair"]["maxItems"] == 2
    assert properties["inner"]["properties"]["size"]["default"] == 1
    assert properties["weights"]["additionalProperties"] == {"type": "number"}
    assert properties["anything"] == {"default": None}


@dataclass(frozen=True)
class Described:
    num_steps: int = field(default=3, metadata={"help": "Steps.", "brief": "Steps", "topic": "Pace"})
    ranks: tuple[int, ...] = field(default=(0, 8), metadata={"help": "Ranks.", "brief": "Ranks to show"})
    rate: float | None = field(default=None, metadata={"help": "Rate.", "brief": "Rate of it"})
    is_on: bool = field(default=True, metadata={"help": "Whether on.", "brief": "Leave it off"})
    trackers: tuple[str, ...] | None = field(default=None, metadata={"help": "Names.", "plugins": "x.y"})
    folder: Path | None = field(default=None, metadata={"help": "Folder."})
    either: int | str = field(default="a", metadata={"help": "Number or word."})


def test_a_brief_makes_a_line_of_a_short_help_with_its_default() -> None:
    found = {flag.field: flag for flag in flags(Described, "probe")}
    assert {name: (flag.brief, flag.topic) for name, flag in found.items() if flag.topic} == {
        "num_steps": ("Steps (default: 3)", "Pace"),
        "ranks": ("Ranks to show (default: 0,8)", "probe"),
        "rate": ("Rate of it", "probe"),
        "is_on": ("Leave it off", "probe"),
    }
    assert found["is_on"].is_on
    assert (found["either"].brief, found["either"].topic) == ("Number or word (default: a)", "")


def test_a_metavar_says_what_kind_of_value_it_is() -> None:
    found = {flag.field: flag.metavar for flag in flags(Described, "probe") if not flag.is_switch}
    assert found == {
        "num_steps": "N",
        "ranks": "N,...",
        "rate": "RATE",
        "trackers": "NAME,...",
        "folder": "PATH",
        "either": "EITHER",
    }
