"""Tell whether a library is installed, without importing it, and compare versions."""

import importlib.util
from collections.abc import Callable
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version, parse

from drivetrain_accelerate.environment_variables import says_yes
from drivetrain_accelerate.plugins.constants import STR_OPERATION_TO_FUNC as STR_OPERATION_TO_FUNC

_MEGATRON = "megatron"  # the module of Megatron-LM


def is_installed(module: str, distribution: str | None = None, minimum: str | None = None) -> bool:
    """Return whether a module is installed; check the version of its distribution if `minimum` is given."""
    try:
        if importlib.util.find_spec(module) is None:
            return False
        found = version(distribution or module)
    except (PackageNotFoundError, ModuleNotFoundError, ValueError):
        return False  # a folder of that name, a stand-in of a test
    return minimum is None or parse(found) >= parse(minimum)


# The libraries whose module and distribution have the name that `is_NAME_available` says.
_SAME_NAMES = """
    aim amdsmi boto3 clearml comet_ml datasets deepspeed dvclive import_timer matplotlib pandas peft pytest sagemaker
    schedulefree swanlab timm torchdata torchvision tqdm trackio transformer_engine transformers triton wandb
"""
# The module, distribution and oldest version of the others.
_LIBRARIES: dict[str, tuple[str, str | None, str | None]] = {
    **{name: (name, None, None) for name in _SAME_NAMES.split()},
    "4bit_bnb": ("bitsandbytes", None, "0.39.0"),
    "8bit_bnb": ("bitsandbytes", None, "0.37.2"),
    "bitsandbytes_multi_backend": ("bitsandbytes", None, "0.46.0"),
    "lomo": ("lomo_optim", "lomo-optim", None),
    "msamp": ("msamp", "ms-amp", None),
    "pynvml": ("pynvml", "nvidia-ml-py", None),
    "torchao": ("torchao", None, "0.6.1"),
    "torchdata_stateful_dataloader": ("torchdata", None, "0.8.0"),
    "transformer_engine_mxfp8": ("transformer_engine", None, "2.1.0"),
}


def __getattr__(name: str) -> Callable[[], bool]:
    """Return the function for a name `is_NAME_available`, and keep it as an attribute."""
    library = name.removeprefix("is_").removesuffix("_available")
    if library not in _LIBRARIES or name != f"is_{library}_available":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, distribution, minimum = _LIBRARIES[library]

    def is_available() -> bool:
        return is_installed(module, distribution, minimum)

    wanted = f"{distribution or module}{f' {minimum} or newer' if minimum else ''}"
    is_available.__name__ = is_available.__qualname__ = name
    is_available.__doc__ = f"Return whether {wanted} is installed."
    globals()[name] = is_available
    return is_available


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether bitsandbytes is installed, in this version or a newer one."""
    return is_installed("bitsandbytes", minimum=min_version)


def is_mlflow_available() -> bool:
    """Return whether mlflow or mlflow-skinny is installed."""
    return is_installed("mlflow") or is_installed("mlflow", "mlflow-skinny")


def is_tensorboard_available() -> bool:
    """Return whether tensorboard or tensorboardX is installed."""
    return is_installed("tensorboard") or is_installed("tensorboardX")


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Return whether NumPy is installed, in this version or a newer one."""
    return is_installed("numpy", minimum=min_version)


def is_rich_available() -> bool:
    """Return whether rich is installed and the program asked for it by ACCELERATE_ENABLE_RICH."""
    return says_yes("ACCELERATE_ENABLE_RICH") and is_installed("rich")


def is_megatron_lm_available() -> bool:
    """Return whether Megatron-LM is installed and the launcher chose it by ACCELERATE_USE_MEGATRON_LM."""
    return says_yes("ACCELERATE_USE_MEGATRON_LM") and importlib.util.find_spec(_MEGATRON) is not None


def is_pippy_available() -> bool:
    """Return whether torch has pipeline parallelism: True, since every supported version has it."""
    return True


def is_weights_only_available() -> bool:
    """Return whether `torch.load` has `weights_only`: True, since every supported version has it."""
    return True


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Return whether a version, or the version of an installed library, fulfils a requirement.

    A ValueError refuses an unknown operation or version, and a PackageNotFoundError a missing library.
    """
    if operation not in STR_OPERATION_TO_FUNC:
        raise ValueError(f"operation={operation!r}: say one of {', '.join(STR_OPERATION_TO_FUNC)}")
    if isinstance(library_or_version, str):
        library_or_version = parse(version(library_or_version))
    return bool(STR_OPERATION_TO_FUNC[operation](library_or_version, parse(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Return whether torch's release, without a build's suffix such as +cu128, fulfils a requirement."""
    import torch

    release = parse(parse(str(torch.__version__)).base_version)
    return compare_versions(release, operation, version)


def _require(library: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(func: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not is_installed(*_LIBRARIES[library]):
                raise ImportError(f"{func.__name__} needs {library}: pip install {library}")
            return func(*args, **kwargs)

        return wrapper

    decorate.__doc__ = f"Decorate a function that needs {library}."
    return decorate


torchao_required = _require("torchao")
deepspeed_required = _require("deepspeed")
