"""Join the other hosts' doctors at the store of the run, and learn which hosts are missing after which time.

Keys below the prefix: `arrivals` counts hosts without a given rank, to number them; `here/RANK` counts the
claims of a rank; `post/STEP/RANK` is a host's message to rank 0, `word/STEP` rank 0's message to all.
"""

import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, TCPStore

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.run_checks import within
from drivetrain_launcher.errors import LaunchError
from drivetrain_state.own_addresses import own_addresses
from drivetrain_state.store_rounds import StoreRounds
from drivetrain_state.store_server import host_store

_PREFIX = "drivetrain_doctor"
_TRY_SECONDS = 2.0
_PAUSE_SECONDS = 0.2
_GREETING_SECONDS = 15.0
# What hosts that wait for a word give rank 0 beyond the time that it itself waits for them.
_GRACE_SECONDS = 15.0
# Error of a connection -> what it says about the way to the other host.
_MEANINGS = (
    (socket.gaierror, "its name does not resolve; give an address, or write the name into /etc/hosts"),
    (
        ConnectionRefusedError,
        "the host answers, but nothing listens on the port: start drivetrain doctor on host 0 too, and check "
        "--master-port",
    ),
    (
        TimeoutError,
        "no answer: a firewall drops the packets, or the address is wrong; open the port on host 0",
    ),
)


class MeetingError(LaunchError):
    """An error of a host that cannot join; the message names the cause and a remedy."""


class HostMeeting:
    """The connection of this host to the hosts' common store, and the `seconds` that joining took."""

    def __init__(self, store: TCPStore, *, rank: int, num_hosts: int, seconds: float) -> None:
        self.rank = rank
        self.num_hosts = num_hosts
        self.seconds = seconds
        self.store = store  # on host 0, its server too
        self._keys = PrefixStore(_PREFIX, store)
        self._values = StoreRounds(self._keys, rank=rank)

    def claim(self) -> int:
        """Claim this host's rank; return the number of hosts that have claimed the same rank so far."""
        return self._values.count(f"here/{self.rank}", add=1)

    def post(self, step: str, content: Any) -> None:
        """Send plain JSON data to rank 0."""
        self._values.post(f"post/{step}/{self.rank}", content)

    def collect(
        self,
        step: str,
        ranks: Iterable[int],
        *,
        seconds: float,
        progress: Callable[[list[int]], None] = lambda _: None,
    ) -> dict[int, Any]:
        """Return the messages of hosts by rank, once all have come or `seconds` are over. Called on rank 0."""
        deadline = time.monotonic() + seconds
        found: dict[int, Any] = {}
        missing = list(ranks)
        while missing:
            answers = {rank: self._values.read(f"post/{step}/{rank}") for rank in missing}
            found |= {rank: answer for rank, answer in answers.items() if answer is not None}
            missing = [rank for rank in missing if rank not in found]
            if not missing:
                break
            progress(missing)
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return found

    def tell(self, step: str, content: Any) -> None:
        """Send plain JSON data to all other hosts. Called on rank 0."""
        self._values.post(f"word/{step}", content)

    def hear(self, step: str, *, seconds: float) -> Any:
        """Wait for a message of rank 0, for `seconds` and a grace time; raise MeetingError if no message comes."""
        try:
            self._keys.wait([f"word/{step}"], timedelta(seconds=seconds + _GRACE_SECONDS))
            return self._values.read(f"word/{step}")
        except DistError as failure:
            raise MeetingError(
                f"host 0 did not answer rank {self.rank} in the step '{step}': its doctor has ended or is frozen; "
                f"look at its output ({str(failure).partition(chr(10))[0][:120]})"
            ) from failure

    def ask_clock(self, number: int) -> float:
        """Ask rank 0 for the time of its clock."""
        self._keys.set(f"clock/ask/{self.rank}/{number}", "")
        return float(self._keys.get(f"clock/answer/{self.rank}/{number}"))

    def answer_clock(self, rank: int, number: int, *, seconds: float) -> bool:
        """Wait for a host to ask for the time, and answer; return False if no question comes. Called on rank 0."""
        try:
            self._keys.wait([f"clock/ask/{rank}/{number}"], timedelta(seconds=seconds))
        except DistError:
            return False
        self._keys.set(f"clock/answer/{rank}/{number}", repr(time.time()))
        return True


def join(checked: CheckedRun, *, progress: Callable[[str], None]) -> HostMeeting:
    """Host the store, or reach it within the run's waiting time; a MeetingError gives the reason of a failure."""
    begin = time.monotonic()
    rank = checked.node_rank
    may_host = rank == 0
    if rank is None:  # the store is where the master's address is
        with suppress(OSError, UnicodeError):
            may_host = any(own_addresses(checked.master_addr))
    store = None
    if may_host:
        timeout = timedelta(seconds=checked.wait_seconds)
        try:
            store = host_store(checked.master_addr, checked.master_port, timeout=timeout, is_one_node=False)
        except DistError as failure:
            if rank is not None:  # else another doctor on this host has come first
                raise MeetingError(
                    f"the store cannot listen on port {checked.master_port} of this host "
                    f"({str(failure).partition(chr(10))[0][:120]}); choose another --master-port on every host"
                ) from failure
    if store is not None:
        rank = 0
    else:
        store = _reach(checked, progress)
        if rank is None:
            rank = int(PrefixStore(_PREFIX, store).add("arrivals", 1))
    return HostMeeting(store, rank=rank, num_hosts=checked.num_nodes, seconds=time.monotonic() - begin)


def _reach(checked: CheckedRun, progress: Callable[[str], None]) -> TCPStore:
    """Connect to the store, which may be started later than this host."""
    where = f"{checked.master_addr}:{checked.master_port}"
    deadline = time.monotonic() + checked.wait_seconds
    while True:
        try:
            socket.create_connection((checked.master_addr, checked.master_port), timeout=_TRY_SECONDS).close()
            break
        except OSError as refused:
            no_route = (
                f"{refused.strerror or refused}: there is no route; check the address and this host's network"
            )
            seen = next((meaning for kind, meaning in _MEANINGS if isinstance(refused, kind)), no_route)
        progress(f"waiting for host 0 at {where} ({seen})")
        if time.monotonic() > deadline:  # only after a try, however late this process runs
            raise MeetingError(f"host 0 was not reached at {where} within {checked.wait_seconds:g} s: {seen}")
        time.sleep(_PAUSE_SECONDS)
    # torch's client waits for an answer to its greeting without a limit.
    try:
        return within(
            min(_GREETING_SECONDS, checked.wait_seconds),
            lambda: TCPStore(
                checked.master_addr,
                checked.master_port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=checked.wait_seconds),
            ),
            name="doctor-greeting",
        )
    except (DistError, RuntimeError, TimeoutError) as failure:
        raise MeetingError(
            f"the program at {where} is no store of torch, or is frozen: most likely another program holds the port "
            "on host 0; choose another --master-port on every host"
        ) from failure
