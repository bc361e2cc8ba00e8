"""The private names of torch and Python are what memory relies on: these tests tell of changes."""

import os
import tracemalloc

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain_memory import compat


def test_a_module_keeps_its_tensors_in_these_tables() -> None:
    assert vars(nn.Linear(1, 1)).keys() >= compat.MODULE_TABLES


def test_the_workers_of_a_loader_are_known_and_end() -> None:
    loader = DataLoader(torch.arange(4), num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    ((pid, name),) = compat.workers_of(iterator).items()
    os.kill(pid, 0)
    assert name == "worker 0 of a DataLoader"
    assert compat.end_persistent_workers(loader) == 1
    with pytest.raises(ProcessLookupError, match="No such process"):
        os.kill(pid, 0)
    assert compat.workers_of(iter([])) == {}
    assert compat.end_persistent_workers(DataLoader(torch.arange(4))) == 0


def test_compiled_modules_are_known() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    assert not compat.is_compiled(model)
    assert compat.is_compiled(torch.compile(model, backend="eager"))
    model[0].compile(backend="eager")
    assert compat.is_compiled(model)


def test_the_frames_that_made_a_tensor_are_known() -> None:
    tracemalloc.start(4)
    try:
        made = torch.zeros(3)
        frames = compat.allocation_frames(made)
    finally:
        tracemalloc.stop()
    assert frames[0][0] == __file__
    assert compat.allocation_frames(made) == []


def test_without_cuda_there_is_no_pinned_memory() -> None:
    if not torch.cuda.is_available():
        assert compat.host_allocator_bytes() == 0


def test_a_sparse_tensor_with_repeated_entries_gives_its_parts_uncopied() -> None:
    indices, values = torch.tensor([[0, 0, 2]]), torch.ones(3, 4)
    tensor = torch.sparse_coo_tensor(indices, values, (5, 4), check_invariants=True)
    assert not tensor.is_coalesced()
    found_indices, found_values = compat.coo_parts(tensor)
    assert found_indices.tolist() == indices.tolist()
    assert found_values.data_ptr() == compat.coo_parts(tensor)[1].data_ptr()
    assert found_values.shape == (3, 4)
