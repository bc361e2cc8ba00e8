"""Live objects are found beside threads that make others."""

import gc

import pytest
from torch import nn

from drivetrain_memory.freeing.live_objects import live_objects
from tuples_on_threads import tuples_on_threads


class Own(nn.Module):
    """A module of a class that no other test has."""


class Derived(Own):
    """Another one."""


@pytest.mark.slow
def test_the_objects_of_a_class_and_its_subclasses_are_found_while_other_threads_make_tuples() -> None:
    kept = [Own(), Own(), Derived()]
    with tuples_on_threads() as failures:
        for _ in range(20):
            assert set(map(id, live_objects(Own))) == set(map(id, kept))
    assert not failures
    assert set(map(id, live_objects(Derived))) == {id(kept[2])}
    kept.clear()
    gc.collect()
    assert not live_objects(Own)
