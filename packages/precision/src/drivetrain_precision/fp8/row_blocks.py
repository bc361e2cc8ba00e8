"""Whole blocks of rows: what hardware asks of a product's size is kept by rows of zeros."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch import nn

    Base = nn.Linear
else:
    Base = object


class RowBlocks(Base):
    """A mixin of linear layers that compute on a multiple of `row_multiple` rows."""

    row_multiple: int

    def forward(self, input: Tensor) -> Tensor:
        """Return the output, of shape (..., out_features) for an input of shape (..., in_features)."""
        # Compiled code is in parts already, and asking for the mode would break its graph.
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            # Operations of several parts reach a tensor's class whole there, and torchao's classes know the parts.
            with torch.inference_mode(False), torch.no_grad():
                return self._output(input)
        return self._output(input)

    def _output(self, input: Tensor) -> Tensor:
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        num_rows = input.numel() // self.in_features
        # The gradient of the weight is a product over the rows, one for each token: a last, smaller batch would have a
        # number of rows that the hardware refuses. Rows of zeros change no scale and no sum.
        missing = -num_rows % self.row_multiple if num_rows else self.row_multiple
        if not missing:
            return self.product(input)
        rows = F.pad(input.reshape(num_rows, self.in_features), (0, 0, 0, missing))
        return self.product(rows)[:num_rows].reshape(*input.shape[:-1], self.out_features)

    def product(self, rows: Tensor) -> Tensor:
        """Return the output for an input of shape (..., in_features) with a multiple of `row_multiple` rows."""
        return super().forward(rows)
