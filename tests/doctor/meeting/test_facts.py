import pytest

from drivetrain_doctor.meeting.facts import host_label, judge_facts, own_facts

NAMES = {0: "host 0 (a)", 1: "host 1 (b)", 2: "host 2 (c)"}
SAME = {"python": "3.11.7", "torch": "2.13.0", "drivetrain-state": "0.1.0"}


def whats(*facts: dict[str, str]) -> list[tuple[str, str]]:
    return [(each.severity, each.what) for each in judge_facts(dict(enumerate(facts)), NAMES).findings]


def test_hosts_that_agree() -> None:
    report = judge_facts({0: SAME, 1: SAME}, NAMES)
    assert report.findings == []
    assert report.summary == "2 hosts agree on 3 versions and variables (Python 3.11.7)"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (
            {"torch": "2.12.0"},
            ("error", "torch differs: 2.12.0 on host 1 (b); 2.13.0 on 2 hosts"),
        ),
        (
            {"python": "3.11.9"},
            ("warning", "python differs: 3.11.9 on host 1 (b); 3.11.7 on 2 hosts"),
        ),
        (
            {"python": "3.12.1"},
            ("error", "python differs: 3.12.1 on host 1 (b); 3.11.7 on 2 hosts"),
        ),
        (
            {"NCCL_ALGO": "Tree"},
            ("warning", "NCCL_ALGO differs: Tree on host 1 (b); none on 2 hosts"),
        ),
    ],
)
def test_the_host_that_differs_from_most_is_named(changes: dict[str, str], found: tuple[str, str]) -> None:
    assert whats(SAME, {**SAME, **changes}, SAME) == [found]


def test_of_two_hosts_both_are_named() -> None:
    assert whats(SAME, {**SAME, "drivetrain-state": "0.2.0"}) == [
        ("warning", "drivetrain-state differs: 0.2.0 on host 1 (b); 0.1.0 on host 0 (a)")
    ]


def test_own_facts_have_versions_and_no_names_of_interfaces() -> None:
    facts = own_facts({"NCCL_ALGO": "Ring", "NCCL_SOCKET_IFNAME": "eth0", "HOME": "/root"})
    assert facts["NCCL_ALGO"] == "Ring"
    assert {"python", "torch", "drivetrain-launcher"} <= set(facts)
    assert not {"NCCL_SOCKET_IFNAME", "HOME"} & set(facts)


def test_labels() -> None:
    assert host_label(1, "node1", "10.0.0.2") == "host 1 (node1, 10.0.0.2)"
    assert host_label(0, "node0", None) == "host 0 (node0)"
