import os
import subprocess
import sys

import pytest

from drivetrain_config import ConfigError, RankEnvironment, environ

TORCHRUN = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "night",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
RANKS = RankEnvironment(
    rank=5, local_rank=1, world_size=8, local_world_size=4, node_rank=1, num_nodes=2, master_addr="node0",
    master_port=29500, run_id="night", agent_store=True, restart_count=2,
)  # fmt: skip


def test_a_process_that_nobody_launched_has_no_ranks_also_with_a_clusters_address() -> None:
    assert environ.launched() is None
    with environ.exported(MASTER_ADDR="node0", MASTER_PORT="29500"):
        assert environ.launched() is None


def test_torchruns_variables_are_read() -> None:
    with environ.exported(**TORCHRUN):
        assert environ.launched() == RANKS


def test_nodes_follow_from_the_ranks_where_the_launcher_counts_none() -> None:
    own = dict.fromkeys(
        ["GROUP_RANK", "GROUP_WORLD_SIZE", *(n for n in TORCHRUN if n.startswith("TORCHELASTIC"))]
    )
    with environ.exported(**(TORCHRUN | own)):
        found = environ.launched()
    assert found is not None
    assert (found.node_rank, found.num_nodes) == (1, 2)
    assert (found.run_id, found.agent_store, found.restart_count) == ("none", False, 0)


@pytest.mark.parametrize(
    "missing", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
)
def test_variables_set_in_part_are_an_error_that_names_what_is_missing(missing: str) -> None:
    with environ.exported(**(TORCHRUN | {missing: None})):
        with pytest.raises(
            ConfigError, match=f"set in part: .* but not {missing}; start with `drivetrain launch`"
        ):
            environ.launched()


def test_a_single_process_needs_no_size_of_its_node() -> None:
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    with environ.exported(**one):
        found = environ.launched()
    assert found is not None
    assert (found.local_world_size, found.num_nodes, found.node_rank) == (1, 1, 0)


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"])
@pytest.mark.parametrize("text", ["", "two", "1.0"])
def test_a_rank_that_is_no_integer_is_named(name: str, text: str) -> None:
    with environ.exported(**(TORCHRUN | {name: text})):
        with pytest.raises(ConfigError, match=f"^{name}='{text}' in the environment: must be an integer"):
            environ.launched()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("RANK", "8", r"^RANK=8 in the environment: must be at least 0 and below WORLD_SIZE \(8\)"),
        ("RANK", "-1", "^RANK=-1 in the environment"),
        ("LOCAL_RANK", "4", r"^LOCAL_RANK=4 .* below LOCAL_WORLD_SIZE \(4\)"),
        ("GROUP_RANK", "2", r"^GROUP_RANK=2 .* below GROUP_WORLD_SIZE \(2\)"),
        ("LOCAL_WORLD_SIZE", "9", "^LOCAL_WORLD_SIZE=9 in the environment"),
        ("MASTER_PORT", "70000", "^MASTER_PORT=70000 .* at least 0 and below 65536"),
    ],
)
def test_numbers_that_do_not_fit_together_are_an_error(name: str, text: str, message: str) -> None:
    with environ.exported(**(TORCHRUN | {name: text})):
        with pytest.raises(ConfigError, match=message):
            environ.launched()


def test_exported_variables_are_set_inside_and_restored_after() -> None:
    with environ.exported(DRIVETRAIN_A="outer", DRIVETRAIN_B=None):
        with environ.exported(DRIVETRAIN_A=None, DRIVETRAIN_B="inner"):
            assert (environ.read("DRIVETRAIN_A"), environ.read("DRIVETRAIN_B")) == (None, "inner")
        assert (environ.read("DRIVETRAIN_A"), environ.read("DRIVETRAIN_B")) == ("outer", None)
    assert environ.read("DRIVETRAIN_A") is None


@pytest.mark.parametrize(
    ("value", "message"),
    [("2", "inside"), ("a\0b", "null")],
    ids=["an error inside", "a value that cannot be set"],
)
def test_exported_variables_are_restored_after_an_exception(value: str, message: str) -> None:
    before = dict(os.environ)
    with (
        pytest.raises((RuntimeError, ValueError), match=message),
        environ.exported(DRIVETRAIN_A="1", PATH=None, DRIVETRAIN_B=value),
    ):
        raise RuntimeError("inside")
    assert dict(os.environ) == before


def test_a_childs_environment_is_a_copy_with_changes() -> None:
    with environ.exported(DRIVETRAIN_A="1", DRIVETRAIN_B="2"):
        found = environ.child_environment(DRIVETRAIN_A="3", DRIVETRAIN_B=None)
        assert found["DRIVETRAIN_A"] == "3"
        assert "DRIVETRAIN_B" not in found
        assert environ.read("DRIVETRAIN_A") == "1"


def test_overrides_are_our_variables_but_for_the_one_handed_down() -> None:
    with environ.exported(DRIVETRAIN_RUN__SEED="1", DRIVETRAIN_OTHER="2", DRIVETRAIN_CONFIG="[]"):
        assert environ.overrides() == {"DRIVETRAIN_OTHER": "2", "DRIVETRAIN_RUN__SEED": "1"}
        assert environ.handed_down() == "[]"


def test_the_variable_of_a_field_is_derived_from_its_names() -> None:
    assert environ.override_name("run", "mixed_precision") == "DRIVETRAIN_RUN__MIXED_PRECISION"


def test_put_lasts_until_it_is_taken_back() -> None:
    with environ.exported(DRIVETRAIN_TEST_PUT=None):
        environ.put(DRIVETRAIN_TEST_PUT="1")
        assert environ.read("DRIVETRAIN_TEST_PUT") == "1"
        environ.put(DRIVETRAIN_TEST_PUT=None)
        assert environ.read("DRIVETRAIN_TEST_PUT") is None


ASK = "from drivetrain_config import environ; print(environ.inherited_from())"


def test_a_child_of_the_only_rank_may_be_that_rank() -> None:
    with environ.exported(**{**TORCHRUN, "WORLD_SIZE": "1"}, DRIVETRAIN_RANK_OWNER=None):
        environ.own_rank()
        assert subprocess.check_output([sys.executable, "-c", ASK], text=True) == "None\n"


def test_a_process_that_inherits_a_rank_knows_whose_it_is() -> None:
    with environ.exported(**TORCHRUN, DRIVETRAIN_RANK_OWNER=None):
        assert (
            environ.inherited_from() is None
        )  # whoever comes first may be the rank, such as a wrapper's child
        environ.own_rank()
        assert environ.inherited_from() is None
        assert "DRIVETRAIN_RANK_OWNER" not in environ.overrides()
        found = {
            "child": [sys.executable, "-c", ASK],
            "grandchild": ["sh", "-c", f"{sys.executable} -c '{ASK}'; true"],
            "of another launch": ["env", "MASTER_PORT=29501", sys.executable, "-c", ASK],
            "of another attempt": ["env", "TORCHELASTIC_RESTART_COUNT=3", sys.executable, "-c", ASK],
        }
        output = {name: subprocess.check_output(command, text=True) for name, command in found.items()}
    mine = f"{os.getpid()}\n"
    assert list(output.values()) == [mine, mine, "None\n", "None\n"]
