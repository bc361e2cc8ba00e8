from dataclasses import MISSING
from pathlib import Path
from shlex import split
from typing import Any, get_args

from hypothesis import given
from hypothesis import strategies as st

from drivetrain_config import Layers, resolve, sections
from drivetrain_config.files.settings_file import read_file
from drivetrain_config.settings.schema import FieldSpec, specs
from drivetrain_config.values.kinds import choices, members, plain
from drivetrain_launcher import LaunchSettings
from drivetrain_launcher.cli.main import main
from drivetrain_launcher.wizard.questionnaire import GivenAnswer
from drivetrain_launcher.wizard.settings_text import launch_line, settings_text

TEXT = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1)
SPECS = [spec for name, kind in sections().items() for spec in specs(kind, name) if not spec.secret]


def values(spec: FieldSpec) -> st.SearchStrategy[Any]:
    """Any value of a field's type, whatever its section says of it."""
    if (known := choices(spec.kind)) is not None:
        return st.sampled_from(known)
    plain_kinds = {
        bool: st.booleans(),
        int: st.integers(),
        float: st.floats(),
        str: TEXT,
        Path: TEXT.map(Path),
    }
    found = [plain_kinds[kind] for kind in members(spec.kind) if kind in plain_kinds]
    if not found:
        item = [each for each in get_args(members(spec.kind)[0]) if each in plain_kinds]
        found = [st.lists(st.one_of([plain_kinds[each] for each in item or [str]])).map(tuple)]
    return st.one_of(found)


@given(data=st.data())
def test_what_is_written_is_read_back(data: st.DataObject, tmp_path_factory: Any) -> None:
    chosen = data.draw(
        st.lists(st.sampled_from(SPECS), max_size=8, unique_by=lambda spec: (spec.section, spec.name))
    )
    answers = {
        (spec.section, spec.name): GivenAnswer(value=data.draw(values(spec)), why=data.draw(TEXT))
        for spec in chosen
    }
    path = tmp_path_factory.mktemp("written") / "drivetrain.yaml"
    path.write_text(settings_text(answers, sections(), heading=["A heading."]), encoding="utf-8")
    found = read_file(path).data
    read = {(section, name): value for section, of in found.items() for name, value in (of or {}).items()}
    assert read.keys() == answers.keys()
    for key, answer in answers.items():
        assert repr(read[key]) == repr(plain(answer.value))


def test_every_setting_has_its_help_and_its_reason() -> None:
    answers = {("run", "mixed_precision"): GivenAnswer(value="bf16", why="the device computes in it")}
    text = settings_text(answers, sections())
    assert "  # Precision of forward and backward: no" in text
    assert "  # Why: the device computes in it.\n  mixed_precision: bf16\n" in text


def test_an_unset_value_is_a_comment_and_the_file_stays_valid(tmp_path: Path) -> None:
    path = tmp_path / "drivetrain.yaml"
    path.write_text(
        settings_text({("launch", "num_processes"): GivenAnswer(value=None, why="it is open")}, sections())
    )
    assert "# num_processes:" in path.read_text()
    assert Layers.read(file=path).entries == {}


def test_the_launch_line_gives_the_same_settings(tmp_path: Path, capsys: Any) -> None:
    answers = {
        ("launch", "num_processes"): GivenAnswer(value=2, why=""),
        ("run", "cpu"): GivenAnswer(value=True, why=""),
        ("run", "log_with"): GivenAnswer(value=("jsonl", "wandb"), why=""),
        ("run", "project_dir"): GivenAnswer(value=Path("my runs"), why=""),
        ("ddp", "broadcast_buffers"): GivenAnswer(value=False, why=""),
        ("run", "seed"): GivenAnswer(value=None, why=""),
    }
    line = launch_line(answers, sections(), command="drivetrain launch")
    assert line == (
        "drivetrain launch --num-processes 2 --cpu --project-dir 'my runs' --log-with jsonl,wandb "
        "--no-ddp-broadcast-buffers train.py"
    )
    assert main(["config", "show", "--no-defaults", "--config", "none", *split(line)[2:-1]]) == 0
    shown = tmp_path / "shown.yaml"
    shown.write_text(capsys.readouterr().out)
    layers = Layers.read(file=shown)
    assert resolve(LaunchSettings, section="launch", layers=layers).value.num_processes == 2
    for (section, name), answer in answers.items():
        default = next(spec.default for spec in SPECS if (spec.section, spec.name) == (section, name))
        value = layers.entries[section, name][0].value if answer.value != default else plain(default)
        assert value == plain(answer.value)
        assert default is not MISSING
