from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain_data import (
    AmbiguousLoaderError,
    LoaderTracker,
    Shard,
    ShardedLoader,
    shard_loader,
    trim,
    trim_objects,
)


def loader(activity: LoaderTracker, length: int, count: int = 4) -> ShardedLoader[Any]:
    return shard_loader(DataLoader(torch.arange(length), batch_size=2), Shard(0, count), activity=activity)


def test_an_inner_loop_takes_over_and_gives_back() -> None:
    activity = LoaderTracker()
    train, evaluate = loader(activity, 24), loader(activity, 9)
    for _ in train:
        assert activity.current is train
        for _ in evaluate:
            assert activity.current is evaluate
            assert activity.plan() is evaluate.current
            assert activity.plan(train) is train.current
        assert activity.current is train
    assert activity.current is None
    assert activity.plan() is None


def test_a_loop_that_is_left_or_fails_gives_back() -> None:
    activity = LoaderTracker()
    train, evaluate = loader(activity, 24), loader(activity, 9)

    def fail() -> None:
        for _ in evaluate:
            raise KeyError("in the loop")

    for _ in train:
        for _ in evaluate:
            break
        assert activity.current is train
        with pytest.raises(KeyError, match="in the loop"):
            fail()
        assert activity.current is train


def test_zipped_loaders_of_different_steps_need_a_name() -> None:
    activity = LoaderTracker()
    one, other = loader(activity, 17), loader(activity, 24)
    for step, _ in enumerate(zip(one, other, strict=True)):
        if step < 2:
            assert activity.plan() is other.current
            continue
        with pytest.raises(
            AmbiguousLoaderError, match=r"\(2\+2\+2\+2 and 1\+0\+0\+0\); say whose batch this is"
        ):
            activity.plan()
        gathered = torch.arange(4)
        assert trim(activity.plan(one), gathered).tolist() == [0]
        assert trim_objects(activity.plan(other), [["a", "b"]] * 4) == ["a", "b"] * 4


def test_zipped_loaders_of_equal_steps_need_no_name_and_leave_all_clear() -> None:
    activity = LoaderTracker()
    one, other = loader(activity, 16), loader(activity, 16)
    for _ in zip(one, other, strict=True):
        assert activity.plan() == one.current == other.current
    assert activity.current is None
    for _ in one:
        assert activity.plan() is one.current


def test_loaders_read_in_turns_are_those_of_one_loop() -> None:
    activity = LoaderTracker()
    one, other, inner = loader(activity, 24), loader(activity, 32), loader(activity, 8)
    assert activity.read_in_turns() == []
    for step, _ in enumerate(zip(one, other, strict=False)):
        assert activity.read_in_turns() == ([one, other] if step else [other])
        for _ in inner:
            assert activity.read_in_turns() == [inner]
            assert set(activity.being_read) == {one, other, inner}
    assert activity.read_in_turns() == []
    assert [each.num_received for each in (one, other, inner)] == [3, 3, 3]


def test_only_a_loop_that_asks_for_more_than_its_epoch_has_is_finished() -> None:
    activity = LoaderTracker()
    finished: list[object] = []
    activity.on_finish = finished.append
    one = loader(activity, 16)
    list(zip(range(2), one, strict=False))
    assert finished == []
    list(one)
    assert finished == [one]


def test_a_step_is_marked_on_every_loader_being_read() -> None:
    activity = LoaderTracker()
    outer, inner, idle = (loader(activity, 4, count=1) for _ in range(3))
    list(idle)
    idle.set_epoch(0)
    for _ in outer:
        for _ in inner:
            activity.mark_stepped()
            break
        break
    assert [each.state_dict(stepped=True)["position"] for each in (outer, inner, idle)] == [2, 2, 0]


def test_loaders_that_were_zipped_before_nest_as_any_others() -> None:
    activity = LoaderTracker()
    one, other = loader(activity, 8), loader(activity, 3)
    list(zip(one, other, strict=False))
    for _ in one:
        for _ in other:
            assert activity.plan() is other.current
        assert activity.plan() is one.current


def test_zipped_loaders_of_other_batch_sizes_need_no_name_while_nothing_is_to_be_trimmed() -> None:
    activity = LoaderTracker()
    one = loader(activity, 16)
    other = shard_loader(DataLoader(torch.arange(32), batch_size=4), Shard(0, 4), activity=activity)
    plans = [(activity.plan(), other.current) for _ in zip(one, other, strict=True)]
    assert plans == [(other_plan, other_plan) for _, other_plan in plans]
    assert len(plans) == 2
