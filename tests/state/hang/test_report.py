"""Who is named as the culprit, and how the table says it; pure."""

from dataclasses import asdict, replace

from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from drivetrain_state.hang.report import Answer, compact_ranks, diagnose, hang_table, rank_names, stacks_text
from drivetrain_state.store_rounds import StoreRounds


def answer(rank: int, where: str = "train.py:30 main", call: str = "all_reduce", **said: object) -> Answer:
    """An answer of a rank that waits in a collective, unless said otherwise."""
    fields = {
        "waits": True,
        "stuck": True,
        "idle_seconds": 61.0,
        "label": "reduce",
        "stack": "  File ...",
        **said,
    }
    return Answer(rank=rank, host="node", pid=100 + rank, where=where, call=call, **fields)  # pyright: ignore[reportArgumentType]


def by_rank(*answers: Answer) -> dict[int, Answer]:
    return {each.rank: each for each in answers}


def test_an_answer_survives_the_store() -> None:
    said = answer(3, where="tränen.py:1 f")
    rounds = StoreRounds(HashStore(), rank=3)
    rounds.answer(1, asdict(said))
    assert Answer(**rounds.answers(1, [3])[3]) == said


def test_silence_names_the_culprit_first() -> None:
    found = diagnose(4, by_rank(answer(0), answer(2), answer(3, call="sleep(9)", waits=False)), {})
    assert [suspect.ranks for suspect in found.suspects] == [(1,), (3,)]
    assert "no answer" in found.suspects[0].reason
    assert found.blocked


def test_who_waits_for_nobody_holds_up_those_who_wait() -> None:
    found = diagnose(
        3, by_rank(answer(0), answer(1, "data.py:7 read", "time.sleep(60)", waits=False), answer(2)), {}
    )
    assert found.ranks == {1}
    assert str(found) == "likely culprit: rank 1: waits for no other rank, while the others wait"


def test_the_minority_that_waits_elsewhere_is_named() -> None:
    found = diagnose(3, by_rank(answer(0), answer(1, "train.py:40 main", "all_gather"), answer(2)), {})
    assert found.ranks == {1}


def test_two_ranks_that_wait_in_different_places_are_both_named() -> None:
    found = diagnose(2, by_rank(answer(0), answer(1, "train.py:40 main", "all_gather")), {})
    assert found.ranks == {0, 1}
    assert "different places" in str(found)


def test_ranks_in_two_collectives_of_one_line_are_told_apart() -> None:
    calls = {0: "all_gather_single", 1: "reduce_scatter_single", 2: "all_gather_single"}
    found = diagnose(2, by_rank(*(answer(rank, call=calls[rank]) for rank in (0, 1))), {})
    assert str(found).endswith(
        "the ranks wait in different places: one of them took another path through the code (rank 0 in "
        "all_gather_single at train.py:30 main; rank 1 in reduce_scatter_single at train.py:30 main)"
    )
    assert diagnose(3, by_rank(*(answer(rank, call=call) for rank, call in calls.items())), {}).ranks == {1}


def test_ranks_in_one_call_are_told_apart_by_their_last_progress() -> None:
    labels = {0: "gathering Seq", 1: "reducing Seq", 2: "gathering Seq"}
    found = diagnose(2, by_rank(*(answer(rank, call="backward", label=labels[rank]) for rank in (0, 1))), {})
    assert found.ranks == {0, 1}
    assert "after different progress" in str(found)
    assert "(rank 0 in 'gathering Seq'; rank 1 in 'reducing Seq')" in str(found)
    found = diagnose(3, by_rank(*(answer(rank, label=label) for rank, label in labels.items())), {})
    assert found.ranks == {1}
    assert "skipped or added a collective (ranks 0, 2 in 'gathering Seq'; rank 1" in str(found)


def test_ranks_in_one_collective_are_told_apart_by_what_came_before() -> None:
    recent = [
        "batch, optimizer step, batch, reduce",
        "batch, batch, reduce",
        "batch, optimizer step, batch, reduce",
    ]
    found = diagnose(3, by_rank(*(answer(rank, recent=text) for rank, text in enumerate(recent))), {})
    assert found.ranks == {1}
    assert "rank 1 after batch, batch, reduce" in str(found)


def test_a_rank_that_left_holds_up_those_who_wait_and_failures_come_first() -> None:
    found = diagnose(4, by_rank(answer(0), answer(3)), {1: "finished", 2: "ended by ValueError: bad"})
    assert [suspect.ranks for suspect in found.suspects] == [(2,), (1,)]
    assert "ended by ValueError: bad" in str(found)


def test_nobody_is_accused_where_all_wait_in_one_place() -> None:
    found = diagnose(3, by_rank(answer(0), answer(1), answer(2)), {})
    assert found.suspects == ()
    assert found.blocked
    assert "different shapes" in str(found)


def test_nobody_is_accused_where_nobody_waits() -> None:
    busy = [answer(rank, call="", waits=False, stuck=False) for rank in range(2)]
    found = diagnose(3, by_rank(*busy), {2: "finished"})
    assert not found.blocked
    assert found.suspects == ()
    assert "may just be slow" in str(found)


ANSWERS = st.builds(
    answer,
    rank=st.just(0),
    where=st.sampled_from(["train.py:30 main", "data.py:7 read"]),
    call=st.sampled_from(["all_reduce", "backward"]),
    waits=st.booleans(),
    stuck=st.booleans(),
)
WORLDS = st.lists(
    st.one_of(ANSWERS, st.none(), st.sampled_from(["finished", "ended by OSError: x"])), min_size=1
)


@given(WORLDS)
def test_the_diagnosis_of_any_world_names_the_silent_and_no_rank_twice(
    world: list[Answer | str | None],
) -> None:
    answers = {rank: replace(said, rank=rank) for rank, said in enumerate(world) if isinstance(said, Answer)}
    departures = {rank: said for rank, said in enumerate(world) if isinstance(said, str)}
    silent = {rank for rank, said in enumerate(world) if said is None}
    found = diagnose(len(world), answers, departures)
    named = [rank for suspect in found.suspects for rank in suspect.ranks]
    assert len(named) == len(set(named))
    assert silent <= found.ranks
    if not any(said.waits for said in answers.values()):
        assert found.ranks == silent | {rank for rank, said in departures.items() if said != "finished"}
    # Whoever waits is named only where nobody else can be at fault.
    innocent = {rank for rank, said in answers.items() if said.waits}
    if found.ranks - innocent:
        assert not found.ranks & innocent


@given(WORLDS)
def test_the_table_shows_every_rank_once_and_the_stacks_all_of_them(world: list[Answer | str | None]) -> None:
    answers = {rank: replace(said, rank=rank) for rank, said in enumerate(world) if isinstance(said, Answer)}
    departures = {rank: said for rank, said in enumerate(world) if isinstance(said, str)}
    table = hang_table(len(world), answers, departures, [0])
    column = table.splitlines()[0].index("rank")
    shown: list[int] = []
    for row in table.splitlines()[1:]:
        for run in row[column:].split("  ")[0].split(", "):
            low, _, high = run.partition("-")
            shown += range(int(low), int(high or low) + 1)
    assert sorted(shown) == list(range(len(world)))
    assert table.splitlines()[1].startswith(">")
    assert stacks_text(len(world), answers, departures).count("rank ") == len(world)


def test_a_table_of_a_thousand_ranks_is_short() -> None:
    answers = by_rank(*(answer(rank, idle_seconds=60.0 + rank % 3) for rank in range(1000)))
    answers[7] = answer(7, "data.py:7 Text.__getitem__", "time.sleep(3600)", waits=False, label="batch")
    assert hang_table(1000, answers, {}, [7]).splitlines() == [
        "   rank        idle     last progress  where                       in",
        ">  7           61 s     batch          data.py:7 Text.__getitem__  time.sleep(3600)",
        "   0-6, 8-999  60-62 s  reduce         train.py:30 main            all_reduce",
    ]


@given(st.sets(st.integers(0, 50), min_size=1))
def test_ranks_drawn_together_read_back_as_they_were(ranks: set[int]) -> None:
    back: set[int] = set()
    for run in compact_ranks(sorted(ranks)).split(", "):
        low, _, high = run.partition("-")
        back |= set(range(int(low), int(high or low) + 1))
    assert back == ranks
    assert rank_names(sorted(ranks)).startswith("ranks " if len(ranks) > 1 else "rank ")
