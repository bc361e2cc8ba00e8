"""The classes of transformers and diffusers that the sweep dispatches: those of the sweep of training, and more."""

from collections.abc import Callable

import torch
from torch import nn

from dispatch_sweep.denoising_cases import denoising_cases
from dispatch_sweep.mixed_cases import mixed_cases
from dispatch_sweep.perception_cases import perception_cases
from dispatch_sweep.text_cases import text_cases
from sweep.model_cases import ModelCase, model_cases

# Layers of torch, which have no save_pretrained.
_OF_TORCH = ("time_series_linear", "transformer", "lstm", "gru", "convolutions", "weight_norm")


def dispatched_cases() -> dict[str, ModelCase]:
    """Return every case by its name; no two of its weights that are made alike, as those of norms, stay alike."""
    cases: dict[str, ModelCase] = {}
    for more in (model_cases(), text_cases(), perception_cases(), mixed_cases(), denoising_cases()):
        if twice := cases.keys() & more.keys():
            raise ValueError(f"{sorted(twice)} would stand for two cases: give each a name of its own")
        cases |= more
    return {
        name: ModelCase(build=_uneven(case.build), batch=case.batch)
        for name, case in cases.items()
        if name not in _OF_TORCH
    }


def _uneven(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a builder whose models show it when a bias of zero or a scale of one comes from elsewhere."""

    def built() -> nn.Module:
        model = build()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point() and parameter.requires_grad:
                    parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        return model

    return built
