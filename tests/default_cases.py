"""The cases of a matrix that run by default; the others are slow, and `.ci/run` draws among them."""

import pytest


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every case slow whose id holds none of the words of `default_cases`, but a case for a card.

    A word is a whole part of an id, or several: `ddp` and `ddp-2` are words of `[cpu-ddp-2]`, `dd` is none. Without
    a word all cases are slow but those for a card.

    Raises:
        pytest.UsageError: A word fits no case of its test, all of whose cases are there.
    """
    unmet: dict[str, set[str]] = {}
    for item in items:
        marker = item.get_closest_marker("default_cases")
        if marker is None:
            continue
        case = item.nodeid.partition("[")[2].removesuffix("]")
        words = unmet.setdefault(item.nodeid.partition("[")[0], set(marker.args))
        fitting = {word for word in marker.args if f"-{word}-" in f"-{case}-"}
        words -= fitting
        if not fitting and item.get_closest_marker("cuda") is None:
            item.add_marker(pytest.mark.slow)
    chosen_by_id = any("[" in argument for argument in items[0].config.args) if items else False
    for test, words in unmet.items():
        if words and not chosen_by_id:
            raise pytest.UsageError(f"{test}: default_cases names {sorted(words)}, which fits no case")
