"""Each private name of torch is what data relies on: these tests tell when a new torch changes one."""

from torch.utils.data import DataLoader

from drivetrain_data.compat import ITERATOR_METHODS


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
