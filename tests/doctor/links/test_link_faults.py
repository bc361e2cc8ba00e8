from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_doctor.links.link_faults import find_faults


def links(count: int, slow: set[tuple[int, int]] = frozenset(), rate: float = 1e9, low: float = 1e8) -> dict:  # type: ignore[assignment]
    return {link: low if link in slow else rate for link in combinations(range(count), 2)}


def of_hosts(count: int, hosts: set[int]) -> set[tuple[int, int]]:
    return {link for link in combinations(range(count), 2) if hosts & set(link)}


def test_equal_links_have_no_fault() -> None:
    faults = find_faults(links(5), slow_below=0.5)
    assert (faults.hosts, faults.links, faults.islands, faults.usual) == ((), (), (), 1e9)


@pytest.mark.parametrize("count", [3, 4, 5, 16])
def test_a_slow_host_is_named_and_not_its_links(count: int) -> None:
    faults = find_faults(links(count, of_hosts(count, {1})), slow_below=0.5)
    assert (faults.hosts, faults.links) == ((1,), ())


@pytest.mark.parametrize("count", [3, 4, 5, 16])
def test_a_slow_link_is_named_and_neither_of_its_hosts(count: int) -> None:
    faults = find_faults(links(count, {(0, 2)}), slow_below=0.5)
    assert (faults.hosts, faults.links) == ((), ((0, 2),))


def test_a_slow_host_and_a_slow_link_elsewhere() -> None:
    faults = find_faults(links(6, of_hosts(6, {5}) | {(0, 1)}), slow_below=0.5)
    assert (faults.hosts, faults.links) == ((5,), ((0, 1),))


def test_two_slow_hosts_of_five() -> None:
    assert find_faults(links(5, of_hosts(5, {0, 3})), slow_below=0.5).hosts == (0, 3)


def test_two_racks_are_islands_and_blame_no_host() -> None:
    between = {(one, two) for one in range(3) for two in range(3, 6)}
    faults = find_faults(links(6, between), slow_below=0.5)
    assert (faults.islands, faults.hosts, faults.links) == (((0, 1, 2), (3, 4, 5)), (), ())


def test_one_link_blames_nobody_since_there_is_nothing_to_compare() -> None:
    faults = find_faults({(0, 1): 1e3}, slow_below=0.5)
    assert (faults.hosts, faults.links) == ((), ())


def test_no_links() -> None:
    assert find_faults({}, slow_below=0.5).usual == 0


def test_a_dead_link_is_slow() -> None:
    assert find_faults(links(4, {(1, 2)}, low=0), slow_below=0.5).links == ((1, 2),)


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
