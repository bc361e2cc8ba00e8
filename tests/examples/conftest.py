"""Examples run as ranks, as under any launcher; what only ours brings is tested through it."""

from collections.abc import Callable

import pytest

from example_launching import EXAMPLES
from processes import Completed, run_script


@pytest.fixture
def run_example(pythons: tuple[str, ...]) -> Callable[..., Completed]:
    """`run_example(name, *args, num_processes=2)` runs an example to its end; what its first rank left."""

    def run(example: str, *args: str, num_processes: int) -> Completed:
        ranks = run_script(
            EXAMPLES / example,
            *args,
            num_processes=num_processes,
            timeout_seconds=150,
            environment={},
            pythons=pythons,
        )
        assert [rank.returncode for rank in ranks] == [0] * num_processes, ranks
        return ranks[0]

    return run
