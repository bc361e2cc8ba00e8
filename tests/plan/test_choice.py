from typing import Any

import pytest

from drivetrain_plan import PlanChoice, pins_of


@pytest.mark.parametrize(
    ("section", "said", "pins"),
    [
        ("fsdp", {}, {}),
        ("fsdp", {"offload": True, "prefetch": 2}, {"offload": "host"}),
        ("fsdp", {"offload": False}, {"offload": "none"}),
        ("deepspeed", {"offload_optimizer": "cpu", "offload_param": "none"}, {"offload": "host"}),
        ("deepspeed", {"offload_optimizer": "cpu", "offload_param": "nvme"}, {"offload": "nvme"}),
        ("deepspeed", {"offload_optimizer": "none"}, {"offload": "none"}),
    ],
)
def test_said_settings_are_fixed_parts_of_a_choice(
    section: str, said: dict[str, Any], pins: dict[str, Any]
) -> None:
    assert pins_of(section, said) == {"backend": section, **pins}


def test_replicas_of_shards_need_no_mesh_of_the_run() -> None:
    hybrid = PlanChoice(data=2, shard=4, strategy="full_shard")
    assert hybrid.sections() == {
        "run": {"backend": "fsdp", "mixed_precision": "no"},
        "fsdp": {"strategy": "hybrid_shard", "shard_size": 4},
    }
    divided = PlanChoice(data=2, shard=4, tensor=2, strategy="full_shard").sections()
    assert divided["parallel"] == {"data": 2, "shard": 4, "tensor": 2}
    assert divided["fsdp"] == {"strategy": "hybrid_shard"}
