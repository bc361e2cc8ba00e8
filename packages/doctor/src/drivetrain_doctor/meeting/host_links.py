"""The links between hosts: each host measures its own pairs, and host 0 puts them together."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from drivetrain_doctor.links.pair_order import PairOrder, PairProgram
from drivetrain_doctor.links.pair_results import GroupResult, PairResult
from drivetrain_doctor.meeting.join import HostMeeting

PAIR_SECONDS = 45.0
_MOST_ROUNDS = 32


def measure_links(
    meeting: HostMeeting, ranks: Sequence[int], backend: str, program: PairProgram
) -> dict[str, Any]:
    """Measure the pairs of this host that it is the lower rank of; return them as plain data. On all of `ranks`.

    Args:
        meeting: The meeting of the hosts, at whose store the group forms.
        ranks: The hosts that take part, in order.
        backend: "gloo" or "nccl".
        program: The program that measures them, which has no order yet; it is closed.
    """
    order = PairOrder(
        backend=backend,
        world_size=len(ranks),
        ranks=(ranks.index(meeting.rank),),
        store_host=meeting.store_host,
        store_port=meeting.store_port,
        prefix=f"doctor/{backend}",
        most_rounds=_MOST_ROUNDS,
        at_once=True,
        limit_seconds=PAIR_SECONDS,
    )
    with program:
        return asdict(program.measure(order))


def merge(backend: str, told: Mapping[int, Mapping[str, Any]], linked: Sequence[int]) -> GroupResult:
    """Return one result from what each host told, each of its own pairs.

    Args:
        backend: The backend that measured them.
        told: The `GroupResult` of each host as plain data, by the host's rank.
        linked: The hosts' ranks, in the order of their ranks in the group.
    """
    failures: dict[int, str] = {}
    pairs: list[PairResult] = []
    unfinished: list[tuple[int, int]] = []
    for index, rank in enumerate(linked):
        if rank not in told:
            failures[index] = "told nothing in time"
            continue
        failures |= {int(each): text for each, text in told[rank]["failures"].items()}
        pairs += [PairResult(**pair) for pair in told[rank]["pairs"]]
        unfinished += [(pair[0], pair[1]) for pair in told[rank]["unfinished"]]
    return GroupResult(backend=backend, pairs=tuple(pairs), unfinished=tuple(unfinished), failures=failures)
