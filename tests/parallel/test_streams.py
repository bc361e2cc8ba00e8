import torch

from drivetrain_parallel.streams import RankStream

CPU = torch.device("cpu")


def drawn(rank: int, *, seed: int = 0, is_used: bool = True) -> tuple[list[float], float]:
    """Return what a rank draws in two regions, and then outside."""
    torch.manual_seed(seed)
    stream = RankStream(rank, CPU, is_used=is_used)
    inside: list[float] = []
    for _ in range(2):
        stream.open()
        inside.append(torch.rand(()).item())
        stream.close()
    return inside, torch.rand(()).item()


def test_each_rank_draws_its_own_numbers_inside_and_all_draw_the_same_outside() -> None:
    first, second = drawn(0), drawn(1)
    assert len({*first[0], *second[0]}) == 4
    assert first[1] == second[1]


def test_the_numbers_follow_from_the_common_state() -> None:
    assert drawn(1) == drawn(1)
    assert drawn(1, seed=1) != drawn(1)


def test_a_stream_that_is_not_used_draws_what_all_draw() -> None:
    assert drawn(0, is_used=False) == drawn(1, is_used=False)
    torch.manual_seed(0)
    expected = [torch.rand(()).item() for _ in range(3)]
    assert drawn(0, is_used=False) == (expected[:2], expected[2])


def test_how_much_is_drawn_inside_does_not_show_outside() -> None:
    torch.manual_seed(0)
    stream = RankStream(0, CPU, is_used=True)
    stream.open()
    torch.rand(1000)
    stream.close()
    after = torch.rand(())
    torch.manual_seed(0)
    stream.open()
    stream.close()
    assert torch.equal(torch.rand(()), after)


def test_a_stream_is_opened_once_by_all_layers_of_a_region() -> None:
    torch.manual_seed(0)
    stream = RankStream(0, CPU, is_used=True)
    stream.open()
    state = torch.get_rng_state()
    stream.open()
    assert torch.equal(torch.get_rng_state(), state)
    stream.close()
    outside = torch.get_rng_state()
    stream.close()
    assert torch.equal(torch.get_rng_state(), outside)


def test_a_stream_that_is_forgotten_leaves_the_generator_and_opens_again() -> None:
    torch.manual_seed(0)
    stream = RankStream(0, CPU, is_used=True)
    stream.open()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    stream.forget()
    stream.close()
    assert torch.equal(torch.get_rng_state(), state)
    stream.open()
    assert not torch.equal(torch.get_rng_state(), state)
    stream.close()
