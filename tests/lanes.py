"""Three lanes: the tests of whole folders run in three processes, and those that need the machine run alone.

A file's tests stay in one lane, in their order, so that what a module or a session sets up is set up once a lane.
"""

import atexit
import fcntl
import gc
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# One more than the cores of a small machine: tests that start ranks or servers wait for them for much of their time.
NUM_LANES = 3


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of lanes: none for tests of a few files, which start sooner in the first process."""
    folder = config.invocation_params.dir
    are_many = len(config.args) > 3 or any(
        (folder / name.partition("::")[0]).is_dir() for name in config.args
    )
    return NUM_LANES if are_many else 0


def pytest_sessionstart() -> None:
    """Collect no garbage while the tests' modules are imported: there is hardly any."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Keep what was imported out of later collections of garbage: tests ask for hundreds."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Let the end free what modules hold, since some libraries count what is left."""
    atexit.register(gc.unfreeze)  # then: before, pytest collects five times for the errors of destructors


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Let a test that is marked `undisturbed` run while the other lanes wait."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    with in_room(item.config.rootpath / "build" / "lanes", alone="undisturbed" in item.keywords):
        result = yield
    if nextitem is None or nextitem.path != item.path:
        # What a file has imported and left behind is out of the collections that later tests ask for.
        gc.collect()
        gc.freeze()
    return result


@contextmanager
def in_room(folder: Path, *, alone: bool) -> Iterator[None]:
    """Hold the room for one test: together with other lanes' tests, or alone."""
    folder.mkdir(parents=True, exist_ok=True)
    # A shared lock alone would never become free for the test that wants all of it. So all queue at the door, and
    # whoever comes later waits there until that test is inside.
    with (folder / "door").open("w") as door, (folder / "room").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:  # by name: a worker that the test forked and left has this file open too
            fcntl.flock(room, fcntl.LOCK_UN)
