"""Folds and sweeps: Accelerators made one after another in one program, each after the end of the one before."""

import textwrap

import pytest
from torch.distributed import TCPStore

FOLD = """
import os, sys, torch
from drivetrain import Accelerator
rank = int(os.environ["RANK"])
if len(sys.argv) > 1:  # the port of a store that outlives the groups, as the agent of a launcher hosts it
    os.environ.update(MASTER_PORT=sys.argv[1], TORCHELASTIC_USE_AGENT_STORE="True")

def fold(backend, fails_on=()):
    accelerator = Accelerator(
        cpu=True,
        backend=backend,
        sections={"run": {"show_plan": False}, "state": {"timeout_seconds": 60}},
    )
    try:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loss = model(torch.full((2, 2), 1.0 + rank)).sum()
        if rank in fails_on:
            raise ValueError("as a fold may")
        accelerator.backward(loss)
        optimizer.step()
        return accelerator.reduce(loss.detach()).item()
    finally:
        accelerator.end_training()
"""


@pytest.mark.slow
def test_three_in_a_row_meet_again_where_rank_0_hosts_the_store(run_ranks_script) -> None:
    source = FOLD + "print(len({fold('ddp') for _ in range(3)}), fold('fsdp') == fold('fsdp'))"
    for done in run_ranks_script(source, fresh=True):
        assert (done.returncode, done.stdout, done.stderr) == (0, "1 True\n", ""), done


@pytest.mark.slow
def test_three_in_a_row_meet_again_in_the_store_of_an_agent(run_ranks_script) -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    source = FOLD + "print(len({fold('ddp') for _ in range(3)}), fold('fsdp') == fold('fsdp'))"
    for done in run_ranks_script(source, str(agent.port)):
        assert (done.returncode, done.stdout, done.stderr) == (0, "1 True\n", ""), done


@pytest.mark.slow
def test_the_next_one_trains_after_an_error_that_was_caught(run_ranks_script) -> None:
    source = FOLD + textwrap.dedent("""
        agreed = fold("ddp")
        for fails_on in ((0, 1), (1,)):
            try:
                fold("ddp", fails_on=fails_on)
            except (ValueError, RuntimeError) as error:
                failed = type(error).__name__
            print(failed, fold("ddp") == agreed)
        try:
            fold("ddp", fails_on=(0, 1))
        except ValueError as error:
            kept = error  # and with it the frames, and all that they hold
        print(fold("ddp") == agreed)
    """)
    first, second = run_ranks_script(source)
    assert first.stdout == "ValueError True\nRuntimeError True\nTrue\n", (first, second)
    assert second.stdout == "ValueError True\nValueError True\nTrue\n", (first, second)
    assert (first.returncode, second.returncode) == (0, 0), (first, second)


@pytest.mark.slow
@pytest.mark.usefixtures("deepspeed_operators")
@pytest.mark.parametrize("order", ["deepspeed deepspeed deepspeed", "ddp deepspeed fsdp ddp deepspeed"])
def test_backends_follow_each_other(run_ranks_script, order: str) -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    source = FOLD + f"print(len({{fold(backend) for backend in {order.split()}}}))"
    for done in run_ranks_script(source, str(agent.port), timeout_seconds=150):
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "1"), done
