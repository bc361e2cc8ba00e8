import pytest

from drivetrain_doctor.doctor_finding import CheckReport, DoctorFinding, Examination
from drivetrain_doctor.report.table import merge_hosts, table

FINE = CheckReport(name="limits", summary="20,000 open files")
SKIPPED = CheckReport(name="GPU driver", summary="no NVIDIA or AMD driver is loaded", is_skipped=True)
BROKEN = CheckReport(
    name="port",
    summary="port 29500",
    findings=[
        DoctorFinding(
            severity="error",
            what="port 29500 is in use",
            why="the store cannot listen",
            repair="say --master-port 29501",
        )
    ],
)


def slow(rate: str) -> CheckReport:
    finding = DoctorFinding(
        severity="warning", what=f"/data takes {rate} MB/s", why=f"{rate} is little", repair="a faster disk"
    )
    return CheckReport(name="disk", summary=rate, findings=[finding])


def test_findings_stand_below_their_check_with_their_repair() -> None:
    shown = table(
        Examination(
            num_nodes=1, num_processes=2, hosts=(("this host", (FINE, SKIPPED, BROKEN)),), seconds=2.14
        ),
        is_coloured=False,
    )
    assert shown.splitlines() == [
        "drivetrain doctor: 1 host, 2 processes, 2.1 s",
        "",
        "ok       limits      20,000 open files",
        "skipped  GPU driver  no NVIDIA or AMD driver is loaded",
        "error    port        port 29500",
        "         error: port 29500 is in use",
        "           why:    the store cannot listen",
        "           repair: say --master-port 29501",
        "",
        "1 error, 0 warnings, 1 skipped: a run will break",
    ]


def test_hosts_that_differ_in_a_number_alone_share_a_finding_and_others_are_named() -> None:
    (row,) = merge_hosts([("host 0", (slow("10"),)), ("host 1", (slow("12.5"),)), ("host 2", ())])
    ((finding, hosts),) = row.findings
    assert (finding.what, hosts, row.state) == ("/data takes 10 MB/s", ("host 0", "host 1"), "warning")


def test_findings_of_one_host_that_differ_in_a_number_stay_apart() -> None:
    report = CheckReport("2 devices", name="GPU driver")
    for device in range(2):
        report.warning(f"other processes hold 60% of the memory of GPU {device}", why="why", repair="repair")
    (row,) = merge_hosts([("host 0", (report,)), ("host 1", ())])
    assert [(finding.what[-5:], hosts) for finding, hosts in row.findings] == [
        ("GPU 0", ("host 0",)),
        ("GPU 1", ("host 0",)),
    ]


@pytest.mark.parametrize(
    ("second", "named"),
    [(BROKEN, ""), (CheckReport(name="port", summary="port 29500"), " [host 0 (a)]")],
    ids=["of all hosts", "of one host"],
)
def test_a_finding_names_its_hosts_unless_all_have_it(second: CheckReport, named: str) -> None:
    hosts = (("host 0 (a)", (BROKEN,)), ("host 1 (b)", (second,)))
    shown = table(Examination(num_nodes=2, num_processes=2, hosts=hosts), is_coloured=False)
    assert shown.count(f"error: port 29500 is in use{named}\n") == 1


def test_long_texts_are_wrapped_at_the_terminals_width_and_coloured_there() -> None:
    long = CheckReport(
        name="x",
        summary="word " * 60,
        findings=[DoctorFinding(severity="warning", what="a " * 80, why="b " * 80, repair="c " * 80)],
    )
    examination = Examination(num_nodes=1, num_processes=1, hosts=(("this host", (long,)),))
    assert max(map(len, table(examination, is_coloured=False, width=80).splitlines())) <= 80
    assert "\x1b[33mwarning" in table(examination, is_coloured=True)
    assert "\x1b" not in table(examination, is_coloured=False)
