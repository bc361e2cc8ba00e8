"""The private name of torch is what state relies on: these tests tell when a new torch changes it."""

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from drivetrain_state import StateSettings, compat, connect


def written() -> list[str]:
    """What each rank finds in the store, over a connection of its own."""
    with connect(StateSettings(device="cpu", watchdog=False)) as context:
        rank = context.topology.rank
        store = compat.default_store().clone()
        store.set(f"of_rank_{rank}", str(rank))
        return [store.get(f"of_rank_{each}").decode() for each in range(context.topology.world_size)]


def test_the_ranks_of_the_default_group_share_its_store(run_ranks) -> None:
    assert run_ranks(written) == [["0", "1"]] * 2


def test_there_is_no_store_without_a_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="process group has not been initialized"):
        compat.default_store()


def names_of_a_group() -> list[bool]:
    with connect(StateSettings(device="cpu", watchdog=False)):
        made = dist.new_group()
        found = [compat.group_by_name(made.group_name) is made]
        dist.barrier()  # a group that one rank destroys while another still connects is an error there
        dist.destroy_process_group(made)
        with pytest.raises(RuntimeError, match=made.group_name):
            compat.group_by_name(made.group_name)
        return found


def test_a_group_is_found_by_its_name_until_it_is_destroyed(run_ranks) -> None:
    assert run_ranks(names_of_a_group) == [[True]] * 2


def test_a_profile_is_recorded_inside_its_block_alone() -> None:
    before = compat.is_profiled()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        torch.ones(1).sum()
        inside = compat.is_profiled()
    assert (before, inside, compat.is_profiled()) == (False, True, False)
