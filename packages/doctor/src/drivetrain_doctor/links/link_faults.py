"""Decide whether slow links share a host, divide the hosts into islands, or are single faults.

All functions are pure. A link between two hosts has a value, and more is better: the link's bandwidth, or the inverse
of its latency. A link that does not work has the value 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_high

Link = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFaults:
    """The slow links of a set of hosts, explained.

    Attributes:
        usual: The value of a healthy link: the median over hosts of each host's best link.
        hosts: Hosts with mostly slow links.
        links: Slow links between other hosts than these.
        islands: Groups of hosts with fast links within a group and slow links between groups: two or more groups of
            two or more hosts each; empty if the hosts are not divided.
    """

    usual: float
    hosts: tuple[int, ...] = ()
    links: tuple[Link, ...] = ()
    islands: tuple[tuple[int, ...], ...] = ()


def find_faults(values: Mapping[Link, float], *, slow_below: float) -> LinkFaults:
    """Find the slow hosts, links or islands.

    The usual value is robust against slow hosts: one slow host of three makes two of three links slow, but leaves two
    hosts with a fast link. A host is blamed only if more than half of its links, and at least two, are slow. Hosts
    are blamed one at a time, the worst first, so that a slow host's partners are not blamed.

    Args:
        values: The value of each link, lower host first; links that were not measured are missing.
        slow_below: The part of the usual value below which a link is slow.
    """
    hosts = sorted({host for link in values for host in link})
    if not hosts:
        return LinkFaults(usual=0.0)
    usual = median_high(max(values[link] for link in values if host in link) for host in hosts)
    slow = {link for link, value in values.items() if value < slow_below * usual or value <= 0}
    island_of = {host: {host} for host in hosts}
    for first, second in values.keys() - slow:
        if island_of[first] is not island_of[second]:
            joined = island_of[first] | island_of[second]
            island_of |= dict.fromkeys(joined, joined)
    islands = tuple(sorted({tuple(sorted(island)) for island in island_of.values()}))
    is_within = any(second in island_of[first] for first, second in slow)
    if len(islands) > 1 and min(map(len, islands)) > 1 and not is_within:
        return LinkFaults(usual=usual, islands=islands)
    blamed: set[int] = set()
    while True:
        # Of each host's links to hosts that are not blamed, the part that is slow.
        shares: dict[int, float] = {}
        for host in hosts:
            own = [link for link in values if host in link and not blamed & set(link)]
            shares[host] = sum(link in slow for link in own) / len(own) if len(own) > 1 else 0.0
        worst = max(hosts, key=shares.__getitem__)
        if shares[worst] <= 0.5:
            break
        blamed.add(worst)
    left = sorted(link for link in slow if not blamed & set(link))
    return LinkFaults(usual=usual, hosts=tuple(sorted(blamed)), links=tuple(left))
