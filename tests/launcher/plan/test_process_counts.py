from pathlib import Path

import pytest

from drivetrain_config import Layers, environ
from drivetrain_launcher.plan.process_counts import settle_process_counts


def said(layers: Layers) -> set[str]:
    return {field for section, field in layers.entries if section == "launch"}


@pytest.mark.parametrize(
    ("weaker", "stronger"), [("num_processes", "processes_per_node"), ("processes_per_node", "num_processes")]
)
def test_a_stronger_layer_beats_both_ways_to_say_a_number(tmp_path: Path, weaker: str, stronger: str) -> None:
    file = tmp_path / "drivetrain.yaml"
    file.write_text(f"launch: {{{weaker}: 1, num_nodes: 1}}\n")
    by_flag = Layers.read(file=file, command_line={"launch": {stronger: "2"}})
    assert said(settle_process_counts(by_flag)) == {stronger, "num_nodes"}
    assert settle_process_counts(by_flag).file == by_flag.file
    with environ.exported(**{environ.override_name("launch", stronger): "2"}):
        assert said(settle_process_counts(Layers.read(file=file))) == {stronger, "num_nodes"}


def test_numbers_of_one_layer_stay_to_be_compared() -> None:
    both = Layers.read(command_line={"launch": {"num_processes": "4", "processes_per_node": "2"}})
    assert said(settle_process_counts(both)) == {"num_processes", "processes_per_node"}
    one = Layers.read(command_line={"launch": {"num_processes": "4"}})
    assert settle_process_counts(one) is one
