"""Where a thread stands: whose frame is whose, and what it waits for."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_state.hang.stack import Frame, find_place, frame_owner, stack_text, thread_frames

SITE = "/venv/lib/python3.11/site-packages"


def frame(module: str, function: str = "main", expression: str = "", file: str = "", line: int = 3) -> Frame:
    path = file or f"{SITE}/{module.replace('.', '/')}.py"
    return Frame(module=module, file=path, line=line, function=function, expression=expression)


MAIN = frame("__main__", "main", file="/home/me/train.py", line=30)


LOCK = frame("threading", "wait", "waiter.acquire()", file=threading.__file__)


def test_the_stack_of_a_thread_ends_in_the_call_that_it_makes() -> None:
    reached, go = threading.Event(), threading.Event()

    def sleeper() -> None:
        reached.set()
        while not go.is_set():
            time.sleep(0.01)

    thread = threading.Thread(target=sleeper)
    thread.start()
    reached.wait()
    found: set[str] = set()
    while not found >= {"time.sleep(0.01)"}:  # a look may fall between two naps
        place = find_place(thread_frames(thread.ident or 0))
        found.add(place.call)
    go.set()
    thread.join()
    assert place.where.startswith("test_stack.py:")
    assert place.where.endswith(".<locals>.sleeper")
    assert place.waits_for == "nothing"


def test_a_thread_that_has_ended_has_no_place() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert thread_frames(thread.ident or 0) == ()
    assert find_place(()).where == "(its thread has ended)"


def test_the_own_stack_reads_like_a_traceback() -> None:
    text = stack_text(thread_frames(threading.get_ident()))
    assert "test_the_own_stack_reads_like_a_traceback" in text
    assert "text = stack_text(" in text


def test_frames_belong_to_whom_they_belong() -> None:
    assert frame_owner(MAIN) == "user"
    assert frame_owner(frame("torch.optim.adam")) == "torch"
    assert (
        frame_owner(frame("drivetrain_state.collectives.operations", file="/src/collectives.py"))
        == "drivetrain"
    )
    assert frame_owner(frame("transformers.modeling")) == "installed"
    assert frame_owner(frame("threading", file=threading.__file__)) == "stdlib"
    assert frame_owner(frame("test", file="/home/me/test.py")) == "user"


@pytest.mark.parametrize(
    ("inside", "call", "waits_for"),
    [
        ([], "read(path)", "nothing"),
        ([frame("torch.distributed.distributed_c10d", "all_reduce", "work.wait()")], "all_reduce", "ranks"),
        (
            [
                frame("drivetrain_state.collectives.operations", "gather"),
                frame("torch.distributed.c10d_logger", "_exception_logger.<locals>.wrapper"),
                frame("torch.distributed.distributed_c10d", "all_gather_object"),
                frame("torch.distributed.distributed_c10d", "all_gather", "work.wait()"),
            ],
            "all_gather_object",
            "ranks",
        ),
        (
            [
                frame("torch._tensor", "Tensor.backward"),
                frame("torch.autograd.graph", "_engine_run_backward"),
            ],
            "backward",
            "ranks",
        ),
        (
            [
                frame("torch.autograd.graph", "_engine_run_backward"),
                frame("torch.distributed.fsdp._fully_shard._fsdp_common", "_dynamo_disable.<locals>.wrapper"),
                frame(
                    "torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup.post_backward"
                ),
                frame("torch.distributed.c10d_logger", "_exception_logger.<locals>.wrapper"),
                frame("torch.distributed.distributed_c10d", "reduce_scatter_single", "work.wait()"),
            ],
            "reduce_scatter_single",
            "ranks",
        ),
        ([frame("torch.nn.parallel.distributed", "DDP.forward")], "DDP.forward", "ranks"),
        ([frame("torch.distributed.checkpoint.filesystem", "_write")], "filesystem._write", "nothing"),
        ([frame("torch.cuda", "synchronize", "torch._C.f()")], "torch._C.f()", "device"),
        ([frame("drivetrain_data.loader", "fetch"), LOCK], "loader.fetch", "nothing"),
        ([LOCK], "threading.wait", "nothing"),
    ],
)
def test_what_the_users_line_is_in(inside: list[Frame], call: str, waits_for: str) -> None:
    user = frame("__main__", "main", "read(path)", file="/home/me/train.py", line=30)
    place = find_place([frame("runpy", "_run_code", file="<frozen runpy>"), user, *inside])
    assert (place.where, place.call, place.waits_for) == ("train.py:30 main", call, waits_for)


@pytest.mark.parametrize(
    ("expression", "waits_for"),
    [
        ("loss.item()", "device"),
        ("(a * b).sum().cpu()", "device"),
        ("float(loss)", "device"),
        ("store.wait(['ready'], timedelta(seconds=5))", "ranks"),
        ("time.sleep(60)", "nothing"),
        ("item", "nothing"),
        ("", "nothing"),
    ],
)
def test_native_calls_are_known_by_their_source(expression: str, waits_for: str) -> None:
    user = frame("__main__", "main", expression, file="/home/me/train.py")
    assert find_place([user]).waits_for == waits_for


def test_the_users_own_code_comes_before_an_installed_package_inside_it() -> None:
    place = find_place(
        [MAIN, frame("transformers.trainer", "Trainer.step"), frame("torch.optim.adam", "Adam.step")]
    )
    assert (place.where, place.call) == ("train.py:30 main", "adam.Adam.step")


MODULES = st.sampled_from(
    ["__main__", "torch.optim.adam", "torch.distributed.distributed_c10d", "numpy.x", "drivetrain"]
)


@given(st.lists(st.builds(frame, MODULES, expression=st.text(max_size=60)), min_size=1, max_size=8))
def test_every_stack_has_a_place(frames: list[Frame]) -> None:
    place = find_place(frames)
    assert place.where
    assert len(place.call) <= 80
