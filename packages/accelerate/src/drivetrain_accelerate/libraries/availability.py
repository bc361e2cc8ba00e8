"""Tell whether a library is installed: a function for each name of Accelerate's, from one table.

All of them return a bool, and none imports the library.
"""

import importlib.util
from collections.abc import Callable
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import parse

from drivetrain_config import environ


def is_installed(module: str, distribution: str | None = None, minimum: str | None = None) -> bool:
    """Return whether a module can be imported, of a distribution that is installed, in a version at least as new.

    Args:
        module: The name of the module.
        distribution: The name of the distribution; None for that of the module.
        minimum: The oldest version; None for any.
    """
    try:
        if importlib.util.find_spec(module) is None:
            return False
        found = version(distribution or module)
    except (PackageNotFoundError, ModuleNotFoundError, ValueError):
        return False  # a folder of that name, a stand-in of a test
    return minimum is None or parse(found) >= parse(minimum)


def _library(
    name: str, module: str, distribution: str | None = None, minimum: str | None = None
) -> Callable[[], bool]:
    def is_available() -> bool:
        return is_installed(module, distribution, minimum)

    wanted = f"{distribution or module}{f' {minimum} or newer' if minimum else ''}"
    is_available.__name__ = is_available.__qualname__ = f"is_{name}_available"
    is_available.__doc__ = f"Return whether {wanted} is installed."
    return is_available


is_aim_available = _library("aim", "aim")
is_amdsmi_available = _library("amdsmi", "amdsmi")
is_boto3_available = _library("boto3", "boto3")
is_clearml_available = _library("clearml", "clearml")
is_comet_ml_available = _library("comet_ml", "comet_ml")
is_datasets_available = _library("datasets", "datasets")
is_deepspeed_available = _library("deepspeed", "deepspeed")
is_dvclive_available = _library("dvclive", "dvclive")
is_import_timer_available = _library("import_timer", "import_timer")
is_lomo_available = _library("lomo", "lomo_optim", "lomo-optim")
is_matplotlib_available = _library("matplotlib", "matplotlib")
is_msamp_available = _library("msamp", "msamp", "ms-amp")
is_pandas_available = _library("pandas", "pandas")
is_peft_available = _library("peft", "peft")
is_pynvml_available = _library("pynvml", "pynvml", "nvidia-ml-py")
is_pytest_available = _library("pytest", "pytest")
is_sagemaker_available = _library("sagemaker", "sagemaker")
is_schedulefree_available = _library("schedulefree", "schedulefree")
is_swanlab_available = _library("swanlab", "swanlab")
is_timm_available = _library("timm", "timm")
is_torchao_available = _library("torchao", "torchao", minimum="0.6.1")
is_torchdata_available = _library("torchdata", "torchdata")
is_torchdata_stateful_dataloader_available = _library(
    "torchdata_stateful_dataloader", "torchdata", minimum="0.8.0"
)
is_torchvision_available = _library("torchvision", "torchvision")
is_tqdm_available = _library("tqdm", "tqdm")
is_trackio_available = _library("trackio", "trackio")
is_transformer_engine_available = _library("transformer_engine", "transformer_engine")
is_transformer_engine_mxfp8_available = _library(
    "transformer_engine_mxfp8", "transformer_engine", minimum="2.1.0"
)
is_transformers_available = _library("transformers", "transformers")
is_triton_available = _library("triton", "triton")
is_wandb_available = _library("wandb", "wandb")
is_4bit_bnb_available = _library("4bit_bnb", "bitsandbytes", minimum="0.39.0")
is_8bit_bnb_available = _library("8bit_bnb", "bitsandbytes", minimum="0.37.2")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether bitsandbytes is installed, in this version or a newer one."""
    return is_installed("bitsandbytes", minimum=min_version)


def is_bitsandbytes_multi_backend_available() -> bool:
    """Return whether bitsandbytes computes on other devices than CUDA's too, as it does since 0.46."""
    return is_installed("bitsandbytes", minimum="0.46.0")


def is_mlflow_available() -> bool:
    """Return whether mlflow, whole or its skinny distribution, is installed."""
    return is_installed("mlflow") or is_installed("mlflow", "mlflow-skinny")


def is_tensorboard_available() -> bool:
    """Return whether tensorboard or tensorboardX is installed."""
    return is_installed("tensorboard") or is_installed("tensorboardX")


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Return whether NumPy is installed, in this version or a newer one."""
    return is_installed("numpy", minimum=min_version)


def is_rich_available() -> bool:
    """Return whether rich is installed and the program asked for it by ACCELERATE_ENABLE_RICH."""
    asked = (environ.read("ACCELERATE_ENABLE_RICH") or "").lower()
    return asked in ("1", "true", "yes", "y", "on", "t") and is_installed("rich")


def is_megatron_lm_available() -> bool:
    """Return whether Megatron-LM is installed and the launcher chose it by ACCELERATE_USE_MEGATRON_LM."""
    asked = (environ.read("ACCELERATE_USE_MEGATRON_LM") or "").lower()
    return asked in ("1", "true", "yes", "y", "on", "t") and importlib.util.find_spec("megatron") is not None


def is_pippy_available() -> bool:
    """Return whether torch has pipeline parallelism, as every version does that drivetrain runs on."""
    return True


def is_weights_only_available() -> bool:
    """Return whether `torch.load` has `weights_only`, as every version does that drivetrain runs on."""
    return True


def torchao_required(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that needs torchao."""
    return _requiring(func, is_torchao_available, "torchao")


def deepspeed_required(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that needs DeepSpeed."""
    return _requiring(func, is_deepspeed_available, "deepspeed")


def _requiring(
    func: Callable[..., Any], is_available: Callable[[], bool], library: str
) -> Callable[..., Any]:
    @wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not is_available():
            raise ImportError(f"{func.__name__} needs {library}: pip install {library}")
        return func(*args, **kwargs)

    return wrapper
