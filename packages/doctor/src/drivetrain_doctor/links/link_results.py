"""The measurements between pairs of ranks, and their judgement."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from drivetrain_doctor.doctor_finding import CheckReport
from drivetrain_doctor.links.link_faults import Link, find_faults
from drivetrain_messages import format_size

# A link is slow below this part of the usual bandwidth, or with this many times the usual latency.
_SLOW_PART = 0.5
_SLOW_LATENCY_TIMES = 4
# Below this difference, latencies differ by chance.
_LATENCY_NOISE_SECONDS = 300e-6
_SLOW_BYTES_PER_SECOND = 100e6  # a link of 1 Gbit/s has 118e6
_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PairResult:
    """The measurements of one pair of ranks, lower rank first."""

    first: int
    second: int
    latency_seconds: float
    forward_bytes_per_second: float
    backward_bytes_per_second: float

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth of the slower direction, which limits a collective."""
        return min(self.forward_bytes_per_second, self.backward_bytes_per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """The measurements of a group of processes over gloo or nccl.

    Attributes:
        unfinished: The pairs that began and did not end in time.
        failures: The messages of processes that failed, by rank.
        start_seconds: The time until the last process had joined the group; None if a process did not join.
    """

    backend: str
    pairs: tuple[PairResult, ...] = ()
    unfinished: tuple[Link, ...] = ()
    failures: Mapping[int, str] = field(default_factory=dict[int, str])
    start_seconds: float | None = None


def judge_ranks(result: GroupResult) -> CheckReport:
    """Judge the links between the processes of one host, which differ by design; only failures are findings."""
    report = CheckReport(summarize(result.pairs))
    _judge_failures(report, result, ())
    return report


def judge_hosts(result: GroupResult, names: Sequence[str]) -> CheckReport:
    """Judge the links between hosts, one rank on each, and name the slow link or host by `names`."""
    report = CheckReport(summarize(result.pairs))
    _judge_failures(report, result, names)
    rates = {(each.first, each.second): each.bytes_per_second for each in result.pairs}
    if len(names) > 2:
        _judge_bandwidth(report, rates, names)
        latencies = {(each.first, each.second): each.latency_seconds for each in result.pairs}
        speeds = {link: 1 / max(seconds, 1e-9) for link, seconds in latencies.items()}
        faults = find_faults(speeds, slow_below=1 / _SLOW_LATENCY_TIMES)
        usual = 1 / faults.usual if faults.usual else 0.0
        late = [(names[host], _median_of_host(latencies, host)) for host in faults.hosts]
        late += [
            (f"the link {names[one]} - {names[two]}", latencies[one, two])
            for one, two in faults.links[:_SHOWN]
        ]
        for who, seconds in late:
            if seconds - usual > _LATENCY_NOISE_SECONDS:
                report.warning(
                    f"the latency of {who} is {seconds * 1e6:,.0f} us; {usual * 1e6:,.0f} us is usual",
                    why="small collectives (a loss that is gathered, a norm) wait for it at every step",
                    repair="look for a longer route, another zone, a busy host (top), or a power-saving mode of its "
                    "processor or adapter",
                    seconds=seconds,
                    usual=usual,
                )
    if rates and (rate := median(rates.values())) < _SLOW_BYTES_PER_SECOND:
        report.warning(
            f"hosts exchange only {format_size(rate)}/s over {result.backend}",
            why=f"100 million parameters in fp32 exchange 0.8 GB a step: {0.8e9 / rate:.1f} s",
            repair="name the fast interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME; ethtool INTERFACE shows its "
            "speed); or exchange less: bf16 gradients, accumulation",
            bytes_per_second=rate,
        )
    return report


def summarize(pairs: Sequence[PairResult]) -> str:
    """Return a line with the range of bandwidths and latencies."""
    if not pairs:
        return "no pair was measured"
    rates = [pair.bytes_per_second for pair in pairs]
    latencies = [pair.latency_seconds * 1e6 for pair in pairs]
    if len(pairs) == 1:
        return f"1 pair: {format_size(rates[0])}/s, latency {latencies[0]:,.0f} us"
    return (
        f"{len(pairs)} pairs: {format_size(min(rates))}/s to {format_size(max(rates))}/s, "
        f"latency {min(latencies):,.0f} to {max(latencies):,.0f} us"
    )


def _judge_failures(report: CheckReport, result: GroupResult, names: Sequence[str]) -> None:
    def shown(ranks: Sequence[int]) -> list[str]:
        return [names[rank] if rank < len(names) else f"rank {rank}" for rank in ranks[:_SHOWN]]

    ranks_of: dict[str, list[int]] = {}
    for rank, failure in sorted(result.failures.items()):
        ranks_of.setdefault(failure, []).append(rank)
    for failure, ranks in ranks_of.items():
        report.error(
            f"{result.backend} fails on {', '.join(shown(ranks))}: {failure}",
            why="the process group of a run fails in the same way",
            repair="export GLOO_SOCKET_IFNAME=INTERFACE (NCCL_SOCKET_IFNAME for nccl) with one that leads to the "
            "others, and open the ephemeral ports between the hosts; NCCL_DEBUG=INFO makes NCCL say more",
        )
    if result.unfinished:
        ends = [end for pair in result.unfinished for end in pair]
        common = [end for end in sorted(set(ends)) if ends.count(end) == len(result.unfinished) > 1]
        who = " and ".join(shown(common or sorted(set(ends))))
        report.error(
            f"{result.backend} messages to or from {who} did not arrive in time",
            why="each collective of a run waits for the slowest rank, here for ever",
            repair="check that the host is alive and idle (uptime, dmesg), then check the network between them: "
            "ping -M do -s 8972 ADDRESS finds a wrong MTU, which drops large messages alone",
        )


def _judge_bandwidth(report: CheckReport, rates: Mapping[Link, float], names: Sequence[str]) -> None:
    faults = find_faults(rates, slow_below=_SLOW_PART)
    usual = f"{format_size(faults.usual)}/s"
    for host in faults.hosts:
        rate = _median_of_host(rates, host)
        report.warning(
            f"{names[host]} is slow: {format_size(rate)}/s to the others; {usual} is usual",
            why="every collective runs at the speed of the slowest host",
            repair=f"on {names[host]}: ethtool INTERFACE (a link that fell back to a lower speed), ip -s link "
            "(errors), top (another program); or leave the host out",
            bytes_per_second=rate,
            usual=faults.usual,
        )
    for one, other in faults.links[:_SHOWN]:
        rate = rates[one, other]
        report.warning(
            f"the link {names[one]} - {names[other]} is slow: {format_size(rate)}/s; {usual} is usual",
            why="a ring of all hosts runs at the speed of its slowest link",
            repair="both hosts are fast to others, so look between them: the cable, the switch's port and its "
            "counters, the route (ip route get ADDRESS)",
            bytes_per_second=rate,
            usual=faults.usual,
        )
    if faults.islands:
        groups = " | ".join(", ".join(names[host] for host in island[:_SHOWN]) for island in faults.islands)
        between = [
            rate
            for link, rate in rates.items()
            if not any(set(link) <= set(island) for island in faults.islands)
        ]
        report.warning(
            f"hosts are in {len(faults.islands)} islands ({groups}): {format_size(median(between))}/s between them, "
            f"{usual} within",
            why="a collective over all hosts runs at the speed between the islands (racks, zones, an "
            "oversubscribed switch)",
            repair="request hosts of one rack (sbatch --switches=1, a placement group), or shard within "
            "islands and replicate between them (HSDP)",
        )


def _median_of_host(values: Mapping[Link, float], host: int) -> float:
    """Return the median value of a host's links."""
    return median(value for link, value in values.items() if host in link)
