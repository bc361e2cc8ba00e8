"""Giving memory back."""

import gc

import torch


def free_memory() -> None:
    """Collect garbage, then hand the accelerator's cached memory back to its driver.

    What a name still refers to stays: delete the names first.
    """
    gc.collect()
    if torch.accelerator.current_accelerator(check_available=True) is not None:
        torch.accelerator.empty_cache()
