from dataclasses import dataclass, fields

import pytest

from drivetrain_messages import argument


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arguments:
    folder: str = argument(..., "Folder to read.", positional=True)
    ranks: tuple[int, ...] = argument((), "Ranks to show.", repeated=True)
    on: str = argument("auto", "Cluster to use.", plugins="drivetrain.clusters", brief="Cluster")


def test_an_argument_is_a_field_with_its_help_and_its_form():
    folder, ranks, on = fields(_Arguments)

    assert (folder.metadata["help"], folder.metadata["positional"]) == ("Folder to read.", True)
    assert (ranks.metadata["repeated"], ranks.metadata["positional"]) == (True, False)
    assert (on.metadata["plugins"], on.metadata["brief"]) == ("drivetrain.clusters", "Cluster")


def test_an_argument_without_a_default_must_be_given():
    assert _Arguments(folder="runs") == _Arguments(folder="runs", ranks=(), on="auto")
    with pytest.raises(TypeError, match="folder"):
        _Arguments()
