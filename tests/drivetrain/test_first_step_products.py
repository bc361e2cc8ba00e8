import threading

import torch

from drivetrain.first_step_products import FirstStepProducts
from drivetrain_precision.fp8.product_counts import counting_products
from drivetrain_state import ProgressRecord


def multiply() -> None:
    torch.ones(3, 4) @ torch.ones(4, 5)


def begun() -> tuple[ProgressRecord, FirstStepProducts]:
    progress = ProgressRecord()
    products = FirstStepProducts(progress, counting_products)
    products.begin()
    return progress, products


def others(products: FirstStepProducts) -> int | None:
    counts = products.end_step()
    return None if counts is None else counts.others


def test_only_what_runs_in_forwards_and_backwards_is_counted() -> None:
    progress, products = begun()
    for label in ("forward", "backward"):
        progress.note(label)
        multiply()
        progress.note(f"{label} done")
        multiply()
    assert others(products) == 2
    assert progress.observers == ()


def test_a_forward_without_gradients_within_another_is_counted_with_it() -> None:
    progress, products = begun()
    progress.note("forward")
    with torch.no_grad():
        progress.note("forward")
        multiply()
        progress.note("forward done")
    multiply()
    progress.note("forward done")
    assert others(products) == 2


def test_a_forward_with_gradients_within_an_evaluation_is_counted_alone() -> None:
    progress, products = begun()
    with torch.no_grad():
        progress.note("forward")
        multiply()
        with torch.enable_grad():
            progress.note("forward")
            multiply()
            progress.note("forward done")
        multiply()
        progress.note("forward done")
    assert others(products) == 1


def test_a_step_without_a_count_leaves_the_next_one_to_be_counted() -> None:
    progress, products = begun()
    assert others(products) is None
    progress.note("forward")
    multiply()
    progress.note("forward done")
    assert others(products) == 1
    assert others(products) is None


def test_beginning_twice_observes_once_and_beginning_after_the_count_not_at_all() -> None:
    progress, products = begun()
    products.begin()
    assert len(progress.observers) == 1
    progress.note("backward")
    progress.note("backward done")
    assert others(products) == 0
    products.begin()
    assert progress.observers == ()


def test_what_other_threads_tell_is_none_of_it() -> None:
    progress, products = begun()
    thread = threading.Thread(target=progress.note, args=("forward",))
    thread.start()
    thread.join()
    assert others(products) is None


def test_closing_within_a_forward_ends_the_recording() -> None:
    progress, products = begun()
    progress.note("forward")
    products.close()
    progress.note("forward done")
    with counting_products() as counts:
        multiply()
    assert counts.is_counted
