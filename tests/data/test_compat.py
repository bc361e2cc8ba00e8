"""Each private name of torch is what data relies on: these tests tell when a new torch changes one."""

import pytest
from torch.utils.data import DataLoader

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
