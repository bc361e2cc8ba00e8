"""What the states answer after a reset, beside the installed Accelerate's."""

from typing import Any

import pytest
import torch

from accelerate_sides import OURS, THEIRS, Side

pytest.importorskip("accelerate")


@pytest.mark.parametrize("side", [THEIRS, OURS], ids=lambda side: side.name)
def test_a_reset_of_the_accelerators_state_leaves_the_ranks(side: Side) -> None:
    state = side("accelerate.state.AcceleratorState")
    ranks = side("accelerate.PartialState")
    with side.accelerator(mixed_precision="bf16") as accelerator:
        kept = ranks()
        accelerator.state._reset_state()
        assert kept.is_main_process
        assert accelerator.is_main_process
        assert accelerator.is_local_main_process
        assert (kept.initialized, ranks().device) == (True, torch.device("cpu"))
        accelerator.wait_for_everyone()
        with pytest.raises(AttributeError, match="mixed_precision"):
            _ = accelerator.mixed_precision
        again = side("accelerate.Accelerator")(cpu=True)  # in another precision
        assert (again.mixed_precision, accelerator.mixed_precision) == ("no", "no")
        state._reset_state(reset_partial_state=True)
        assert not kept.initialized
        with pytest.raises(AttributeError, match="num_processes"):
            _ = kept.num_processes
        with pytest.raises(AttributeError, match="_reset_state"):
            _ = accelerator.device


def test_ranks_and_device_are_told_after_a_reset_where_the_real_one_tells_none() -> None:
    with OURS.accelerator() as accelerator:
        accelerator.state._reset_state()
        assert (accelerator.num_processes, accelerator.process_index) == (1, 0)
        assert accelerator.device.type == "cpu"
        assert torch.equal(accelerator.gather(torch.ones(1)), torch.ones(1))
        assert "Num processes: 1" in repr(OURS("accelerate.PartialState")())


@pytest.mark.parametrize("side", [THEIRS, OURS], ids=lambda side: side.name)
def test_one_process_has_no_group_to_destroy(side: Side) -> None:
    with side.accelerator() as accelerator:
        for state in (accelerator.state, side("accelerate.PartialState")(), accelerator.state):
            assert state.destroy_process_group() is None
        accelerator.end_training()
        accelerator.state.destroy_process_group()
        assert accelerator.num_processes == 1


def test_a_reset_of_the_gradients_state_ends_with_the_next_view() -> None:
    found: list[Any] = []
    for side in (THEIRS, OURS):
        gradients = side("accelerate.state.GradientState")
        with side.accelerator(gradient_accumulation_steps=2) as accelerator:
            accelerator.gradient_state._reset_state()
            after = gradients().sync_gradients, accelerator.sync_gradients, gradients().num_steps
            found.append((after, gradients().dataloader_references))
    assert found[0] == found[1]
