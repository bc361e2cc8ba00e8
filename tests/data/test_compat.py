"""Each private name of torch and torchdata is what data relies on: these tests tell when a new one changes."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from drivetrain_data import compat
from drivetrain_data.compat import ITERATOR_METHODS, collate_with, fingerprint_of, stack_tensors


def test_a_loader_makes_its_iterator_by_these_methods() -> None:
    called: list[str] = []

    def noted(name: str):
        def call(self: DataLoader[int]) -> object:
            called.append(name)
            return getattr(DataLoader, name)(self)

        return call

    noting = type("Noting", (DataLoader,), {name: noted(name) for name in ITERATOR_METHODS})
    assert [batch.tolist() for batch in noting([1, 2, 3])] == [[1], [2], [3]]
    assert set(called) == ITERATOR_METHODS


def test_samples_are_collated_as_by_torch_with_another_function_that_stacks_tensors() -> None:
    stacked: list[int] = []

    def stack(tensors: Any, **options: Any) -> torch.Tensor:
        stacked.append(len(tensors))
        return stack_tensors(tensors, **options)

    samples = [{"x": (torch.ones(2), np.zeros(3)), "n": n, "s": "a"} for n in range(4)]
    found, expected = collate_with(stack, samples), default_collate(samples)
    assert stacked == [4, 4]
    assert str(found) == str(expected)


def test_a_dataset_of_hugging_face_tells_by_its_fingerprint_that_its_content_changed() -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_dict({"a": [1, 2]})
    assert isinstance(fingerprint_of(one), str)
    assert fingerprint_of(one) != fingerprint_of(one.add_column("b", [3, 4]))
    assert fingerprint_of([1, 2]) is None


# torchdata 0.11 calls what torch 2.15 deprecates.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_states_of_torchdatas_loader_have_these_keys(num_workers: int) -> None:
    module: Any = pytest.importorskip("torchdata.stateful_dataloader")
    loader = module.StatefulDataLoader([1, 2, 3], batch_size=2, num_workers=num_workers)
    next(iter(loader))
    state = loader.state_dict()
    main = state
    if num_workers:
        snapshot = state[compat.SNAPSHOT]
        assert (snapshot[compat.SNAPSHOT_STEP], state[compat.STEPS_SINCE]) == (1, 0)
        assert snapshot[compat.WORKER_SNAPSHOTS].keys() == {"worker_0"}
        main = snapshot[compat.MAIN_SNAPSHOT]
        assert main[compat.NUM_WORKERS] == 1
    else:
        assert state[compat.NUM_YIELDED] == 1
    assert state[compat.FINISHED] is False
    assert (main[compat.SAMPLER_YIELDED], main[compat.SAMPLER_STATE]) == (1, {"samples_yielded": 2})
