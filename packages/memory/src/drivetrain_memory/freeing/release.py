"""Free unused and cached memory."""

import gc

import torch


def free_memory() -> None:
    """Collect garbage, then return the accelerator's cached memory to its driver.

    Objects that are still referenced stay allocated: delete the references first.
    """
    gc.collect()
    if torch.accelerator.current_accelerator(check_available=True) is not None:
        torch.accelerator.empty_cache()
