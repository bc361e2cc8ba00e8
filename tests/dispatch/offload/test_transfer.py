"""A transfer ends once, for whoever waits for it and for whoever does not any more."""

from concurrent.futures import Future

import torch

from drivetrain_dispatch.offload.transfer import Copies, PendingTransfer


def test_a_transfer_that_some_do_not_need_any_more_arrives_for_the_others() -> None:
    work: Future[Copies] = Future()
    transfer = PendingTransfer(work=work)
    completion = transfer.completion()
    assert not completion.query()
    assert work.set_running_or_notify_cancel()  # as the thread does when it is its turn
    work.set_result(Copies([torch.ones(2)], None, (0.0, 1.0)))
    assert completion.query()
    assert transfer.wait()[0].sum() == 2
    assert transfer.span() == (0.0, 1.0)


def test_a_transfer_that_nobody_needs_any_more_is_not_begun() -> None:
    work: Future[Copies] = Future()
    transfer = PendingTransfer(work=work)
    completion = transfer.completion()
    del transfer
    assert work.cancelled()
    assert completion.query()
