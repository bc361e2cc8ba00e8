"""Install the interface in the import system of this process and of spawned processes, or uninstall it.

Accelerate's launcher sets environment variables on its ranks, and libraries such as transformers read them too.
drivetrain's launcher uses settings. An installation writes given settings into these variables, over older values.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from logging import getLogger
from multiprocessing import spawn
from types import FunctionType, ModuleType
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from drivetrain_accelerate.environment_variables import is_same_word
from drivetrain_accelerate.errors import AlreadyImportedError, UnknownVersionError
from drivetrain_accelerate.interface.finder import InterfaceFinder, installed_finder
from drivetrain_accelerate.interface.module_table import PROVIDED_VERSIONS
from drivetrain_accelerate.strictness import STRICT_VARIABLE
from drivetrain_config import Layers, Source, environ, resolve
from drivetrain_config.plugins.registry import sections

logger = getLogger(__name__)

_NAME = "accelerate"
_SECTIONS = ("run", "state", "fsdp", "deepspeed")  # whose settings variables tell
_OPERATORS = "<>=!~"


def install(*, version: str | None = None, strict: bool | None = None) -> None:
    """Make `import accelerate` return the interface over drivetrain, in this process from now on.

    The real package need not be installed, and nothing on disk changes. Processes that `multiprocessing` spawns get
    the interface too. The settings of a launch are written into the environment variables that programs for
    Accelerate read. A second call changes only the arguments that it gives.

    Args:
        version: The version whose interface the program expects, such as "1.15" or ">=1.10"; by default the newest.
        strict: Whether to correct Accelerate's silent errors. False restores the errors where possible, in this
            process and the processes that it starts. None leaves the choice to the settings.

    Raises:
        AlreadyImportedError: The real package was imported before; the message says by which module.
        UnknownVersionError: That version's interface is not provided.
        ConfigError: A setting of the launch cannot be read.
    """
    chosen = _choose_version(version)
    finder = installed_finder()
    if finder is None and (real := sys.modules.get(_NAME)) is not None:
        raise AlreadyImportedError(_describe_late_install(real))
    variables = told_variables(Layers.of_process())
    if strict is not None:
        variables[STRICT_VARIABLE] = str(strict).lower()
    before = {name: environ.read(name) for name in variables}
    environ.put(**variables)
    if finder is None:
        sys.meta_path.insert(0, InterfaceFinder(version=chosen, variables_before=before))
        carry_to_spawned(partial(install, version=chosen))
    else:
        both = {**before, **finder.variables_before}
        sys.meta_path[sys.meta_path.index(finder)] = replace(finder, variables_before=both)


def uninstall() -> None:
    """Remove the interface from the import system, and its variables from the environment.

    Modules keep the objects that they imported. The next `import accelerate` finds the real package, if installed.
    """
    if (finder := installed_finder()) is None:
        return
    sys.meta_path.remove(finder)
    stop_carrying()
    environ.put(**finder.variables_before)
    for name in [each for each in sys.modules if each.partition(".")[0] == _NAME]:
        del sys.modules[name]


def is_installed() -> bool:
    """Return whether `import accelerate` finds the interface over drivetrain."""
    return installed_finder() is not None


def _choose_version(wanted: str | None) -> str:
    """Return the newest provided version that fits a version or requirement."""
    if wanted is None:
        return PROVIDED_VERSIONS[-1]
    try:
        required = SpecifierSet(wanted if wanted[:1] in _OPERATORS else f"=={wanted}")
    except InvalidSpecifier:
        found = []
    else:
        found = [each for each in PROVIDED_VERSIONS if required.contains(each)]
    if not found:
        raise UnknownVersionError(
            f"install(version={wanted!r}): provided are {', '.join(PROVIDED_VERSIONS)}; say one of these, or a "
            "requirement that one fulfils, such as '>=1.10'; or leave it out for the newest"
        )
    return found[-1]


def _describe_late_install(real: ModuleType) -> str:
    holders = sorted(
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in (_NAME, "__mp_main__") and _holds(module, real)
    )
    shown = f" by {', '.join(holders[:3])}" if holders else ""
    return (
        f"accelerate {getattr(real, '__version__', '')} was imported before{shown} (from {real.__file__}), and its "
        "objects may be in use: call drivetrain_accelerate.install() before anything that imports accelerate, or run "
        "the program by `python -m drivetrain_accelerate`"
    )


def _holds(module: object, real: ModuleType) -> bool:
    """Return whether a module holds the real package or something that it defines."""
    values = list(vars(module).values()) if isinstance(module, ModuleType) else []
    return any(
        value is real
        or (
            # By its type alone: torch has objects that warn when `isinstance` asks for their class.
            issubclass(type(value), (type, FunctionType))
            and str(getattr(value, "__module__", "")).partition(".")[0] == _NAME
        )
        for value in values
    )


@dataclass(frozen=True)
class CarriedInstallation:
    """An object that installs the interface in the process that unpickles it."""

    install: Callable[[], None]

    def __reduce__(self) -> Any:
        return self.install, ()


@dataclass(frozen=True)
class _PreparationWithInterface:
    """A function that adds the installation to the data that a spawned process reads before its main module."""

    own: Callable[[str], dict[str, Any]]
    carried: CarriedInstallation

    def __call__(self, name: str) -> dict[str, Any]:
        """Return the data for a process."""
        return {**self.own(name), "drivetrain_accelerate": self.carried}


def carry_to_spawned(install: Callable[[], None]) -> None:
    """Install the interface in the processes that are spawned from now on, before they import the main module."""
    stop_carrying()
    # Python has no hook for it. The function that collects the data is replaced: the process unpickles all of the
    # data, and leaves out keys that it does not know.
    carried = CarriedInstallation(install)
    spawn.get_preparation_data = _PreparationWithInterface(spawn.get_preparation_data, carried)


def stop_carrying() -> None:
    """Stop installing the interface in processes that are spawned from now on."""
    if isinstance(spawn.get_preparation_data, _PreparationWithInterface):
        spawn.get_preparation_data = spawn.get_preparation_data.own


def told_variables(layers: Layers) -> dict[str, str]:
    """Return Accelerate's variables for the settings that are given, by whatever source.

    Warn of each environment variable that has another value, which is replaced.
    """
    said: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for name, kind in sections(only=_SECTIONS).items():
        found = resolve(kind, section=name, layers=layers)
        for field, source in found.sources.items():
            if source.kind != "default":
                said[f"{name}.{field}"] = getattr(found.value, field)
                sources[f"{name}.{field}"] = source
    texts: dict[str, tuple[str, str]] = {}
    for setting, variable, text_of in (*_OF_ANY_RUN, *_OF_BACKEND.get(str(said.get("run.backend")), ())):
        value = said.get(setting)
        if value is not None and (text := text_of(value)):
            texts[variable] = text, setting
    for variable, (text, setting) in texts.items():
        before = environ.read(variable)
        is_first = environ.read("RANK") in (None, "0")
        if is_first and before is not None and not is_same_word(before, text):
            logger.warning(
                "%s=%s in the environment gives way to %s=%s, which %s says: unset the one, or leave out the other",
                variable, before, setting, text, sources[setting],
            )  # fmt: skip
    return {variable: text for variable, (text, _) in texts.items()}


def _always(text: str) -> Callable[[Any], str]:
    return lambda _: text


def _if_on(value: object) -> str:
    return "true" if value else ""


# Each setting, a variable that tells of it, and the variable's text, which is empty where it is not set. A later line
# of the same variable goes first.
_OF_ANY_RUN: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("run.mixed_precision", "ACCELERATE_MIXED_PRECISION", str),
    ("state.device", "ACCELERATE_USE_CPU", lambda device: _if_on(device == "cpu")),
    ("run.cpu", "ACCELERATE_USE_CPU", _if_on),
    ("run.gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", str),
    ("state.debug", "ACCELERATE_DEBUG_MODE", _if_on),
)
_OF_BACKEND: Mapping[str, tuple[tuple[str, str, Callable[[Any], str]], ...]] = {
    "fsdp": (
        ("run.backend", "ACCELERATE_USE_FSDP", _always("true")),
        ("run.backend", "FSDP_VERSION", _always("2")),
        ("run.backend", "FSDP_AUTO_WRAP_POLICY", _always("TRANSFORMER_BASED_WRAP")),
        ("fsdp.strategy", "FSDP_SHARDING_STRATEGY", str.upper),
        (
            "fsdp.strategy",
            "FSDP_RESHARD_AFTER_FORWARD",
            lambda strategy: str(strategy in ("full_shard", "hybrid_shard")).lower(),
        ),
        ("fsdp.wrap", "FSDP_TRANSFORMER_CLS_TO_WRAP", ",".join),
        ("fsdp.min_num_params", "FSDP_AUTO_WRAP_POLICY", _always("SIZE_BASED_WRAP")),
        ("fsdp.min_num_params", "FSDP_MIN_NUM_PARAMS", str),
        ("fsdp.offload", "FSDP_OFFLOAD_PARAMS", _if_on),
        (
            "model.activation_checkpointing",
            "FSDP_ACTIVATION_CHECKPOINTING",
            lambda checkpointing: _if_on(checkpointing == "full"),
        ),
        ("fsdp.prefetch", "FSDP_FORWARD_PREFETCH", _if_on),
    ),
    "deepspeed": (
        ("run.backend", "ACCELERATE_USE_DEEPSPEED", _always("true")),
        ("deepspeed.config", "ACCELERATE_DEEPSPEED_CONFIG_FILE", str),
        ("deepspeed.stage", "ACCELERATE_DEEPSPEED_ZERO_STAGE", str),
        ("deepspeed.offload_optimizer", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", str),
        ("deepspeed.offload_param", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", str),
        ("deepspeed.nvme_path", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", str),
        ("deepspeed.nvme_path", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", str),
    ),
}
