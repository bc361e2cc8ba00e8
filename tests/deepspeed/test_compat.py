"""Each undocumented name of DeepSpeed is what the backend relies on: a new version that changes one fails here."""

import gc
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from deepspeed_engines import Weights, backend, engine_of, take_step, weights
from drivetrain_deepspeed import compat

STAGES = [("no", 1), ("no", 2), ("no", 3), ("bf16", 1), ("bf16", 2)]
X = torch.tensor([3.0, 0.0, 4.0])  # the gradient of `Weights`, of norm 5


pytestmark = pytest.mark.ranks(2)
EACH = pytest.mark.parametrize(("mode", "stage"), STAGES)


def add_gradients(prepared: Any) -> None:
    """Run a backward, and leave out the zeros that the backend puts where DeepSpeed leaves no gradient."""
    prepared.backward(prepared.model(X))
    if prepared.engine.zero_optimization_partition_gradients():
        prepared.engine.module.w.grad = None


def close_and_step(prepared: Any) -> list[float]:
    """Step on a window closed by hand; return the weights."""
    compat.close_window(prepared.engine)
    prepared.engine.step()
    return weights(prepared)


STEPPED = [-2.0, 1.0, -3.0]  # by the gradient X


@pytest.mark.parametrize(
    ("stage", "more"), [(0, [[], []]), (2, [[0, [1.0, 1.0]], [2, [1.0]]]), (3, [[2, 2], [2, 2]])]
)
def test_parameters_tell_their_shape_and_their_masters(stage: int, more: list) -> None:
    model = Weights()
    model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    with backend(stage=stage) as made:
        made.prepare([model], [SGD([model.w], lr=1.0)], [])
        w = model.w
        assert (tuple(compat.full_shape(w)), compat.num_elements(w)) == ((3,), 3)
        assert compat.is_divided(w) is (stage == 3)
        assert compat.has_master(w) is (stage > 0)
        assert not compat.has_master(model.frozen)
        found: list[object] = []
        if stage:
            assert dist.get_world_size(compat.group_of(w)) == 2
        if compat.is_divided(w):
            found = [compat.divided_part(w).numel(), compat.part_size(w)]
        elif stage:
            start, part = compat.master_fragment(w, None) or (0, torch.empty(0))
            found = [start, part.tolist()]
        assert found == more[dist.get_rank()]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_steps_on_a_window_closed_by_hand(stage: int) -> None:
    said: list[str] = []
    with engine_of(stage=stage) as (_, _, prepared):
        engine = prepared.engine
        compat.call_before_backward(engine, lambda: said.append("backward"))
        add_gradients(prepared)
        assert close_and_step(prepared) == STEPPED
        assert said == ["backward"]
        assert (compat.applied_zero(engine).stage, compat.accumulation_dtype(engine)) == (stage, "fp32")
        assert not compat.offloads_gradients(engine)


def test_an_engine_tells_that_it_offloads() -> None:
    with engine_of(stage=2, offload_optimizer="cpu") as (_, _, prepared):
        assert compat.offloads_gradients(prepared.engine)


def test_groups_that_ended_are_dropped() -> None:
    from deepspeed.utils import groups

    with engine_of(stage=2):
        compat.drop_ended_groups()
        assert groups._WORLD_GROUP is not None
        groups._WORLD_GROUP = dist.new_group()
        dist.destroy_process_group(groups._WORLD_GROUP)
        compat.drop_ended_groups()
        assert groups._WORLD_GROUP is None


@EACH
def test_each_rank_has_the_master_of_its_flat_part(mode: str, stage: int) -> None:
    with engine_of(stage=stage, mode=mode) as (_, model, prepared):
        optimizer, w = prepared.engine.optimizer, model.w
        master = compat.master_of(optimizer, 0, w)
        if stage < 3:
            flat = compat.flat_groups(optimizer)
            (parts,), (own,), ((parameter,),) = flat.parts, flat.masters, flat.parameters
            assert own is master
            assert parameter is w
            assert len(flat.ranks) == 1
            part = parts[dist.get_rank(flat.ranks[0])]
            assert part.numel() == own.numel()
            part.detach().fill_(7.0)
            dist.barrier()
            # The first element is of rank 0's part, which is a view of the same memory.
            assert int(w[0]) == (7 if dist.get_rank() == 0 else 1)
        assert master.dtype == torch.float32
        parts = [torch.empty_like(master) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, master.detach())
        # Two ranks do not divide 3 elements evenly, and stage 3 pads with memory as it is.
        assert torch.cat(parts)[:3].tolist() == [1.0, 1.0, 1.0]


def test_the_states_of_all_groups_are_found_once_they_are_linked() -> None:
    from deepspeed.utils import safe_get_full_optimizer_state

    with backend(stage=2) as made:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        groups = [{"params": list(layer.parameters())} for layer in model]
        (prepared,) = made.prepare([model], [AdamW(groups, lr=0.1)], [])
        prepared.backward(prepared.model(torch.ones(1, 2)).sum())
        prepared.optimizers[0].step()
        compat.link_states(prepared.engine.optimizer)
        for parameter in model.parameters():
            assert safe_get_full_optimizer_state(parameter, "exp_avg") is not None


@pytest.mark.parametrize(
    ("mode", "stage", "clip", "divisor", "stepped"),
    [
        *((*each, 0.0, 1.0, STEPPED) for each in STAGES),
        *((*each, 2.5, 1.0, [-0.5, 1.0, -1.0]) for each in STAGES),
        *((*each, 0.0, 0.5, [-5.0, 1.0, -7.0]) for each in STAGES[:3]),
    ],
)
def test_a_step_clips_and_divides_by_what_was_set_last(
    mode: str, stage: int, clip: float, divisor: float, stepped: list[float]
) -> None:
    with engine_of(stage=stage, mode=mode) as (_, _, prepared):
        optimizer = prepared.engine.optimizer
        add_gradients(prepared)
        compat.close_window(prepared.engine)
        if compat.adds_up_flat(optimizer):
            assert sum(float(one.sum()) for one in compat.flat_gradients(optimizer)) == 7.0
        else:
            compat.divide_at_step(optimizer, divisor)
        compat.clip_at_step(optimizer, clip)
        assert float(compat.global_norm(optimizer)) == 5.0
        prepared.engine.step()
        assert weights(prepared) == pytest.approx(stepped, abs=1e-4)


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_step_without_a_norm(stage: int) -> None:
    with engine_of(stage=stage) as (_, _, prepared):
        optimizer = prepared.engine.optimizer
        assert compat.can_skip_norm(optimizer)
        compat.measure_at_step(optimizer, False)
        add_gradients(prepared)
        assert close_and_step(prepared) == STEPPED
        assert not compat.can_skip_norm(optimizer)


@pytest.mark.parametrize(("mode", "stage"), [("no", 0), *STAGES])
def test_dropped_gradients_are_in_no_step(mode: str, stage: int) -> None:
    with engine_of(stage=stage, mode=mode) as (_, _, prepared):
        prepared.backward(prepared.model(100 * X))
        prepared.optimizers[0].zero_grad()  # by `drop_gradients`
        add_gradients(prepared)
        assert close_and_step(prepared) == STEPPED


@EACH
def test_reductions_are_seen_before_they_run(mode: str, stage: int) -> None:
    said: list[object] = []
    with engine_of(stage=stage, mode=mode, accumulation=2) as (made, model, prepared):
        optimizer = prepared.engine.optimizer
        in_backward = stage > 1

        def tell() -> None:
            if not in_backward:
                said.append("reduce")
                return
            waiting: list[Tensor] = compat.waiting_parameters(optimizer, stage)
            assert all(one is model.w for one in waiting)
            said.append((compat.backward_of_window(optimizer), len(waiting)))

        def last(reduce: Any) -> None:
            said.append("last")
            reduce()

        assert compat.watch_reductions(optimizer, stage, before=tell, last=last) is in_backward
        for _ in range(2):
            made.window.begin()
            prepared.backward(prepared.model(X))
        compat.close_window(prepared.engine)
    assert said == (["reduce"] if stage == 1 else ["last", (0, 1), "last", (1, 1)])


def test_what_stage_3_keeps_of_a_gradient_is_zeroed() -> None:
    with engine_of(stage=3) as (_, model, prepared):
        add_gradients(prepared)
        compat.close_window(prepared.engine)
        compat.zero_gradient_of_stage_3(prepared.engine.optimizer, model.w)
        assert float(compat.global_norm(prepared.engine.optimizer)) == 0.0


@pytest.mark.parametrize("mode", ["no", "bf16"])
def test_stage_1_takes_zeros_for_a_gradient(mode: str) -> None:
    with engine_of(stage=1, mode=mode) as (_, model, prepared):
        optimizer = prepared.engine.optimizer
        (lacking,) = compat.parameters_without_gradient(optimizer, [model.w])
        assert lacking is model.w
        compat.fill_gradients(optimizer, [model.w])
        assert not compat.parameters_without_gradient(optimizer, [model.w])
        assert not compat.adds_up_flat(optimizer) or len(compat.flat_gradients(optimizer)) == 1


@pytest.mark.parametrize("stage", [1, 3])
def test_no_model_outlives_its_engine(stage: int) -> None:
    with engine_of(stage=stage) as (_, model, prepared):
        watched = ref(model)
        take_step(prepared, prepared.model(X))
    del model, prepared
    gc.collect()
    assert watched() is None
