import threading
import time

import pytest

from drivetrain_checkpoint.storage.threads import Task, in_threads


@pytest.mark.parametrize("most", [1, 3, 20])
def test_results_come_in_order_and_no_more_run_at_once(most: int) -> None:
    running: list[int] = []
    seen: list[int] = []

    def work(item: int) -> int:
        running.append(item)
        seen.append(len(running))
        time.sleep(0.001 * (item % 3))
        running.remove(item)
        return item * 2

    assert list(in_threads(work, range(10), most=most)) == [item * 2 for item in range(10)]
    assert max(seen) <= most


def test_calls_run_at_the_same_time() -> None:
    met = threading.Barrier(3, timeout=60)
    assert len(list(in_threads(lambda _: met.wait(), range(3), most=3))) == 3


def test_the_first_failure_is_raised_when_all_that_began_have_ended() -> None:
    ended: list[int] = []

    def work(item: int) -> None:
        if item == 1:
            raise OSError("item 1")
        time.sleep(0.02)
        ended.append(item)

    with pytest.raises(OSError, match="item 1"):
        list(in_threads(work, range(10), most=3))
    assert set(ended) in ({0, 2}, {0, 2, 3})


def test_a_task_keeps_its_failure_until_it_is_asked() -> None:
    def fail() -> None:
        raise KeyboardInterrupt("asked to stop")

    task = Task(fail)
    task.wait()
    with pytest.raises(KeyboardInterrupt, match="asked to stop"):
        task.result()


def test_where_no_thread_can_be_had_the_call_is_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert Task(lambda: 7).result() == 7
    assert list(in_threads(lambda item: item + 1, range(3), most=2)) == [1, 2, 3]
    with pytest.raises(OSError, match="no space"):
        Task(lambda: fail(OSError("no space"))).result()


def fail(error: Exception) -> None:
    raise error
