import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_clusters.host_lists import expand_counts, expand_hosts

PLAIN = st.text(alphabet="abcn-.0", min_size=1, max_size=6)
NUMBERS = st.integers(0, 40)
WIDTHS = st.integers(1, 4)


@st.composite
def brackets(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A bracket, and the numbers that it stands for."""
    texts: list[str] = []
    stands_for: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        first, length, width = draw(NUMBERS), draw(st.integers(0, 6)), draw(WIDTHS)
        numbers = [str(number).zfill(width) for number in range(first, first + length + 1)]
        texts.append(numbers[0] if length == 0 else f"{numbers[0]}-{first + length}")
        # Slurm writes as many digits as the first number of a range has.
        stands_for += [str(number).zfill(len(numbers[0])) for number in range(first, first + length + 1)]
    return f"[{','.join(texts)}]", stands_for


@st.composite
def names(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A name with up to three brackets, and the hosts that it stands for."""
    text, hosts = draw(PLAIN), [""]
    hosts = [text]
    for _ in range(draw(st.integers(0, 3))):
        bracket, numbers = draw(brackets())
        plain = draw(st.sampled_from(["", "-", "r", ".x"]))
        text += bracket + plain
        hosts = [f"{host}{number}{plain}" for host in hosts for number in numbers]
    return text, hosts


@given(st.lists(names(), min_size=1, max_size=4))
def test_a_list_stands_for_the_hosts_that_it_was_made_of(parts: list[tuple[str, list[str]]]) -> None:
    assert expand_hosts(",".join(text for text, _ in parts)) == tuple(
        host for _, hosts in parts for host in hosts
    )


@given(st.text(alphabet="n1,[]-0 x", max_size=24))
def test_any_text_is_hosts_or_an_error_that_shows_it(text: str) -> None:
    try:
        hosts = expand_hosts(text)
    except ValueError as error:
        shown = str(error)
    else:
        assert hosts
        assert all(host and not set("[],") & set(host) for host in hosts)
        return
    assert repr(text) in shown


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", "n1"),
        ("n[001-003,007],gpu-[1-2]-[5,8]", "n001 n002 n003 n007 gpu-1-5 gpu-1-8 gpu-2-5 gpu-2-8"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[09-11]", "n09 n10 n11"),
        ("127.0.0.[2-3]", "127.0.0.2 127.0.0.3"),
        ("a[1]b[2-3]c,d", "a1b2c a1b3c d"),
    ],
)
def test_forms_that_slurm_writes(text: str, hosts: str) -> None:
    assert expand_hosts(text) == tuple(hosts.split())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "a host name is empty"),
        ("a,,b", "a host name is empty"),
        ("n[1-", "a bracket is not closed"),
        ("n1]", "brackets do not match at character 3"),
        ("n[[1]]", "brackets do not match"),
        ("n[]", "a bracket is empty"),
        ("n[a-c]", "'a-c' in brackets is no number or range"),
        ("n[٣]", "is no number or range"),
        ("n[3-1]", "must count upwards"),
        ("n[1-99999999999]", "must count upwards, to at most 1000000"),
        ("n[1-9999][1-9999]", "more than 1000000 hosts"),
    ],
)
def test_a_wrong_list_is_an_error(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        expand_hosts(text)


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(1, 9)), min_size=1, max_size=6))
def test_counts_stand_for_what_they_were_made_of(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert expand_counts(text) == tuple(count for count, times in runs for _ in range(times))


@pytest.mark.parametrize("text", ["", "2(x)", "2x3", "-1", "2,,1", "٣", "2(x9999999)"])
def test_a_wrong_count_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no count|more than"):
        expand_counts(text)
