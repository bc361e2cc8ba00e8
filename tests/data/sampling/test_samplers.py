import torch
from torch.utils.data import DataLoader

from drivetrain_data import Permutation, PermutationSampler


def test_a_permutation_sampler_serves_a_plain_data_loader() -> None:
    sampler = PermutationSampler(20_000, seed=3)
    drawn = [
        int(i) for batch in DataLoader(torch.arange(20_000), batch_size=500, sampler=sampler) for i in batch
    ]
    assert len(sampler) == 20_000
    assert drawn[:5] == [Permutation(20_000, 3, 0)[i] for i in range(5)]
    assert sorted(drawn) == list(range(20_000))
    sampler.set_epoch(1)
    assert list(sampler) != drawn
