"""What counts as a use of the world's group, where the ranks that are meant have a name."""

import pytest

from checks.sources import parse
from checks.world_groups import world_groups

PATH = "packages/backends/src/drivetrain_backends/torch/new.py"


def places(code: str, path: str = PATH) -> list[str]:
    indented = "\n".join(f"    {line}" for line in code.splitlines())
    imports = "from drivetrain_state import gather, reduce; from torch.distributed import all_gather_object"
    text = f"{imports}\ndef step():\n{indented}"
    return [found.where.rpartition(":")[2] for found in world_groups([parse(path, text)], {})]


@pytest.mark.parametrize(
    "code",
    [
        "reduce(context, total)",
        "collectives.gather(self._context, rows)",
        "dist.all_reduce(total)",
        "n = dist.get_world_size()",
        "made = dist.new_group()",
        "dist.all_reduce(total, async_op=True)",
        "torch.distributed.all_reduce(total)",
        "all_gather_object(found, own)",
        "factor = total / self._context.topology.world_size",
        "dist.all_reduce(total, group=None)",
        "replicate(model, process_group=self.context.group)",
        "dist.all_reduce(total, group=context.group)",
    ],
)
def test_the_world_is_found(code: str) -> None:
    assert places(code) == ["3"]


@pytest.mark.parametrize(
    "code",
    [
        'reduce(context, total, over="counts")',
        'collectives.gather(self._context, rows, over="reads")',
        "dist.all_reduce(total, group=ranks.process_group)",
        "n = dist.get_world_size(group)",
        "functools.reduce(add, numbers)",
        "found = match.group(1)",
        "self.group.check_ended()",
    ],
)
def test_named_ranks_are_none_of_it(code: str) -> None:
    assert places(code) == []


def test_other_packages_may_mean_all_ranks() -> None:
    assert places("dist.barrier()", "packages/checkpoint/src/drivetrain_checkpoint/new.py") == []


def test_a_reason_allows_a_function_a_folder_or_a_package_and_one_without_a_use_is_told() -> None:
    source = parse(PATH, "class Reducer:\n    def step(self):\n        dist.all_reduce(total)\n")
    assert world_groups([source], {"torch/new.py::Reducer.step": "why"}) == []
    assert len(world_groups([source], {"torch/new.py::step": "why"})) == 2
    assert world_groups([source], {"torch/": "why"}) == []
    flat = parse("packages/backends/src/drivetrain_backends/new.py", source.text)
    assert world_groups([flat], {"backends/": "why"}) == []
    (found,) = world_groups([source], {"torch/": "why", "torch/new.py::close": "why"})
    assert found.message == "torch/new.py::close does not use the world's group"
