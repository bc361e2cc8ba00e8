from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_doctor.links.link_faults import find_faults


def links(count: int, slow: set[tuple[int, int]] = frozenset(), rate: float = 1e9, low: float = 1e8) -> dict:  # type: ignore[assignment]
    return {link: low if link in slow else rate for link in combinations(range(count), 2)}


def of_hosts(count: int, hosts: set[int]) -> set[tuple[int, int]]:
    return {link for link in combinations(range(count), 2) if hosts & set(link)}


RACKS = {(one, two) for one in range(3) for two in range(3, 6)}


@pytest.mark.parametrize(
    ("count", "slow", "hosts", "slow_links", "islands"),
    [
        (5, set(), (), (), ()),
        *[(count, of_hosts(count, {1}), (1,), (), ()) for count in (3, 4, 5, 16)],
        *[(count, {(0, 2)}, (), ((0, 2),), ()) for count in (3, 4, 5, 16)],
        (6, of_hosts(6, {5}) | {(0, 1)}, (5,), ((0, 1),), ()),
        (5, of_hosts(5, {0, 3}), (0, 3), (), ()),
        (6, RACKS, (), (), ((0, 1, 2), (3, 4, 5))),
    ],
)
def test_what_slow_links_have_in_common_is_named(
    count: int,
    slow: set[tuple[int, int]],
    hosts: tuple[int, ...],
    slow_links: tuple[tuple[int, int], ...],
    islands: tuple[tuple[int, ...], ...],
) -> None:
    for low in (0, 1e8):  # a dead link is slow
        faults = find_faults(links(count, slow, low=low), slow_below=0.5)
        assert (faults.hosts, faults.links, faults.islands, faults.usual) == (hosts, slow_links, islands, 1e9)


def test_one_link_blames_nobody_since_there_is_nothing_to_compare() -> None:
    faults = find_faults({(0, 1): 1e3}, slow_below=0.5)
    assert (faults.hosts, faults.links) == ((), ())


def test_no_links() -> None:
    assert find_faults({}, slow_below=0.5).usual == 0


@given(
    count=st.integers(4, 12),
    data=st.data(),
    noise=st.lists(st.floats(0.85, 1.15), min_size=66, max_size=66),
)
def test_a_slow_host_is_found_among_noise(count: int, data: st.DataObject, noise: list[float]) -> None:
    slow = data.draw(st.integers(0, count - 1))
    plain = links(count, of_hosts(count, {slow}), low=2e8)
    noisy = {link: rate * each for (link, rate), each in zip(plain.items(), noise, strict=False)}
    faults = find_faults(noisy, slow_below=0.5)
    assert (faults.hosts, faults.links) == ((slow,), ())


@given(count=st.integers(2, 10), rates=st.lists(st.floats(1, 1e10), min_size=45, max_size=45))
def test_whatever_the_rates_each_slow_link_is_explained_once(count: int, rates: list[float]) -> None:
    values = dict(zip(combinations(range(count), 2), rates, strict=False))
    faults = find_faults(values, slow_below=0.5)
    slow = {link for link, rate in values.items() if rate < 0.5 * faults.usual}
    if not faults.islands:
        explained = {link for link in slow if set(link) & set(faults.hosts)}
        assert explained | set(faults.links) == slow
        assert not explained & set(faults.links)
    assert len(faults.hosts) < count
