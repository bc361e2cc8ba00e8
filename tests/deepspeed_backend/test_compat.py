"""Each undocumented name of DeepSpeed is what the backend relies on: a new version that changes one fails here."""

import gc
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from deepspeed_backend.engines import Weights, backend, weights
from drivetrain_backends.deepspeed import compat

STAGES = [("no", 1), ("no", 2), ("no", 3), ("bf16", 1), ("bf16", 2)]
X = torch.tensor([3.0, 0.0, 4.0])  # the gradient of `Weights`, of norm 5
SUM_OF_THREE = 3  # elements: two ranks do not divide them evenly


@contextmanager
def trained(stage: int, *, mode: str = "no", accumulation: int = 1, **settings: Any) -> Generator[Any]:
    with backend(mode=mode, accumulation=accumulation, stage=stage, **settings) as made:
        model = Weights()
        (prepared,) = made.prepare([model], [SGD(model.parameters(), lr=1.0)], [])
        yield prepared


def add_gradients(prepared: Any) -> None:
    """Run a backward, and leave out the zeros that the backend puts where DeepSpeed leaves no gradient."""
    prepared.backward(prepared.model(X))
    if prepared.engine.zero_optimization_partition_gradients():
        prepared.engine.module.w.grad = None


def parameters(stage: int) -> list[object]:
    with backend(stage=stage) as made:
        model = Weights()
        model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        made.prepare([model], [SGD([model.w], lr=1.0)], [])
        w = model.w
        found: list[object] = [
            tuple(compat.full_shape(w)),
            compat.num_elements(w),
            compat.is_divided(w),
            compat.has_master(w),
            compat.has_master(model.frozen),
        ]
        if stage:
            assert dist.get_world_size(compat.group_of(w)) == 2
        if compat.is_divided(w):
            found.append((compat.divided_part(w).numel(), compat.part_size(w)))
        elif stage:
            start, part = compat.master_fragment(w, None) or (0, torch.empty(0))
            found.append((start, part.tolist()))
        return found


@pytest.mark.parametrize(
    ("stage", "more"),
    [(0, [[], []]), (2, [[(0, [1.0, 1.0])], [(2, [1.0])]]), (3, [[(2, 2)], [(2, 2)]])],
)
def test_parameters_tell_their_shape_and_their_masters(run_ranks, stage: int, more: list) -> None:
    common = [(3,), 3, stage == 3, stage > 0, False]
    assert run_ranks(parameters, stage) == [[*common, *own] for own in more]


def engines(stage: int) -> list[object]:
    said: list[str] = []
    with trained(stage) as prepared:
        engine = prepared.engine
        compat.call_before_backward(engine, lambda: said.append("backward"))
        add_gradients(prepared)
        compat.close_window(engine)
        engine.step()
        return [
            said,
            weights(prepared),
            compat.applied_zero(engine).stage,
            compat.accumulation_dtype(engine),
            compat.offloads_gradients(engine),
        ]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_steps_on_a_window_closed_by_hand(run_ranks, stage: int) -> None:
    assert run_ranks(engines, stage) == [[["backward"], [-2.0, 1.0, -3.0], stage, "fp32", False]] * 2


def offloaded() -> bool:
    with trained(2, offload_optimizer="cpu") as prepared:
        return compat.offloads_gradients(prepared.engine)


def test_an_engine_tells_that_it_offloads(run_ranks) -> None:
    assert run_ranks(offloaded) == [True, True]


def kept_groups() -> list[bool]:
    from deepspeed.utils import groups

    with trained(2):
        compat.drop_ended_groups()
        kept = [groups._WORLD_GROUP is not None]
        groups._WORLD_GROUP = dist.new_group()
        dist.destroy_process_group(groups._WORLD_GROUP)
        compat.drop_ended_groups()
        return [*kept, groups._WORLD_GROUP is not None]


def test_groups_that_ended_are_dropped(run_ranks) -> None:
    assert run_ranks(kept_groups) == [[True, False]] * 2


def masters(mode: str, stage: int) -> list[object]:
    with trained(stage, mode=mode) as prepared:
        optimizer = prepared.engine.optimizer
        (w,) = prepared.engine.module.parameters()
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
            first = int(w[0])  # of rank 0's part, which is a view of the same memory
            assert first == (7 if dist.get_rank() == 0 else 1)
        return [master.dtype, int(master.sum())]


@pytest.mark.parametrize(("mode", "stage"), STAGES)
def test_each_rank_has_the_master_of_its_flat_part(run_ranks, mode: str, stage: int) -> None:
    (dtype, first), (_, second) = run_ranks(masters, mode, stage)
    assert dtype == torch.float32
    assert first + second == SUM_OF_THREE


def linked() -> list[bool]:
    from deepspeed.utils import safe_get_full_optimizer_state

    with backend(stage=2) as made:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        groups = [{"params": list(layer.parameters())} for layer in model]
        (prepared,) = made.prepare([model], [AdamW(groups, lr=0.1)], [])
        prepared.backward(prepared.model(torch.ones(1, 2)).sum())
        prepared.optimizers[0].step()
        compat.link_states(prepared.engine.optimizer)
        return [safe_get_full_optimizer_state(p, "exp_avg") is not None for p in model.parameters()]


def test_the_states_of_all_groups_are_found_once_they_are_linked(run_ranks) -> None:
    assert run_ranks(linked) == [[True] * 4] * 2


def norm_and_step(mode: str, stage: int, clip: float = 0.0, divisor: float = 1.0) -> list[object]:
    with trained(stage, mode=mode) as prepared:
        engine = prepared.engine
        add_gradients(prepared)
        compat.close_window(engine)
        flat = compat.adds_up_flat(engine.optimizer)
        if flat:
            assert sum(float(one.sum()) for one in compat.flat_gradients(engine.optimizer)) == 7.0
        else:
            compat.divide_at_step(engine.optimizer, divisor)
        compat.clip_at_step(engine.optimizer, clip)
        norm = float(compat.global_norm(engine.optimizer))
        engine.step()
        return [norm, [round(value, 4) for value in weights(prepared)]]


@pytest.mark.parametrize(("mode", "stage"), STAGES)
def test_a_step_clips_to_the_norm_that_was_set_last(run_ranks, mode: str, stage: int) -> None:
    assert run_ranks(norm_and_step, mode, stage) == [[5.0, [-2.0, 1.0, -3.0]]] * 2
    assert run_ranks(norm_and_step, mode, stage, 2.5) == [[5.0, [-0.5, 1.0, -1.0]]] * 2


@pytest.mark.parametrize(("mode", "stage"), STAGES[:3])
def test_a_step_divides_by_the_scale_that_was_set_last(run_ranks, mode: str, stage: int) -> None:
    assert run_ranks(norm_and_step, mode, stage, 0.0, 0.5) == [[5.0, [-5.0, 1.0, -7.0]]] * 2


def skipped_norm(stage: int) -> list[object]:
    with trained(stage) as prepared:
        optimizer = prepared.engine.optimizer
        can = compat.can_skip_norm(optimizer)
        compat.measure_at_step(optimizer, False)
        add_gradients(prepared)
        compat.close_window(prepared.engine)
        prepared.engine.step()
        return [can, compat.can_skip_norm(optimizer), weights(prepared)]


def test_stages_1_and_2_step_without_a_norm(run_ranks) -> None:
    for stage in (1, 2):
        assert run_ranks(skipped_norm, stage) == [[True, False, [-2.0, 1.0, -3.0]]] * 2


def dropped(mode: str, stage: int) -> list[float]:
    with trained(stage, mode=mode) as prepared:
        prepared.backward(prepared.model(100 * X))
        prepared.optimizers[0].zero_grad()  # by `drop_gradients`
        add_gradients(prepared)
        compat.close_window(prepared.engine)
        prepared.engine.step()
        return weights(prepared)


@pytest.mark.parametrize(("mode", "stage"), [("no", 0), *STAGES])
def test_dropped_gradients_are_in_no_step(run_ranks, mode: str, stage: int) -> None:
    assert run_ranks(dropped, mode, stage) == [[-2.0, 1.0, -3.0]] * 2


def reductions(mode: str, stage: int) -> list[object]:
    said: list[object] = []
    with trained(stage, mode=mode, accumulation=2) as prepared:
        engine, window = prepared.engine, prepared._window
        (w,) = engine.module.parameters()
        optimizer = engine.optimizer
        how = compat.reductions_of(optimizer, stage)

        def tell() -> None:
            if not how.in_backward:
                said.append("reduce")
                return
            waiting: list[Tensor] = compat.waiting_parameters(optimizer, stage)
            assert all(one is w for one in waiting)
            said.append((compat.backward_of_window(optimizer), len(waiting)))

        def last(reduce: Any) -> None:
            said.append("last")
            reduce()

        compat.call_before_reduction(optimizer, how, tell)
        if how.in_backward:
            compat.wrap_last_reduction(optimizer, last)
        for _ in range(2):
            window.begin()
            prepared.backward(prepared.model(X))
        compat.close_window(engine)
        return said


@pytest.mark.parametrize(("mode", "stage"), STAGES)
def test_reductions_are_seen_before_they_run(run_ranks, mode: str, stage: int) -> None:
    of_backward = ["last", (0, 1), "last", (1, 1)]
    assert run_ranks(reductions, mode, stage) == [["reduce"] if stage == 1 else of_backward] * 2


def zeroed() -> float:
    with trained(3) as prepared:
        add_gradients(prepared)
        compat.close_window(prepared.engine)
        compat.zero_gradient_of_stage_3(prepared.engine.optimizer, prepared.engine.module.w)
        return float(compat.global_norm(prepared.engine.optimizer))


def test_what_stage_3_keeps_of_a_gradient_is_zeroed(run_ranks) -> None:
    assert run_ranks(zeroed) == [0.0, 0.0]


def filled() -> list[object]:
    with trained(1) as prepared:
        optimizer, w = prepared.engine.optimizer, prepared.engine.module.w
        had = compat.has_gradient_of_stage_1(optimizer, w)
        compat.fill_gradient_of_stage_1(optimizer, w)
        return [had, compat.has_gradient_of_stage_1(optimizer, w)]


def test_stage_1_takes_zeros_for_a_gradient(run_ranks) -> None:
    assert run_ranks(filled) == [[False, True]] * 2


def counted() -> list[int]:
    with trained(1, mode="bf16") as prepared:
        optimizer = prepared.engine.optimizer
        (lacking,) = compat.parameters_without_flat_gradient(optimizer)
        assert lacking is prepared.engine.module.w
        compat.count_all_flat_gradients(optimizer)
        return [
            len(compat.parameters_without_flat_gradient(optimizer)),
            len(compat.flat_gradients(optimizer)),
        ]


def test_stage_1_with_bf16_counts_all_gradients_in_its_norm(run_ranks) -> None:
    assert run_ranks(counted) == [[0, 1]] * 2


def left_alive(stage: int) -> bool:
    """Return whether a model that was trained outlives its engine."""
    with trained(stage) as prepared:
        model = ref(prepared.engine.module)
        prepared.backward(prepared.model(X))
        prepared.optimizers[0].step()
    del prepared
    gc.collect()
    return model() is not None


@pytest.mark.parametrize("stage", [1, 3])
def test_no_model_outlives_its_engine(run_ranks, stage: int) -> None:
    assert run_ranks(left_alive, stage) == [False, False]
