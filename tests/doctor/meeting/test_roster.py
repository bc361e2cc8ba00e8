from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.meeting.conduct import judge_roster, list_hosts

ASKED = CheckedRun(num_nodes=4, node_rank=0, master_addr="node0", master_port=29500, wait_seconds=5)


def test_hosts_that_did_not_come_are_named_with_the_time() -> None:
    (finding,) = judge_roster(4, {0: "a", 2: "c"}, ASKED).findings
    assert (finding.severity, finding.what) == ("error", "hosts 1, 3 did not come within 5 s")
    assert "its own --node-rank" in finding.mend


def test_all_hosts_came() -> None:
    verdict = judge_roster(2, {0: "a", 1: "b"}, ASKED)
    assert (verdict.findings, verdict.summary) == ((), "2 of 2 hosts at node0:29500")


def test_many_hosts_are_cut_short() -> None:
    assert list_hosts([3]) == "host 3"
    assert list_hosts(range(1000)).endswith("14, 15, ...")
