"""Draw the time line of a real forward whose weights come while others compute.

    uv run python tools/draw_offload.py

It writes docs/images/offload.svg. The host computes in float32 with weights that are stored in bfloat16, so that each
is brought as an accelerator's would be: by a thread, into memory of its own, while the layers before it compute.
"""

import sys
from pathlib import Path

import torch
from torch import nn

from drivetrain_dispatch import dispatch_model, trace_offload

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "offload.svg"
WIDTH, NUM_LAYERS, NUM_ITEMS = 2048, 12, 64


def draw() -> str:
    """The picture, as SVG, of the third forward."""
    torch.set_num_threads(1)  # one processor computes, the other brings
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(NUM_LAYERS)))
    dispatch_model(model, {"": "cpu"}, dtypes=dict.fromkeys(dict(model.named_parameters()), torch.float32))
    batch = torch.randn(NUM_ITEMS, WIDTH)
    with torch.inference_mode():
        for _ in range(2):
            model(batch)
        with trace_offload(model) as trace:
            model(batch)
    return trace.svg()


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    target.write_text(draw())
    print(target)
