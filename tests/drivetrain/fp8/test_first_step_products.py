import threading

import torch
from torch import nn

from drivetrain.fp8.first_step_products import FirstStepProducts
from drivetrain_precision.fp8.product_counts import counting_products
from drivetrain_state import ProgressMark, ProgressRecord


def multiply() -> None:
    torch.ones(3, 4) @ torch.ones(4, 5)


MODEL, OTHER = nn.Linear(1, 1), nn.Linear(1, 1)


def begun(*models: nn.Module) -> tuple[ProgressRecord, FirstStepProducts]:
    progress = ProgressRecord()
    products = FirstStepProducts(progress, counting_products, models or (MODEL,))
    products.begin()
    return progress, products


def forward(progress: ProgressRecord, model: nn.Module = MODEL) -> None:
    progress.note_forward(model)
    multiply()
    progress.note(ProgressMark.FORWARD_DONE)


def others(products: FirstStepProducts) -> int | None:
    """The products of a step that proves something; None of another."""
    step = products.end_step()
    return None if step is None or step.hindrance is not None else step.counts.others


def in_thread(function, *args: object) -> None:
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join()


def test_only_what_runs_in_forwards_and_backwards_is_counted() -> None:
    progress, products = begun()
    forward(progress)
    multiply()
    progress.note(ProgressMark.BACKWARD)
    multiply()
    progress.note(ProgressMark.BACKWARD_DONE)
    multiply()
    assert others(products) == 2
    assert progress.observers == progress.forward_observers == ()


def test_a_forward_without_gradients_within_another_is_counted_with_it() -> None:
    progress, products = begun()
    progress.note_forward(MODEL)
    with torch.no_grad():
        forward(progress)
    multiply()
    progress.note(ProgressMark.FORWARD_DONE)
    assert others(products) == 2


def test_a_forward_with_gradients_within_an_evaluation_is_counted_alone() -> None:
    progress, products = begun()
    with torch.no_grad():
        progress.note_forward(MODEL)
        multiply()
        with torch.enable_grad():
            forward(progress)
        multiply()
        progress.note(ProgressMark.FORWARD_DONE)
    assert others(products) == 1


def test_a_step_without_a_count_leaves_the_next_one_to_be_counted() -> None:
    progress, products = begun()
    assert others(products) is None
    forward(progress)
    assert others(products) == 1
    assert others(products) is None


def test_beginning_twice_observes_once_and_beginning_after_the_count_not_at_all() -> None:
    progress, products = begun()
    products.begin()
    assert len(progress.observers) == 1
    assert len(progress.forward_observers) == 1
    forward(progress)
    assert others(products) == 1
    products.begin()
    assert progress.observers == ()


def test_a_step_of_another_thread_than_the_one_that_began_is_counted() -> None:
    progress, products = begun()
    in_thread(forward, progress)
    assert others(products) == 1


def test_beside_the_thread_that_trains_others_are_not_counted() -> None:
    progress, products = begun()
    progress.note_forward(MODEL)
    in_thread(forward, progress, OTHER)
    multiply()
    progress.note(ProgressMark.FORWARD_DONE)
    in_thread(forward, progress)
    assert others(products) == 1


def test_a_thread_that_proved_nothing_in_a_step_leaves_the_next_one_to_another() -> None:
    progress, products = begun()
    in_thread(forward, progress, OTHER)
    assert others(products) is None
    forward(progress)
    assert others(products) == 1


def test_a_step_in_which_no_converted_model_was_called_leaves_the_next_one_to_be_counted() -> None:
    progress, products = begun()
    forward(progress, OTHER)
    step = products.end_step()
    assert (step.hindrance, step.num_steps) == ("no converted model was called with gradients", 1)
    assert products.unproved is step
    forward(progress, OTHER)
    forward(progress)
    assert others(products) == 2
    assert products.unproved is None


def test_the_models_that_were_called_are_told_by_place_those_within_others_too() -> None:
    third = nn.Linear(1, 1)
    progress, products = begun(MODEL, OTHER, third)
    progress.note_forward(nn.Identity())
    forward(progress, third)
    progress.note(ProgressMark.FORWARD_DONE)
    forward(progress)
    assert products.end_step().scaled_by_model == {0: 0, 2: 0}


def test_the_reasons_why_a_step_proves_nothing_are_told() -> None:
    progress, products = begun()
    with torch.profiler.profile():
        forward(progress)
    assert "another profiler recorded" in products.end_step().hindrance
    progress.note_forward(MODEL)
    assert "had not ended when the optimizer stepped" in products.end_step().hindrance
    progress.note(ProgressMark.FORWARD_DONE)


def test_closing_in_another_thread_ends_the_recording_when_the_forward_ends() -> None:
    progress, products = begun()
    progress.note_forward(MODEL)
    in_thread(products.close)
    progress.note(ProgressMark.FORWARD_DONE)
    assert progress.observers == progress.forward_observers == ()
    with counting_products() as counts:
        multiply()
    assert counts.is_counted


def test_closing_within_a_forward_ends_the_recording() -> None:
    progress, products = begun()
    progress.note_forward(MODEL)
    products.close()
    progress.note(ProgressMark.FORWARD_DONE)
    with counting_products() as counts:
        multiply()
    assert counts.is_counted
