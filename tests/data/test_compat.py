"""Each private name of torch and torchdata is what data relies on: these tests tell when a new one changes."""

from typing import Any

import pytest
from torch.utils.data import DataLoader

from drivetrain_data import compat
from drivetrain_data.compat import ITERATOR_METHODS, fingerprint_of


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
