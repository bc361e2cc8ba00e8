"""The meeting of all hosts' doctors, step by step; every host runs `meet`, and host 0 judges.

1. All hosts join the store; host 0 waits for missing hosts, and sends the roster.
2. Each host measures its clock against the clock of host 0.
3. Each host connects to a port of every other host, and looks for host 0's file in the folder of the checkpoints.
4. If the hosts reach each other, they measure their links over gloo, and over NCCL if all have NVIDIA GPUs.
5. Host 0 announces the end.
"""

import os
import socket
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.doctor_finding import CheckReport, Examination
from drivetrain_doctor.links.link_measurement import PairOrder, PairProgram, start_pairs
from drivetrain_doctor.links.link_results import GroupResult, PairResult, judge_hosts
from drivetrain_doctor.meeting.clock import ClockOffset, answer_hosts, ask_host_0, judge_clocks
from drivetrain_doctor.meeting.facts import host_label, judge_facts, own_facts
from drivetrain_doctor.meeting.meeting_store import HostMeeting, MeetingError, join
from drivetrain_doctor.meeting.reach import answer_connections, judge_reach, reach_all
from drivetrain_doctor.run_checks import within

_REACH_SECONDS = 10.0
_PAIR_SECONDS = 45.0
_SHOWN = 16
_START_SECONDS = 110.0
_MEETING_SECONDS = 600.0

Progress = Callable[[str], None]


def meet(
    checked: CheckedRun,
    alone: Examination,
    *,
    address: str | None,
    program: PairProgram,
    progress: Progress,
) -> Examination:
    """Meet the other hosts and check all together; return `alone`, this host's examination, with the new reports.

    `address` is this host's address on the way to host 0, if known. `program` measures pairs; it has no order yet.
    """
    ((_, reports),) = alone.hosts
    with answer_connections() as port:
        try:
            meeting = join(checked, progress=progress)
            own = {
                "label": host_label(meeting.rank, socket.gethostname(), address),
                "address": address or checked.master_addr,
                "port": port,
                "facts": own_facts(checked.environment),
                "reports": [report.as_data() for report in reports],
                "has_gpu": checked.accelerator == "cuda",
            }
            host = _Host(
                checked=checked, alone=alone, meeting=meeting, gloo_program=program, progress=progress
            )
            # If host 0 freezes, a call of the store has no limit of its own.
            limit = checked.wait_seconds + _MEETING_SECONDS
            return within(limit, lambda: host.take_part(own), name="doctor-meeting")
        except TimeoutError:
            failure = "the checks between hosts did not end: host 0 is frozen, or cut off"
        except MeetingError as error:
            failure = str(error)
    report = CheckReport("this host did not join", name="rendezvous")
    report.error(
        failure,
        why="this host cannot take part in a run",
        repair="start drivetrain doctor on all hosts with the same --num-nodes, --master-addr and --master-port; "
        f"nc -vz {checked.master_addr} {checked.master_port} tries the connection alone",
    )
    label = host_label(checked.node_rank or 0, socket.gethostname(), None)
    return replace(alone, hosts=((label, reports),), together=(report,), is_broken=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    """The part that this host plays in the meeting."""

    checked: CheckedRun
    alone: Examination
    meeting: HostMeeting
    gloo_program: PairProgram
    progress: Progress

    def take_part(self, own: Mapping[str, Any]) -> Examination:
        """Follow host 0, or lead as host 0."""
        meeting, rank = self.meeting, self.meeting.rank
        if meeting.claim() > 1:
            raise MeetingError(f"another host says --node-rank {rank} too; give each host its own")
        meeting.post("hello", own)
        if rank == 0:
            return self._lead()
        self.progress("joined; waiting for the other hosts")
        roster: dict[str, Any] = meeting.hear("roster", seconds=self.checked.wait_seconds)
        if rank not in roster["ranks"]:
            raise MeetingError(
                "this host came after host 0 had stopped waiting; start all within --wait-seconds"
            )
        meeting.post("clock", asdict(ask_host_0(meeting)))
        self.progress("connecting to the other hosts")
        meeting.post("reach", self._look_around(roster))
        for backend, ranks in meeting.hear("pairs", seconds=_REACH_SECONDS).items():
            if rank in ranks:
                self.progress(f"measuring {backend} between hosts")
                program = self._start_program(backend)
                linked = meeting.hear(f"linked/{backend}", seconds=_START_SECONDS)
                if rank in linked:
                    meeting.post(f"pairs/{backend}", measure_links(meeting, linked, backend, program))
        end = meeting.hear("end", seconds=_START_SECONDS + _PAIR_SECONDS * 3)
        meeting.post("bye", "")
        ((_, reports),) = self.alone.hosts
        hosts = ((roster["labels"][str(rank)], reports),)
        return replace(self.alone, hosts=hosts, is_broken=bool(end["is_broken"]), is_leader=False)

    def _lead(self) -> Examination:
        """Lead the meeting, and judge the answers of all hosts. Called on host 0."""
        meeting, checked = self.meeting, self.checked
        hello = meeting.collect(
            "hello",
            range(meeting.num_hosts),
            seconds=checked.wait_seconds,
            progress=lambda missing: self.progress(f"waiting for {list_hosts(missing)}"),
        )
        labels = {rank: str(told["label"]) for rank, told in sorted(hello.items())}
        roster = judge_roster(meeting.num_hosts, labels, checked)
        together = [replace(roster, name="rendezvous", seconds=round(meeting.seconds, 3))]
        if len(hello) > 1:
            together += self._check_together(hello, labels)
        hosts = tuple(
            (label, tuple(map(CheckReport.from_data, hello[rank]["reports"])))
            for rank, label in labels.items()
        )
        groups = (*(reports for _, reports in hosts), together)
        is_broken = any(report.state == "error" for reports in groups for report in reports)
        meeting.tell("end", {"is_broken": is_broken})
        meeting.collect("bye", [rank for rank in hello if rank], seconds=2.0)
        return replace(self.alone, hosts=hosts, together=tuple(together), is_broken=is_broken)

    def _check_together(self, hello: Mapping[int, Any], labels: Mapping[int, str]) -> Iterator[CheckReport]:
        checked, meeting = self.checked, self.meeting
        others = [rank for rank in sorted(hello) if rank]
        facts = {rank: told["facts"] for rank, told in hello.items()}
        yield replace(judge_facts(facts, labels), name="versions")
        with file_in(checked.folder) as token:
            roster = {
                "ranks": sorted(hello),
                "labels": {str(rank): label for rank, label in labels.items()},
                "places": {str(rank): [told["address"], told["port"]] for rank, told in hello.items()},
                "token": token,
            }
            meeting.tell("roster", roster)
            self.progress("comparing clocks")
            answer_hosts(meeting, others)
            clocks = meeting.collect("clock", others, seconds=_REACH_SECONDS)
            offsets = {rank: ClockOffset(**told) for rank, told in clocks.items()}
            yield replace(judge_clocks(offsets, labels), name="clocks")
            self.progress("connecting hosts to each other")
            meeting.post("reach", self._look_around(roster))
            around = meeting.collect("reach", sorted(hello), seconds=_REACH_SECONDS)
        silent = tuple(rank for rank in sorted(hello) if rank not in around)
        ways = {
            (rank, int(other)): how for rank, told in around.items() for other, how in told["reached"].items()
        }
        yield replace(judge_reach(ways, silent, labels), name="connections between hosts")
        sees = {rank: bool(told["sees_folder"]) for rank, told in around.items() if rank}
        folder = judge_folder(sees, labels, checked, is_writable=bool(token))
        yield replace(folder, name="common folder")
        is_open = all(how == "yes" for way, how in ways.items() if way[1] not in silent)
        linked = sorted(around) if is_open and len(around) > 1 else []
        backends = ["gloo", *(["nccl"] if linked and all(hello[rank]["has_gpu"] for rank in linked) else [])]
        meeting.tell("pairs", dict.fromkeys(backends, linked))
        for backend in backends:
            if linked:
                self.progress(f"measuring {backend} between {len(linked)} hosts")
                report = self._lead_links(linked, labels, backend)
            else:
                closed = "a host does not answer, or hosts cannot connect"
                report = CheckReport(closed, is_skipped=True)
            yield replace(report, name=f"{backend} between hosts")

    def _lead_links(self, linked: Sequence[int], labels: Mapping[int, str], backend: str) -> CheckReport:
        meeting = self.meeting
        program = self._start_program(backend)
        # A host that is slow to import torch must not use up the time of the others.
        ready = sorted(meeting.collect(f"ready/{backend}", linked, seconds=_START_SECONDS))
        meeting.tell(f"linked/{backend}", ready)
        meeting.post(f"pairs/{backend}", measure_links(meeting, ready, backend, program))
        told = meeting.collect(f"pairs/{backend}", ready, seconds=_REACH_SECONDS)
        report = judge_hosts(merge(backend, told, ready), [labels[rank] for rank in ready])
        if late := [rank for rank in linked if rank not in ready]:
            report.error(
                f"{list_hosts(late)} took more than {_START_SECONDS:g} s to import torch, and did not take part",
                why="a run's ranks wait for the last one to start",
                repair="find what takes the time there: python -X importtime -c 'import torch'; an environment on a "
                "busy file server is the usual reason",
            )
        return report

    def _start_program(self, backend: str) -> PairProgram:
        """Return a program that measures pairs after it has imported torch, and tell host 0."""
        program = self.gloo_program if backend == "gloo" else start_pairs(self.checked.environment)
        program.wait_until_ready()
        self.meeting.post(f"ready/{backend}", "")
        return program

    def _look_around(self, roster: Mapping[str, Any]) -> dict[str, Any]:
        """Connect to every other host, and look for host 0's file."""
        places = {int(other): (place[0], int(place[1])) for other, place in roster["places"].items()}
        del places[self.meeting.rank]
        token = str(roster["token"])
        return {
            "reached": reach_all(places),
            "sees_folder": bool(token) and (self.checked.folder / token).exists(),
        }


def judge_roster(num_hosts: int, labels: Mapping[int, str], checked: CheckedRun) -> CheckReport:
    """Name the hosts that did not join."""
    missing = [rank for rank in range(num_hosts) if rank not in labels]
    report = CheckReport(
        f"{len(labels)} of {num_hosts} hosts joined at {checked.master_addr}:{checked.master_port}"
    )
    if missing:
        report.error(
            f"{list_hosts(missing)} did not join within {checked.wait_seconds:g} s",
            why="a run waits for all of its hosts until --rdzv-timeout-seconds, and then fails",
            repair="start drivetrain doctor there with the same flags and its own --node-rank; its output says why "
            f"it cannot connect to {checked.master_addr}:{checked.master_port}",
            missing=", ".join(map(str, missing)),
        )
    return report


def list_hosts(ranks: Sequence[int]) -> str:
    """Return a phrase with the ranks of hosts; of many hosts, only the first are listed."""
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"host {shown}" if len(ranks) == 1 else f"hosts {shown}"


@contextmanager
def file_in(folder: Path) -> Generator[str]:
    """Create a file in a folder for the block, and yield its name; empty if the folder refuses the file."""
    file = folder / f".drivetrain-doctor-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        file.touch()
    except OSError:
        yield ""
        return
    try:
        yield file.name
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def judge_folder(
    sees: Mapping[int, bool], labels: Mapping[int, str], checked: CheckedRun, *, is_writable: bool
) -> CheckReport:
    """Name the hosts that do not see host 0's file in the folder of the checkpoints."""
    if not is_writable:
        return CheckReport(f"host 0 cannot write into {checked.folder.absolute()}", is_skipped=True)
    blind = [rank for rank, does in sorted(sees.items()) if not does]
    report = CheckReport(
        f"{len(sees) - len(blind) + 1} of {len(sees) + 1} hosts share {checked.folder.absolute()}"
    )
    if blind:
        who = ", ".join(labels[rank] for rank in blind[:_SHOWN])
        report.warning(
            f"the folder {checked.folder} of host 0 does not exist on {who}",
            why="all hosts write a sharded checkpoint into one folder; without it, saving fails, or each host keeps "
            "its part",
            repair="name a folder on a file system that all hosts mount (--folder), or a URL of an object store; NFS "
            "may show new files late: mount it with actimeo=1",
        )
    return report


def measure_links(
    meeting: HostMeeting, ranks: Sequence[int], backend: str, program: PairProgram
) -> dict[str, Any]:
    """Measure the pairs with this host as lower rank, and close the program. Called on all `ranks`."""
    order = PairOrder(
        backend=backend,
        world_size=len(ranks),
        ranks=[ranks.index(meeting.rank)],
        store_host=meeting.store.host,
        store_port=meeting.store.port,
        limit_seconds=_PAIR_SECONDS,
    )
    with program:
        return asdict(program.measure(order))


def merge(backend: str, told: Mapping[int, Mapping[str, Any]], linked: Sequence[int]) -> GroupResult:
    """Merge the measurements of each host's pairs, which are plain data by rank.

    `linked` lists the hosts in the order of their ranks in the group.
    """
    failures: dict[int, str] = {}
    pairs: list[PairResult] = []
    unfinished: list[tuple[int, int]] = []
    for index, rank in enumerate(linked):
        if rank not in told:
            failures[index] = "sent no results in time"
            continue
        failures |= {int(each): text for each, text in told[rank]["failures"].items()}
        pairs += [PairResult(**pair) for pair in told[rank]["pairs"]]
        unfinished += [(pair[0], pair[1]) for pair in told[rank]["unfinished"]]
    return GroupResult(backend=backend, pairs=tuple(pairs), unfinished=tuple(unfinished), failures=failures)
