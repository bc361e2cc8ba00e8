"""What versions of torch lack: each line of the table in docs/design/platforms.md, held under the installed torch."""

import inspect
import warnings
from collections.abc import Callable
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from drivetrain_backends.fsdp.compat import sharded_parameters
from plain_loop.backends import context

PAGE = Path(__file__).parents[1] / "docs" / "design" / "platforms.md"
# Others, such as 2.10, are between those that are tried; a newer one lacks nothing.
TRIED = ("2.9", "2.11", "2.13", "2.15")
TORCH = ".".join(torch.__version__.split(".")[:2])


class Subclass(DTensor):
    __slots__ = ()


def has_views_of_a_subclass() -> bool:
    context()
    mesh = init_device_mesh("cpu", (1,))
    tensor = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
    tensor.__class__ = Subclass
    try:
        tensor.detach()
    except AssertionError:
        return False
    return True


def has_one_place_for_full_gradients() -> bool:
    context()
    model: Any = fully_shard(nn.Linear(2, 2))
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 2)).sum().backward()
    return all("unsharded_accumulated_grad" not in vars(p) for p in sharded_parameters(model))


def has_several_groups_in_a_block() -> bool:
    context()
    return hasattr(fully_shard(nn.Linear(2, 2))._get_fsdp_state(), "_fsdp_param_groups")


def finds_gradient_dtypes_at_each_forward() -> bool:
    return "_orig_dtype" not in FSDPParamGroup.__annotations__


def names_the_sync_of_buffers_by_when_it_is() -> bool:
    return "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters


def has_a_timeout_of_the_agents_shutdown() -> bool:
    return "timeout" in inspect.signature(LocalElasticAgent._shutdown).parameters


def has_a_public_grouped_product() -> bool:
    return hasattr(nn.functional, "grouped_mm")


def has_the_power_of_intels_devices() -> bool:
    return hasattr(torch.xpu, "power_draw")


def brings_setuptools_to_every_python() -> bool:
    return any(line.startswith("setuptools") and ";" not in line for line in requires("torch") or ())


def profiles_one_cycle_without_a_warning() -> bool:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with torch.profiler.profile() as profile:
            torch.ones(2) * 2
        profile.key_averages()
    return not any("clears events" in str(one.message) for one in said)


def counts_fused_attention_on_the_cpu() -> bool:
    x = torch.randn(1, 2, 8, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        nn.functional.scaled_dot_product_attention(x, x, x)
    return counter.get_total_flops() > 0


# What is there, and the versions that lack it.
FEATURES: dict[Callable[[], bool], tuple[str, ...]] = {
    has_views_of_a_subclass: ("2.9",),
    has_a_public_grouped_product: ("2.9",),
    brings_setuptools_to_every_python: ("2.9",),
    has_several_groups_in_a_block: ("2.9", "2.11"),
    names_the_sync_of_buffers_by_when_it_is: ("2.9", "2.11"),
    has_a_timeout_of_the_agents_shutdown: ("2.9", "2.11"),
    has_the_power_of_intels_devices: ("2.9", "2.11"),
    profiles_one_cycle_without_a_warning: ("2.11",),
    finds_gradient_dtypes_at_each_forward: ("2.9", "2.11", "2.13"),
    has_one_place_for_full_gradients: ("2.9", "2.11", "2.13"),
    counts_fused_attention_on_the_cpu: ("2.9", "2.11", "2.13"),
}


@pytest.mark.skipif(
    TORCH not in TRIED and int(TORCH[2:]) < int(TRIED[-1][2:]), reason="between two versions that are tried"
)
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.__name__)
def test_a_version_lacks_what_the_page_says(
    run_ranks: Callable[..., list[object]], feature: Callable[[], bool]
) -> None:
    assert run_ranks(feature, num_processes=1) == [TORCH not in FEATURES[feature]]


def test_every_line_of_the_page_has_its_test_and_every_test_its_line() -> None:
    rows = [row.split("|")[1:5] for row in PAGE.read_text().splitlines() if "`tests/test_torch_" in row]
    lacking = {test.rpartition("[")[2].strip(" `]"): who.strip() for who, _, _, test in rows}
    assert lacking == {feature.__name__: ", ".join(who) for feature, who in FEATURES.items()}
