import torch
from torch.utils.data import DataLoader, get_worker_info

from drivetrain_data import Shard, shard_loader


def set_up(_worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert len(info.dataset) == 6
    assert int(info.dataset[2]) == 2


def test_a_workers_set_up_sees_the_dataset() -> None:
    loader = shard_loader(
        DataLoader(
            torch.arange(6),  # pyright: ignore[reportArgumentType]
            batch_size=2,
            num_workers=1,
            persistent_workers=True,
            worker_init_fn=set_up,
        ),
        Shard(0, 1),
    )
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
