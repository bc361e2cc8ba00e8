"""Models without values are refused before an engine is started."""

from torch import nn
from torch.optim import SGD

from deepspeed_backend.engines import Weights, backend, error_of


def on_meta() -> tuple[str, str]:
    good, bad = Weights(), nn.Sequential(nn.Linear(2, 2, device="meta"))
    with backend(stage=2) as engines:
        said = error_of(
            ValueError,
            lambda: engines.prepare([good, bad], [SGD(good.parameters()), SGD(bad.parameters())], []),
        )
        return said, type(good).__name__


def test_a_model_on_meta_is_refused_by_the_name_of_its_first_parameter(run_ranks) -> None:
    for said, kind in run_ranks(on_meta):
        assert "Sequential: 0.weight is on the meta device and has no values" in said
        assert kind == "Weights"
