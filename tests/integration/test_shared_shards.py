"""Ranks that see the same batches, as in tensor parallelism: they read one shard, and it counts once."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from drivetrain import Accelerator
from drivetrain_state import ParallelDims
from plain_loop.accelerated import accelerator_of, weights_of

NUM_SAMPLES, BATCH_SIZE = 11, 3


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self):
        return iter(torch.arange(NUM_SAMPLES))


def data_of(kind: str) -> DataLoader[torch.Tensor]:
    if kind == "stream":
        return DataLoader(Stream(), batch_size=BATCH_SIZE)
    return DataLoader(torch.arange(NUM_SAMPLES), batch_size=BATCH_SIZE, shuffle=kind == "shuffled")  # pyright: ignore[reportArgumentType]


def read(even: str, kind: str) -> tuple[list[list[int]], list[int], list[str], list[float]]:
    """Each batch; and, gathered over the epoch, the samples, their names, and one number a batch."""
    accelerator = Accelerator(cpu=True, parallelism=ParallelDims(tensor=2), data={"even": even})
    loader = accelerator.prepare(data_of(kind))
    batches: list[list[int]] = []
    samples: list[int] = []
    names: list[str] = []
    means: list[float] = []
    for batch in loader:
        batches.append(batch.tolist())
        samples += accelerator.gather_for_metrics({"x": (batch, batch > 3)})["x"][0].tolist()
        names += accelerator.gather_for_metrics([str(int(i)) for i in batch], use_gather_object=True)
        means += accelerator.gather_for_metrics(batch.float().mean()).tolist()
    # After the loop too, one rank speaks for those that share a shard.
    num_shards = accelerator.num_processes // 2
    assert accelerator.gather_for_metrics(torch.tensor(1)).tolist() == [1] * num_shards
    return batches, samples, names, means


@pytest.mark.parametrize("num_processes", [2, 4])
@pytest.mark.parametrize("even", ["uneven", "pad", "drop"])
@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.default_cases("stream-uneven-2", "map-pad-4")
def test_each_sample_comes_once_though_two_ranks_read_it(
    run_ranks, num_processes: int, even: str, kind: str
) -> None:
    by_rank = run_ranks(read, even, kind, num_processes=num_processes)
    dropped = NUM_SAMPLES % (BATCH_SIZE * num_processes // 2) if even == "drop" else 0
    expected = list(range(NUM_SAMPLES - dropped))
    for rank, (batches, samples, names, means) in enumerate(by_rank):
        assert batches == by_rank[rank // 2 * 2][0]
        assert samples == expected
        assert names == [str(sample) for sample in expected]
        assert means == by_rank[0][3]
    assert len({str(batches) for batches, *_ in by_rank}) == num_processes // 2


@pytest.mark.parametrize("with_count", [False, True])
@pytest.mark.parametrize("num_processes", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (2, 4)])
@pytest.mark.default_cases("4-True")
def test_a_tails_gradient_is_the_mean_over_its_samples(num_processes: int, with_count: bool) -> None:
    accelerator = Accelerator(cpu=True, parallelism=ParallelDims(tensor=2))
    weight = nn.Linear(1, 1, bias=False)
    model, optimizer, loader = accelerator.prepare(
        weight, torch.optim.SGD(weight.parameters(), lr=1.0), data_of("map")
    )
    for batch in loader:
        before = weight.weight.item()
        losses = model(batch[:, None].float())
        if with_count:
            accelerator.backward(losses.sum(), count=len(batch))
        else:
            accelerator.backward(losses.mean())
        optimizer.step()
        optimizer.zero_grad()
        gradient = accelerator.gather_for_metrics(batch).float().mean().item()
        assert before - weight.weight.item() == pytest.approx(gradient, rel=1e-5)


@pytest.mark.ranks(4)
def test_a_logged_sum_counts_a_shared_batch_once(tmp_path: Path) -> None:
    accelerator = Accelerator(
        cpu=True, parallelism=ParallelDims(tensor=2), project_dir=tmp_path, log_with="jsonl"
    )
    accelerator.init_trackers("shared")
    accelerator.log({"samples": 3.0}, reduce="sum")
    accelerator.end_training()
    if accelerator.is_main_process:
        logged = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
        assert [line["samples"] for line in logged if "samples" in line] == [6.0]


def epoch(folder: Path, shared: bool, *, stop_at: int | None = None, resume: bool = False) -> list[int]:
    """Read a shuffled epoch, or the rest of it; save and stop at a step."""
    parallelism = ParallelDims(tensor=2) if shared else None
    accelerator = Accelerator(cpu=True, seed=5, project_dir=folder, parallelism=parallelism)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, data_of("shuffled"))
    if resume:
        accelerator.load_state()
    seen: list[int] = []
    for step, batch in enumerate(loader, start=1):
        accelerator.backward(model(batch[:, None].float()).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        seen += accelerator.gather_for_metrics(batch).tolist()
        if step == stop_at:
            accelerator.save_state()
            break
    return seen


def first_step(folder: Path) -> list[int]:
    return epoch(folder, True, stop_at=1)


def rest(folder: Path, shared: bool) -> list[int]:
    return epoch(folder, shared, resume=True)


@pytest.mark.parametrize("num_processes", [2, 4])
@pytest.mark.default_cases("2")
def test_the_rest_of_an_epoch_is_read_without_tensor_parallelism(
    run_ranks, tmp_path: Path, num_processes: int
) -> None:
    first = run_ranks(first_step, tmp_path, num_processes=num_processes)
    assert len(first[0]) == BATCH_SIZE * num_processes // 2
    again = run_ranks(rest, tmp_path, False, num_processes=1)
    assert sorted(first[0] + again[0]) == list(range(NUM_SAMPLES))
    whole = run_ranks(epoch, tmp_path / "whole", False, num_processes=1)
    assert first[0] + again[0] == whole[0]


def train_on(folder: Path, backend: str, parallelism: ParallelDims | None, *, resumes: bool) -> list[float]:
    """Train two steps and save, or load and train two more; return the weights after them."""
    with accelerator_of(backend, project_dir=folder, parallelism=parallelism) as accelerator:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 5), nn.Linear(5, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, data_of("map"))
        if resumes:
            assert accelerator.load_state() == 2
        for step, batch in enumerate(loader):
            accelerator.backward(model(batch[:, None].float()).square().sum(), count=len(batch))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and not resumes:
                accelerator.save_state()
                break
        return torch.cat([each.flatten() for each in weights_of(accelerator, model).values()]).tolist()


def start(folder: Path, backend: str, parallelism: ParallelDims | None) -> list[float]:
    return train_on(folder, backend, parallelism, resumes=False)


def go_on(folder: Path, backend: str, parallelism: ParallelDims | None) -> list[float]:
    return train_on(folder, backend, parallelism, resumes=True)


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
@pytest.mark.default_cases("fsdp")
def test_a_checkpoint_of_copies_is_one_of_the_ranks_that_read(
    run_ranks, tmp_path: Path, backend: str
) -> None:
    mesh = ParallelDims(data=1, shard=2, tensor=2) if backend == "fsdp" else ParallelDims(data=2, tensor=2)
    wide, narrow = tmp_path / "wide", tmp_path / "narrow"
    first = run_ranks(start, wide, backend, mesh, num_processes=4)
    assert first == [first[0]] * 4
    plain = run_ranks(start, narrow, backend, None, num_processes=2)
    assert first[0] == pytest.approx(plain[0], rel=1e-5)
    went_on = run_ranks(go_on, wide, backend, mesh, num_processes=4)
    assert went_on == [went_on[0]] * 4
    # Two ranks go on from the checkpoint of four.
    assert run_ranks(go_on, wide, backend, None, num_processes=2)[0] == pytest.approx(went_on[0], rel=1e-5)
