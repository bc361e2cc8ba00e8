"""Find the softmaxes, norms, losses and long sums that user code computes in half precision."""

import warnings
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from drivetrain_precision.checks.call_sites import CallSite, call_site, module_names
from drivetrain_precision.checks.half_operations import HalfVerdict, Judge, Kind, inside_function
from drivetrain_precision.compat import Args, Kwargs, TorchDispatchMode, compiler_is_imported
from drivetrain_precision.errors import HalfPrecisionWarning


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfOperation:
    """An operation computed in half precision although it needs fp32, with advice.

    Attributes:
        operation: The name, such as "cross_entropy" or "mean of squares".
        kind: "softmax", "norm", "loss" or "sum".
        module: The calling module's name in the model; "" outside of modules.
        rounds_result_only: Whether torch's kernel computes in fp32 and rounds only its result, which loses less.
    """

    operation: str
    kind: Kind
    dtype: torch.dtype
    module: str
    file: str
    line: int
    rounds_result_only: bool
    repair: str
    num_calls: int

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" + (f" (module {self.module})" if self.module else "")
        how = "the result is rounded to" if self.rounds_result_only else "computed in"
        times = "once" if self.num_calls == 1 else f"{self.num_calls} times"
        return f"{place}: {self.operation}, {how} {str(self.dtype).removeprefix('torch.')} {times}: {self.repair}"


class HalfOperations:
    """The result of `find_half_operations`, complete at the end of the block."""

    def __init__(self) -> None:
        # By line, module and dtype: the operation that runs first in each call, to count calls, and the result.
        self._found: dict[tuple[object, ...], tuple[str, HalfOperation]] = {}

    @property
    def operations(self) -> tuple[HalfOperation, ...]:
        """The operations in the order of their first run, one for each line, module and dtype."""
        return tuple(operation for _, operation in self._found.values())

    def __str__(self) -> str:
        if not self._found:
            return "no softmax, norm, loss or long sum is computed in half precision"
        return "\n".join(
            ["computed in half precision, which loses what they need:", *map(str, self.operations)]
        )

    def add(self, verdict: HalfVerdict, dtype: torch.dtype, site: CallSite) -> None:
        """Count an operation that runs at a line; operations inside a function count as the function."""
        name, is_rounded = site.function or verdict.operation, verdict.damage == "rounded"
        key = (name, dtype, site.module, site.file, site.line)
        if key in self._found:
            first, found = self._found[key]
            num_calls = found.num_calls + (verdict.operation == first)
            is_rounded = is_rounded and found.rounds_result_only
            found = replace(found, num_calls=num_calls, rounds_result_only=is_rounded)
        else:
            first = verdict.operation
            found = HalfOperation(
                operation=name, kind=verdict.kind, dtype=dtype, repair=verdict.repair, rounds_result_only=is_rounded,
                module=site.module, file=site.file, line=site.line, num_calls=1,
            )  # fmt: skip
        self._found[key] = first, found


@contextmanager
def find_half_operations(
    model: nn.Module | None = None, *, libraries: bool = False, warn: bool = True
) -> Generator[HalfOperations]:
    """Run a block, such as one training step, and find operations in fp16 or bf16 that need fp32.

    Reported are losses and log-probabilities, softmax, norms (also a mean of squares in user code), sums of
    exponentials, and running sums. Not reported are operations on fp32 inputs and torch's own work in backward and
    optimizers. If torch's kernel computes in fp32 and only rounds its result, calls under autocast and in
    installed libraries are not reported either. Compiled models run without the compiler in the block.

    Inspecting each operation makes the block several times slower: check one step, not a run. Operations of
    other threads are not seen. Any single rank can call this. The result is complete at the end of the block.

    Args:
        model: The model, which gives modules their names; without it, modules are named by their classes.
        libraries: Whether to report results that kernels round in installed libraries and under autocast.
        warn: Whether to give a HalfPrecisionWarning at the end if an operation was found.

    Example:
        >>> scores, labels = torch.randn(4, 8, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.long)
        >>> with find_half_operations(warn=False) as found:
        ...     loss = torch.nn.functional.cross_entropy(scores, labels)
        >>> [operation.operation for operation in found.operations]
        ['cross_entropy']
    """
    found = HalfOperations()
    with ExitStack() as stack:
        if compiler_is_imported():
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        calls = stack.enter_context(_AutocastState())
        stack.enter_context(_Watch(found, module_names(model), calls, libraries=libraries))
        yield found
    if warn and found.operations:
        warnings.warn(str(found), HalfPrecisionWarning, stacklevel=3)


class _AutocastState(TorchFunctionMode):
    """A record of whether the running function was called under autocast, which code below autocast cannot see."""

    def __init__(self) -> None:
        super().__init__()
        self.is_enabled = False

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs = None) -> Any:
        tensor = next((one for one in (*args, *(kwargs or {}).values()) if isinstance(one, Tensor)), None)
        if tensor is not None:
            self.is_enabled = torch.is_autocast_enabled(tensor.device.type)
        return func(*args, **(kwargs or {}))


class _Watch(TorchDispatchMode):
    """A dispatch mode that judges each operation below autocast, where inputs have the computation's dtype."""

    def __init__(
        self, found: HalfOperations, names: dict[int, str], autocast: _AutocastState, *, libraries: bool
    ) -> None:
        super().__init__()
        self._found, self._names, self._autocast, self._libraries = found, names, autocast, libraries
        self._judge = Judge()

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs = None) -> Any:
        result = func(*args, **(kwargs or {}))
        verdict = self._judge.verdict(func.__name__.partition(".")[0], args, result)
        if verdict is not None and (site := call_site(self._names)) is not None:
            verdict = inside_function(verdict, site.function)
            is_chosen = not (self._autocast.is_enabled or site.is_library)
            if verdict.damage == "computed" or self._libraries or is_chosen:
                self._found.add(verdict, args[0].dtype, site)
        return result
