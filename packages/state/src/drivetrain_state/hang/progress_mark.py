"""The progress marks that other parts of drivetrain recognize."""

from enum import StrEnum


class ProgressMark(StrEnum):
    """The begin or end of a part of a step. The value is the text that the watchdog shows.

    Observers of a `ProgressRecord` recognize these members, and never a text of the same letters, which a program may
    use for work of its own.
    """

    # Reports of hangs show marks with !r, as the text that they are.
    __repr__ = str.__repr__

    FORWARD = "forward"
    FORWARD_DONE = "forward done"
    BACKWARD = "backward"
    BACKWARD_DONE = "backward done"
    OPTIMIZER_STEP = "optimizer step"
    AVERAGING = "averaging gradients at the window's close"
    AVERAGING_DONE = "gradients averaged"
    COMPARING = "comparing the order of blocks at the step"
    COMPARING_DONE = "order of blocks compared"
    CHECKPOINT = "checkpoint"
    CHECKPOINT_DONE = "checkpoint done"
    EXPORT = "export"
    EXPORT_DONE = "exported"
    GATHER = "gather"
    GATHER_DONE = "gather done"
    REDUCE = "reduce"
    REDUCE_DONE = "reduce done"
    BROADCAST = "broadcast"
    BROADCAST_DONE = "broadcast done"
    PAD = "pad_across_processes"
    PAD_DONE = "pad_across_processes done"
    GATHER_OBJECT = "gather_object"
    GATHER_OBJECT_DONE = "gather_object done"
    BROADCAST_OBJECT = "broadcast_object"
    BROADCAST_OBJECT_DONE = "broadcast_object done"
    BARRIER = "barrier"
    BARRIER_DONE = "barrier done"
    SCATTER = "scatter"
    SCATTER_DONE = "scatter done"
