"""The methods of an Accelerator that exchange data between ranks, on two of them."""

from typing import Any

import pytest
import torch

from drivetrain_accelerate.accelerator.accelerator import Accelerator
from drivetrain_accelerate.states.accelerator_state import AcceleratorState
from drivetrain_accelerate.tensors.verification import DistributedOperationException

accelerate: Any = pytest.importorskip("accelerate")


def outcomes(accelerator: Any) -> dict[str, Any]:
    rank = accelerator.process_index
    own = torch.tensor([float(rank + 1)])
    chosen: Any = accelerator.on_local_process(lambda: "ran", local_process_index=1)
    return {
        "gather": accelerator.gather({"a": own})["a"].tolist(),
        "sum": accelerator.reduce(own).tolist(),
        "mean": accelerator.reduce([own], "mean")[0].tolist(),
        "none": accelerator.reduce(own, "none").tolist(),
        "bools": accelerator.reduce(torch.tensor([bool(rank)])).tolist(),
        "padded": accelerator.pad_across_processes(torch.ones(rank + 1), pad_index=-1).tolist(),
        "chosen": chosen(),
    }


def beside() -> tuple[dict[str, Any], dict[str, Any], str]:
    mine = Accelerator(cpu=True)
    ours = outcomes(mine)
    told = ""
    try:
        mine.gather(torch.ones(mine.process_index + 1))
    except DistributedOperationException as error:
        told = str(error)
    AcceleratorState._reset_state(reset_partial_state=True)  # pyright: ignore[reportPrivateUsage]
    theirs = accelerate.Accelerator(cpu=True)
    found = outcomes(theirs)
    theirs.state._reset_state(reset_partial_state=True)
    return ours, found, told


@pytest.mark.slow
def test_ranks_get_what_the_real_one_gives_them_and_differing_calls_are_told(run_ranks: Any) -> None:
    for ours, theirs, told in run_ranks(beside):
        assert ours.pop("none") in ([1.0], [2.0])
        assert theirs.pop("none") == [3.0]  # the sum, though none was asked for
        assert ours == theirs
        assert "the ranks do not make the same call" in told
