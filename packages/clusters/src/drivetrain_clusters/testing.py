"""The contract that every cluster must pass.

A cluster's test subclasses `ClusterContract`, implements `make`, `jobs` and `request`, and calls `check_all` with an
empty directory.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.jobs.record import write_private
from drivetrain_clusters.protocol import Cluster, JobPlacement, JobRequest, Submission

# Words that a shell would act on, if it ever read them.
HOSTILE = (
    "$(touch owned)",
    "`touch owned`",
    "; touch owned",
    "a && touch owned",
    "| touch owned",
    "> owned",
    'it\'s "quoted" \\',
    "two  spaces",
    "*",
    "~",
    "-n",
    "#x",
    "%j",
    "${HOME}",
    "!!",
    "new\nline",
    "",
)
# What all tasks of a job state alike.
_AGREED = ("job_id", "num_nodes", "num_tasks", "master_addr", "master_port", "hosts", "cluster")
Environment = Mapping[str, str]


class ClusterContract(ABC):
    """A set of checks that every cluster must pass; a failed check raises an AssertionError that explains it."""

    runs_jobs = False  # jobs can really be submitted here; otherwise two checks do nothing

    @abstractmethod
    def make(self) -> Cluster:
        """Return a new cluster."""

    @abstractmethod
    def jobs(self) -> Sequence[Sequence[Environment]]:
        """Return several jobs, each as the environments of all of its tasks, in the order of their ranks."""

    @abstractmethod
    def request(self, directory: Path) -> JobRequest | None:
        """Return a job with the folder `directory`; None if the cluster submits nothing. The job need not run."""

    def words(self, submission: Submission) -> tuple[str, ...] | None:
        """Return the command that the job runs, as its machines will read it; None if they are unknown.

        For a script, these are the last words that a shell would read from it.
        """
        del submission
        return None

    def check_all(self, directory: Path) -> list[str]:
        """Run every check, and return their names; an AssertionError says what the cluster must do."""
        for check in self.checks:
            check(directory)
        return [check.__name__ for check in self.checks]

    @property
    def checks(self) -> Sequence[Callable[[Path], None]]:
        """All checks, each of which takes an empty directory."""
        names = [name for name in vars(ClusterContract) if name.startswith("check_") and name != "check_all"]
        return [getattr(self, name) for name in names]

    def check_other_processes_are_in_no_job(self, _: Path) -> None:
        """Check that a process outside any job has no place."""
        for environment in ({}, {"PATH": "/usr/bin", "HOME": "/root", "LANG": "C.UTF-8"}):
            place = self.make().placement(environment)
            assert place is None, f"placement({environment}) must be None outside any job, not {place}"

    def check_tasks_agree_on_their_job(self, _: Path) -> None:
        """Check that all tasks of a job state the same job, nodes and meeting point."""
        for places in self._places():
            for name in _AGREED:
                found = {getattr(place, name) for place in places}
                assert len(found) == 1, f"all tasks of a job must state the same {name}, not {found}"
            assert len(places) == places[0].num_tasks, (
                f"{len(places)} tasks of a job state num_tasks={places[0].num_tasks}"
            )
            assert 0 < places[0].master_port < 2**16, f"master_port={places[0].master_port} is no port"

    def check_tasks_have_places_of_their_own(self, _: Path) -> None:
        """Check that ranks count all tasks from 0, and local indices the tasks of each node."""
        for places in self._places():
            ranks = sorted(place.task_rank for place in places)
            assert ranks == list(range(len(places))), f"the ranks of {len(places)} tasks are {ranks}"
            for node in range(places[0].num_nodes):
                here = [place for place in places if place.node_rank == node]
                local = sorted(place.local_task for place in here)
                assert local == list(range(len(here))), f"the tasks of node {node} have the indices {local}"
                counts = {place.tasks_per_node for place in here}
                assert counts == {len(here)}, (
                    f"{len(here)} tasks of node {node} state tasks_per_node={counts}"
                )

    def check_placement_is_pure(self, _: Path) -> None:
        """Check that the same environment gives the same place, and is left unchanged."""
        for environment in self._environments():
            frozen = MappingProxyType(dict(environment))
            first, second = self.make().placement(frozen), self.make().placement(frozen)
            assert first == second, f"placement must depend on its argument alone: {first} is not {second}"

    def check_sources_are_variables(self, _: Path) -> None:
        """Check that each source belongs to a field of the place."""
        for environment in self._environments():
            place = self._place(environment)
            for name, source in place.sources.items():
                assert hasattr(place, name), f"sources names {name}, which a placement does not have"
                assert source, f"the source of {name} is empty"

    def check_no_variable_is_missing_unnoticed(self, _: Path) -> None:
        """Check that a task that lacks a variable has no job, a valid place, or an error with a variable's name."""
        for environment in self._environments():
            for missing in environment:
                rest = {name: text for name, text in environment.items() if name != missing}
                place, told = None, None
                try:
                    place = self.make().placement(rest)
                except ClusterError as error:
                    told = str(error)
                assert told is None or any(name in told for name in environment), (
                    f"the error without {missing} names no variable: {told}"
                )
                assert place is None or 0 <= place.task_rank < place.num_tasks, (
                    f"without {missing}, a task has the place {place}"
                )

    def check_a_plan_writes_nothing(self, directory: Path) -> None:
        """Check that a plan is pure: the same request gives the same submission, and nothing is written."""
        request = self.request(directory)
        if request is None:
            return
        first, second = self.make().plan(request), self.make().plan(request)
        assert (first.files, first.command) == (second.files, second.command), (
            "plan must depend on the request alone"
        )
        assert first.files or first.command, "a submission has files, a command, or both"
        assert not any(directory.iterdir()), f"plan must write nothing, but {[*directory.iterdir()]} appeared"

    def check_hostile_words_stay_words(self, directory: Path) -> None:
        """Check that words with shell characters reach the job unchanged."""
        request = self.request(directory)
        if request is None:
            return
        command = (*request.command, *HOSTILE)
        submission = self.make().plan(replace(request, command=command, name="a; touch owned"))
        found = self.words(submission)
        words = command[1:]  # a cluster may name another program in place of `drivetrain`
        assert found is None or found[-len(words) :] == words, f"{command} became {found}"
        assert all("touch owned" not in str(path) for path in submission.files), (
            "a name became part of a path as it is"
        )

    def check_unknown_options_are_refused(self, directory: Path) -> None:
        """Check that the error for an unknown option names it."""
        request = self.request(directory)
        if request is None:
            return
        told = ""
        try:
            self.make().plan(replace(request, options={"no-such-option": "1"}))
        except ClusterError as error:
            told = str(error)
        assert "no-such-option" in told, (
            f"plan must refuse the option no-such-option by its name, but said {told!r}"
        )

    def check_ids_of_no_job_are_refused(self, _: Path) -> None:
        """Check that `cancel` refuses a text that cannot be the id of a job."""
        made = Path("owned")  # where a shell would run
        for job_id in ("", "-1", "; touch owned", "$(touch owned)", "../1"):
            try:
                self.make().cancel(job_id)
            except ClusterError:
                continue
            raise AssertionError(f"cancel({job_id!r}) must raise ClusterError, since no job has this id")
        assert not made.exists(), "an id reached a shell"

    def check_a_job_is_followed_to_its_exit_code(self, directory: Path) -> None:
        """Check that `follow` writes a job's output and returns its exit code; no ended job can be cancelled."""
        submission = self._live(directory, "print('all', 'of', 'it'); raise SystemExit(7)")
        if submission is None:
            return
        job_id, written = self.make().submit(submission), list[str]()
        code = self.make().follow(job_id, submission, written.append)
        assert "all of it\n" in "".join(written), f"follow must write the job's output, but wrote {written}"
        assert code == 7, f"follow must return the job's exit code, 7, not {code}"
        try:
            self.make().cancel(job_id)
        except ClusterError:
            return
        raise AssertionError(f"cancel({job_id!r}) must raise ClusterError, since the job has ended")

    def check_a_cancelled_job_ends(self, directory: Path) -> None:
        """Check that `cancel` ends a running job, and that `follow` then returns another code than 0."""
        submission = self._live(directory, "import time; print('runs', flush=True); time.sleep(600)")
        if submission is None:
            return
        job_id, written = self.make().submit(submission), list[str]()

        def cancel_once(text: str) -> None:
            is_first = "runs" not in "".join(written)
            written.append(text)
            if is_first and "runs" in "".join(written):
                self.make().cancel(job_id)

        code = self.make().follow(job_id, submission, cancel_once)
        assert code != 0, "follow must not return 0 for a job that was cancelled"

    def _live(self, directory: Path, source: str) -> Submission | None:
        """Write the files of a job that runs a Python program; None if jobs cannot be submitted here."""
        request = self.request(directory)
        if request is None or not self.runs_jobs:
            return None
        command = (sys.executable, "-c", source)
        submission = self.make().plan(replace(request, command=command, num_nodes=1))
        for path, text in submission.files.items():
            write_private(path, text)
        return submission

    def _environments(self) -> list[Environment]:
        return [environment for job in self.jobs() for environment in job]

    def _places(self) -> list[list[JobPlacement]]:
        return [[self._place(environment) for environment in job] for job in self.jobs()]

    def _place(self, environment: Environment) -> JobPlacement:
        place = self.make().placement(environment)
        assert place is not None, f"placement must recognise a task of the cluster by {dict(environment)}"
        return place
