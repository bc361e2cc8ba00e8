"""The eight ways in which the sweep runs a model, each held against the model in memory."""

import copy
import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dispatch_sweep.results import at_the_addresses_of, difference, gradients_of
from dispatch_sweep.table import EXACT
from drivetrain_dispatch import (
    WeightsMismatchError,
    compute_module_sizes,
    dispatch_model,
    load_pretrained,
    remove_hooks,
)
from sweep.model_cases import ModelCase, loss_of

ADDRESSES = "exact at the same addresses"
NOT_CONVERTED = "not converted"
NUM_NEW_TOKENS = 6
NOT_GIVEN = ("labels", "decoder_input_ids")  # to generate
# What generates only with more than its forward takes.
NOT_GENERATED = ("speecht5",)


class NotInMemoryError(RuntimeError):
    """The model in memory does not do this either."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A case, the model in memory, and a folder with what `save_pretrained` wrote of it, and room beside it."""

    name: str
    case: ModelCase
    plain: nn.Module
    folder: Path = field(repr=False)

    @cached_property
    def expected(self) -> list[Any]:
        """What the model in memory gives for two batches."""
        with torch.no_grad():
            return [run(self.plain, self.case.batch(index)) for index in range(2)]

    def load(self, device_map: Mapping[str, str] | str, **options: Any) -> nn.Module:
        """Return the model as it is loaded from the folder."""
        folder = self.folder / "offloaded"
        return load_pretrained(
            type(self.plain), self.saved, device_map=device_map, offload_folder=folder, **options
        )

    @property
    def saved(self) -> Path:
        """What `save_pretrained` wrote."""
        return self.folder / "saved"

    def streamed(self) -> nn.Module:
        """Return a copy of the model whose weights come as copies of their own, each before its use."""
        model = copy.deepcopy(self.plain)
        dtypes = {name: tensor.dtype for name, tensor in model.named_parameters()}
        return dispatch_model(model, {"": "cpu"}, dtypes=dtypes)

    def check(self, model: nn.Module) -> str:
        """Return how far a model is from the one in memory."""
        with torch.no_grad():
            given = [run(model, self.case.batch(index)) for index in range(2)]
        wrong = difference(given, self.expected)
        if wrong is None:
            return EXACT
        same = at_the_addresses_of(self.plain, model)
        with torch.no_grad():
            there = [run(same, self.case.batch(index)) for index in range(2)]
        return wrong if difference(given, there) else ADDRESSES


def on_the_cpu(subject: Subject) -> str:
    """Load everything into memory."""
    return subject.check(subject.load({"": "cpu"}))


def on_the_disk(subject: Subject) -> str:
    """Load nothing: weights are used in the pages of their file."""
    return subject.check(subject.load({"": "disk"}))


def within_a_budget(subject: Subject) -> str:
    """Load half of the model, by a map that is planned."""
    model = half_in_memory(subject)
    shown = getattr(model, "hf_device_map", None)
    if shown is not None and set(shown.values()) != {"cpu", "disk"}:
        return f"the map says {shown}"
    return subject.check(model)


def half_in_memory(subject: Subject) -> nn.Module:
    """Return the model with a map for half of its size."""
    whole = compute_module_sizes(subject.plain)[""]
    # A budget must hold what stays, which is all buffers, and beside it the weights of any layer.
    buffers = sum(buffer.nbytes for buffer in subject.plain.buffers())
    layer = max(sum(p.nbytes for p in module.parameters(recurse=False)) for module in subject.plain.modules())
    return subject.load(
        "auto", max_memory={"cpu": max(whole // 2, buffers + layer)}, no_split_module_classes=()
    )


def streamed(subject: Subject) -> str:
    """Have each weight come before its use; then be an ordinary model again."""
    model = subject.streamed()
    outcome = subject.check(model)
    remove_hooks(model)
    after = subject.check(model)
    return outcome if after == EXACT else f"without hooks: {after}"


def for_inference(subject: Subject) -> str:
    """Compute in inference mode, where the order is learnt, then known; and in two threads at a time."""
    model = subject.streamed()
    with torch.inference_mode():
        expected = [run(subject.plain, subject.case.batch(index)) for index in range(2)]
        for index in (0, 1, 0):
            if wrong := difference(run(model, subject.case.batch(index)), expected[index]):
                return wrong

    if draws(subject):
        return EXACT  # threads share the generator of its numbers

    def called(index: int) -> Any:
        with torch.inference_mode():
            return model(**subject.case.batch(index % 2))

    with ThreadPoolExecutor(2) as pool:
        seed(0)
        for index, output in enumerate(pool.map(called, range(4))):
            if wrong := difference(output, expected[index % 2]):
                return f"in threads: {wrong}"
    return EXACT


def backward(subject: Subject) -> str:
    """Compute gradients in training, with the same dropout."""
    ours, theirs = subject.streamed(), copy.deepcopy(subject.plain)
    outcomes: list[tuple[Any, dict[str, Tensor]]] = []
    for model in (theirs, ours):
        try:
            output = run(model.train(), subject.case.batch(0))
            loss_of(output).backward()
        except Exception as error:
            if model is theirs:
                raise NotInMemoryError(f"{type(error).__name__}: {first_line(error)}") from error
            raise
        outcomes.append((output, gradients_of(model)))
    return difference(outcomes[1], outcomes[0]) or EXACT


def in_bfloat16(subject: Subject) -> str:
    """Load it in another dtype than its files have, which stays on the disk, as its library loads it into memory."""
    batches = [_converted(subject.case.batch(index)) for index in range(2)]
    kind: Any = type(subject.plain)
    named = "torch_dtype" if hasattr(kind, "load_config") else "dtype"
    plain = kind.from_pretrained(subject.saved, **{named: torch.bfloat16}).eval()
    try:
        with torch.no_grad():
            expected = [run(plain, batch) for batch in batches]
    except Exception as error:
        raise NotInMemoryError(f"{type(error).__name__}: {first_line(error)}") from error
    model = subject.load({"": "disk"}, dtype=torch.bfloat16)
    with torch.no_grad():
        given = [run(model, batch) for batch in batches]
    return difference(given, expected) or EXACT


def generated(subject: Subject) -> str:
    """Generate a text, or where there is none to generate compute a batch of another size."""
    asked = {key: value for key, value in subject.case.batch(0).items() if key not in NOT_GIVEN}
    plain: Any = subject.plain
    speaks = getattr(plain, "can_generate", lambda: False)() and subject.name not in NOT_GENERATED

    def answer(model: Any) -> Any:
        seed(0)
        if speaks:
            return model.generate(
                **asked, max_new_tokens=NUM_NEW_TOKENS, min_new_tokens=NUM_NEW_TOKENS, do_sample=False
            )
        with torch.no_grad():
            return model(**_first_row(subject.case.batch(0)))

    expected = answer(plain)
    model = subject.streamed()
    for turn in range(2):
        if wrong := difference(answer(model), expected):
            return f"turn {turn + 1}: {wrong}"
    return EXACT


WAYS: Mapping[str, Callable[[Subject], str]] = {
    "cpu": on_the_cpu,
    "disk": on_the_disk,
    "budget": within_a_budget,
    "streamed": streamed,
    "inference": for_inference,
    "backward": backward,
    "bf16": in_bfloat16,
    "generate": generated,
}


def outcome_of(subject: Subject, way: str) -> str:
    """Return what became of a case in a way: "exact", or in a few words what else."""
    try:
        return WAYS[way](subject)
    except WeightsMismatchError:
        return NOT_CONVERTED
    except NotInMemoryError as error:
        return f"not in memory either ({first_line(error)})"
    except Exception as error:  # noqa: BLE001 the table tells it, and the test judges
        return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: Exception) -> str:
    """Return what an error says, in short."""
    return " ".join(str(error).split())[:160]


def draws(subject: Subject) -> bool:
    """Tell whether a model draws numbers in its forward."""
    seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    with torch.no_grad():
        subject.plain(**subject.case.batch(0))
    after = torch.get_rng_state(), np.random.get_state()[1].tolist()
    return not torch.equal(before[0], after[0]) or before[1] != after[1]


def seed(number: int) -> None:
    """Begin all numbers that are drawn anew."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # transformers draws its masks of time from it


def run(model: nn.Module, batch: dict[str, Any]) -> Any:
    """Call a model, with the same numbers drawn."""
    seed(0)
    return model(**batch)


def _converted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _converted(item) for key, item in value.items()}
    return value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value


def _first_row(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the first row of a batch, where all its tensors have a row each for two inputs."""
    tensors = [value for value in batch.values() if isinstance(value, Tensor)]
    if any(tensor.shape[:1] != (2,) for tensor in tensors):
        return batch
    return {key: value[:1] if isinstance(value, Tensor) else value for key, value in batch.items()}
