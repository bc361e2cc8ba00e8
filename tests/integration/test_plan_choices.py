import pytest

from drivetrain.settings import RunSettings
from drivetrain_backends.settings import FSDPSettings, ModelSettings
from drivetrain_deepspeed.settings import DeepSpeedSettings
from drivetrain_plan.choice import PlanChoice
from drivetrain_state.mesh import ParallelDims

CHOICES = [
    (PlanChoice(), "single", "one device"),
    (PlanChoice(data=4), "ddp", "DDP 4"),
    (PlanChoice(shard=8, strategy="full_shard"), "fsdp", "FSDP 8"),
    (PlanChoice(data=2, shard=4, strategy="full_shard", checkpointing="full"), "fsdp", "DDP 2 x FSDP 4, recomputed"),
    (PlanChoice(tensor=2), "single", "tensor 2"),
    (PlanChoice(data=2, context=2), "ddp", "DDP 2 x context 2"),
    (PlanChoice(shard=2, tensor=2, strategy="shard_grad_op", sequence=True), "fsdp",
     "FSDP grad-op 2 x tensor 2, sequence"),
    (PlanChoice(shard=4, strategy="zero2", offload="host"), "deepspeed", "ZeRO 2 of 4, offloaded to host"),
    (PlanChoice(shard=4, strategy="zero3", offload="nvme"), "deepspeed", "ZeRO 3 of 4, offloaded to nvme"),
    (PlanChoice(data=2, checkpointing="full"), "fsdp", "DDP 2, recomputed"),
]  # fmt: skip


@pytest.mark.parametrize(("choice", "backend", "name"), CHOICES)
def test_a_choice_has_settings_that_a_run_accepts(choice: PlanChoice, backend: str, name: str) -> None:
    assert (choice.backend, choice.name) == (backend, name)
    sections = choice.sections("bf16")
    kinds = {
        "run": RunSettings, "parallel": ParallelDims, "fsdp": FSDPSettings, "deepspeed": DeepSpeedSettings,
        "model": ModelSettings,
    }  # fmt: skip
    for section, fields in sections.items():
        kinds[section](**fields)
    dims = choice.dims()
    assert (ParallelDims() if dims is None else dims).plan(choice.num_devices)
    assert choice.mesh().sizes == (1, choice.data, choice.shard, choice.context, choice.tensor)
