"""What an epoch's tail means for losses and for gathering: decided on what every rank knows without asking."""

from torch import Tensor

from drivetrain_data import BatchPlan


def weigh(
    loss: Tensor, count: Tensor | float | None, batch: BatchPlan, rank: int
) -> tuple[Tensor, Tensor | float | None]:
    """Weigh a loss of the tail, where ranks hold different numbers of samples, or none.

    A mean is weighed by this rank's share of the samples, so that the mean over ranks is the mean over samples. A sum
    counts what it counts. A replayed batch weighs nothing either way, and its NaN stays out.

    Args:
        loss: Shape ().
        count: What `backward` was given.
        batch: What every rank knows of the current batch.
        rank: The index of this rank's shard.

    Returns:
        The loss and count to go on with.
    """
    if batch.replayed:
        nothing = torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, torch.zeros_like(loss))
        return nothing, None if count is None else 0.0
    if count is not None or batch.real_counts is None:
        return loss, count
    share = batch.real_counts[rank] * len(batch.real_counts) / sum(batch.real_counts)
    return loss * share, None
