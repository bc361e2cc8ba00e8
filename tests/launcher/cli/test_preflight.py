import ast
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cluster_jobs import slurm_job
from drivetrain_clusters.slurm.placement import slurm_placement
from drivetrain_config import ConfigError, Layers
from drivetrain_config.settings.schema import specs
from drivetrain_config.source import Entry, Kind, Source
from drivetrain_launcher import LaunchError, LaunchTarget
from drivetrain_launcher.cli.preflight import (
    check_bound_devices,
    check_device,
    check_given,
    check_launch,
    check_module,
    check_script,
    misplaced_flags,
)
from drivetrain_launcher.plan.resolved_launch import GivenSetting, ResolvedLaunch, resolve_launch

KNOWN = ("--num-processes", "--processes-per-node", "--backend")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--num-processes", "2"), ["--num-processes"]),
        (("--num_processes=2", "--num_processes=3"), ["--num_processes"]),
        (("--nproc_per_node", "2", "--lr", "1", "--backend", "fsdp"), ["--nproc_per_node", "--backend"]),
        (("--lr", "1", "num-processes", "--num-processes-x"), []),
        (("--", "--num-processes", "2"), []),
    ],
)
def test_flags_of_the_launcher_after_the_script_are_told_once(
    arguments: tuple[str, ...], told: list[str]
) -> None:
    script = "print(accelerator.num_processes, accelerator.backend)"
    assert misplaced_flags(arguments, KNOWN, script) == told


@pytest.mark.parametrize(
    "own", ["add_argument('--num_processes')", "'num-processes'", "num_processes: int", "(num_processes=1)"]
)
def test_a_flag_that_the_script_names_is_its_own(own: str) -> None:
    assert misplaced_flags(("--num-processes", "2"), KNOWN, own) == []


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    place: str = field(default="auto", metadata={"plugins": "drivetrain.clusters", "other_words": ("auto",)})
    places: tuple[str, ...] = field(default=(), metadata={"plugins": "drivetrain.clusters"})
    plain: str = "any"
    engine: Path | None = field(default=None, metadata={"json_file": True})


def given(**values: object) -> list[GivenSetting]:
    return [
        GivenSetting(spec=spec, value=values[spec.name], source=Source("file", "x.yaml:3"))
        for spec in specs(Settings, "probe")
        if spec.name in values
    ]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("zreo.json", None, "zreo.json: no such file; did you mean .*zero.json; from x.yaml:3"),
        ("bad.json", "{bad", "bad.json:1: cannot be read as JSON: Expecting property name"),
        ("list.json", "[1]", "list.json: must hold a JSON object; it holds a list"),
    ],
)
def test_a_file_that_is_missing_or_no_json_is_refused_before_ranks_start(
    tmp_path: Path, name: str, text: str | None, told: str
) -> None:
    (tmp_path / "zero.json").write_text('{"a": 1, "a": 2}')  # what it says is left to its reader
    if text is not None:
        (tmp_path / name).write_text(text)
    check_given(given(engine=tmp_path / "zero.json"), None)
    with pytest.raises(LaunchError, match=f"^probe.engine: .*{told}"):
        check_given(given(engine=tmp_path / name), None)


def check(script: str | None = None, **values: object) -> None:
    check_given(given(**values), script)


@pytest.mark.parametrize("script", ["print('trains')", None])
def test_a_misspelt_plugin_is_refused_with_its_source(script: str | None) -> None:
    message = r"probe.place='slrum': .*; did you mean slurm; say one of auto, .*; from x.yaml:3\."
    with pytest.raises(ConfigError, match=message):
        check(script, place="slrum")
    with pytest.raises(ConfigError, match=r"probe\.places='lcoal'"):
        check(script, place="slurm", places=("ray", "lcoal"))


def test_a_plugin_that_nothing_resembles_is_refused_where_the_script_does_not_contain_it() -> None:
    with pytest.raises(ConfigError, match=r"probe\.place='mine'"):
        check("print('trains')", place="mine")
    check("registry = register('mine', Mine)", place="mine")
    check(None, place="mine")  # a module, which may import what registers it


def test_only_given_fields_that_name_plugins_are_checked() -> None:
    check("", place="auto", places=("slurm", "local"), plain="slrum")
    check("")


def said(kind: Kind, cpu: bool, device: str, of_device: Kind | None = None) -> Layers:
    return Layers(
        {
            ("run", "cpu"): (Entry(cpu, Source(kind, "--cpu")),),
            ("state", "device"): (Entry(device, Source(of_device or kind, "--state-device")),),
        }
    )


def test_cpu_beside_another_device_names_both_with_their_sources() -> None:
    message = (
        "run.cpu=True (from --cpu on the command line) contradicts state.device='cuda' (from --state-device on the "
        "command line); keep one of the two"
    )
    with pytest.raises(LaunchError, match=re.escape(message)):
        check_device(said("command line", True, "cuda"))


def test_cpu_on_the_command_line_overrides_a_device_in_a_file() -> None:
    check_device(said("command line", True, "cuda", of_device="file"))
    check_device(said("command line", True, "cpu"))
    check_device(said("command line", False, "cuda"))
    check_device(Layers({}))


@pytest.mark.parametrize(
    ("tasks", "said", "source"),
    [
        ((1, 1), {"num_processes": "8"}, r"num_processes=8 from --num-processes on the command line, over 2 nodes"),
        ((1, 1), {"processes_per_node": "4"}, r"processes_per_node=4 from --processes-per-node on the command line"),
        ((4,), {}, r"SLURM_STEP_TASKS_PER_NODE=4"),
    ],
)  # fmt: skip
def test_more_processes_than_bound_accelerators_is_an_error_with_both_sources(
    tasks: tuple[int, ...], said: dict[str, str], source: str
) -> None:
    place = slurm_placement(slurm_job(tasks, CUDA_VISIBLE_DEVICES="0,1")[0])
    why = (
        rf"4 processes on this node \({source}\), but slurm bound this task to 2 .*, CUDA_VISIBLE_DEVICES=0,1"
    )
    with pytest.raises(LaunchError, match=why):
        check_bound_devices(resolve_launch(Layers.read(command_line={"launch": said}), placement=place))
    on_cpu = Layers.read(command_line={"launch": said, "state": {"device": "cpu"}})
    check_bound_devices(resolve_launch(on_cpu, placement=place))


@pytest.mark.parametrize("name", ["json.tool", "sys", "mine", "folder.inner", "mine.unknown"])
def test_a_module_that_is_installed_or_in_the_folder_passes(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')")
    (tmp_path / "folder").mkdir()
    check_module(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trian.run", "-m trian.run: there is no module trian in .*; did you mean train.run"),
        ("nothing_like_it", "there is no module nothing_like_it in .* nor one that is installed$"),
        ("train.py", "-m train.py: this is a script, not a module; leave out -m"),
        ("", "there is no module"),
    ],
)
def test_a_module_that_is_not_there_is_refused_with_the_nearest(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(LaunchError, match=message):
        check_module(name, tmp_path)


def test_a_folder_is_a_script_only_with_a_main_module(tmp_path: Path) -> None:
    with pytest.raises(
        LaunchError, match=r"a folder without __main__\.py; name the script in it, .*SCRIPT\.py"
    ):
        check_script(tmp_path)
    (tmp_path / "__main__.py").write_text("")
    check_script(tmp_path)


@pytest.mark.parametrize("through", [None, "runpy"])
def test_an_installed_package_may_refuse_a_script_that_runs_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through: str | None
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import other\n")
    said = {"launch": {"num_processes": "2", **({} if through is None else {"through": through})}}
    resolved = resolve_launch(Layers.read(command_line=said))

    class Point:
        def load(self) -> Callable[[ast.Module, ResolvedLaunch], str]:
            return lambda tree, asked: f"1: {ast.unparse(tree)} on {asked.launch.num_processes}"

    monkeypatch.setattr("drivetrain_launcher.cli.preflight.entry_points", lambda _group: (Point(),))
    refused = pytest.raises(LaunchError, match=r"train\.py:1: import other on 2$")
    with refused if through is None else nullcontext():
        check_launch(resolved, LaunchTarget(name=str(script)))
