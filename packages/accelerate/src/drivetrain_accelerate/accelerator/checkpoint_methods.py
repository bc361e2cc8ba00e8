"""The methods of an Accelerator that save a run and load it, and that write models for other programs."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from logging import getLogger
from os import PathLike
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle

from drivetrain_accelerate import object_files
from drivetrain_accelerate.accelerator.checkpoint_folders import (
    SettleHookFiles,
    count_on,
    new_folder,
    newest_folder,
    settle,
    stage,
    staged_folder,
    surplus_folders,
)
from drivetrain_accelerate.accelerator.held_objects import save_whole
from drivetrain_accelerate.accelerator.prepare_methods import PrepareMethods
from drivetrain_accelerate.object_files import write_pickled_weights
from drivetrain_accelerate.training.stepped_optimizer import AcceleratedOptimizer
from drivetrain_accelerate.training.stepped_scheduler import AcceleratedScheduler
from drivetrain_state.collectives.collective_errors import on_each_rank, on_main

logger = getLogger(__name__)

Hook = Callable[..., None]


class SavedObjects(NamedTuple):
    """The objects that a checkpoint holds, each kind in the order of preparation or registration."""

    models: list[nn.Module]
    optimizers: list[AcceleratedOptimizer]
    schedulers: list[AcceleratedScheduler]
    custom: list[Any]


class CheckpointMethods(PrepareMethods):
    """Methods that save and load a run, as drivetrain's transactional checkpoints in Accelerate's folders."""

    should_save_model = True  # all ranks take part in writing a model; the main process writes

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._custom_objects: list[Any] = []
        self._save_hooks: OrderedDict[int, Hook] = OrderedDict()
        self._load_hooks: OrderedDict[int, Hook] = OrderedDict()
        self._settling: Any = None  # the Accelerator whose commits settle what hooks have written

    def saved_objects(self) -> SavedObjects:
        """Return the objects that a checkpoint holds, for files in another layout."""
        return SavedObjects(self._models, self._optimizers, self._schedulers, self._custom_objects)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Register objects with `state_dict` and `load_state_dict`, to be saved and loaded with the run."""
        if unfit := [
            each for each in objects if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict"))
        ]:
            listed = ", ".join(type(each).__name__ for each in unfit)
            raise ValueError(f"register_for_checkpointing(): {listed}: no state_dict and load_state_dict")
        self._custom_objects.extend(objects)
        self.inner.register_for_checkpointing(*objects)

    def register_save_state_pre_hook(self, hook: Hook) -> RemovableHandle:
        """Register a function of (models, weights, output_dir), called before each save.

        A program writes models of its own kind to `output_dir`, and takes them out of `weights`. The commit moves the
        files in `output_dir` into the folder of the checkpoint.
        """
        return _register(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Hook) -> RemovableHandle:
        """Register a function of (models, input_dir), called before each load.

        If a hook takes a model out of `models`, its weights stay as they are: the program loads them by itself.
        """
        return _register(self._load_hooks, hook)

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Path:
        """Save models, optimizers, schedulers, loaders, generators and registered objects. Called on all ranks.

        Tensors are always written as safetensors. A warning names options that have no effect. A ValueError says that
        no folder was given, or that an automatic folder has the same or a higher number. If a hook fails on any rank,
        all ranks raise an error and nothing is saved.
        """
        is_main = self.state.is_main_process
        if not safe_serialization and is_main:
            logger.warning(
                "save_state(safe_serialization=False) changes nothing: checkpoints hold safetensors and no pickle; "
                "save_model(safe_serialization=False) writes pytorch_model.bin"
            )
        if save_model_func_kwargs and is_main:
            logger.warning("save_state() ignores the arguments %s", ", ".join(save_model_func_kwargs))
        project = self.options.project
        find = partial(new_folder, output_dir, project)
        # The number is that of the main process: a program may count there alone.
        is_counted = project.automatic_checkpoint_naming
        folder = on_main(self.inner.context, find, doing="save_state()") if is_counted else find()
        try:
            if self._save_hooks:
                self._call_save_hooks(folder)
            self.inner.save_state(folder, at_once=True)  # programs look into the folder at once
        except BaseException:
            if is_main:
                settle(folder)
            raise
        project.iteration += 1
        if is_main:  # once the new one is committed: a crash leaves too many, never too few
            for old in surplus_folders(project, folder):
                rmtree(old)
        return folder

    def _call_save_hooks(self, folder: Path) -> None:
        """Call the hooks with a staging folder. The commit moves its files into the checkpoint's folder."""
        context, staged = self.inner.context, staged_folder(folder)
        if self._settling is not self.inner:
            self._settling = self.inner
            self.inner.register_checkpoint_hook(SettleHookFiles(is_main=self.state.is_main_process))
        on_main(context, lambda: stage(folder), doing=f"the folder of save hooks in {folder}")
        weights = [self.get_state_dict(model) for model in self._models]
        for hook in self._save_hooks.values():
            call = partial(hook, list(self._models), weights, str(staged))
            on_each_rank(context, call, doing="a hook of save_state")

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load a run that `save_state` saved, here or in Accelerate, on any number of ranks. Called on all ranks.

        Loaders continue at their saved position. In a run that is not strict they begin their epoch again, as in
        Accelerate, and the program skips the batches that it has counted. A warning names options without effect. A
        ValueError says that there is no folder, or refuses a partial load; a TypeError refuses unknown options.
        """
        _check_load_options(load_kwargs, load_model_func_kwargs, is_main=self.state.is_main_process)
        folder = newest_folder(input_dir, self.options.project)
        on_main(self.inner.context, lambda: settle(folder), doing=f"the hooks' files in {folder}")
        left = list(self._models)
        for hook in self._load_hooks.values():
            call = partial(hook, left, str(folder))
            on_each_rank(self.inner.context, call, doing="a hook of load_state")
        taken = [model for model in self._models if not any(model is each for each in left)]
        self.inner.load_state(folder, kept_models=taken)
        count_on(self.options.project)
        if not self.is_strict:
            for loader in self._dataloaders:
                loader.begin_anew()

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's full weights, as `from_pretrained` reads them. Called on all ranks.

        A model that is whole on each process, such as an average of weights, need not be prepared. A ValueError
        refuses a model that is divided among ranks, unless this Accelerator has prepared it and still holds it.
        """
        if safe_serialization and self._holds(model):
            self.inner.save_model(model, Path(save_directory), max_shard_size=max_shard_size)
            return
        folder, context = Path(save_directory), self.state.context
        if safe_serialization:
            save_whole(context, model, folder, max_shard_size=max_shard_size)
            return
        weights = self.get_state_dict(model)
        write = partial(write_pickled_weights, weights, folder, max_shard_size=max_shard_size)
        on_main(context, write, doing=f"the export to {folder}")

    def save(self, obj: Any, f: str | PathLike[str] | Any, safe_serialization: bool = False) -> None:
        """Write an object on the main process, or on each node's main process if the project says so."""
        on_each_node = self.options.project.save_on_each_node
        object_files.save(obj, f, on_each_node, safe_serialization)


def _register(hooks: OrderedDict[int, Hook], hook: Hook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _check_load_options(
    load_kwargs: Mapping[str, Any] | None, others: Mapping[str, Any], *, is_main: bool
) -> None:
    """Refuse options that would change the result of a load; the main process warns of all other options."""
    if unknown := sorted(set(others) - {"strict", "map_location"}):
        raise TypeError(f"load_state(): unknown arguments {', '.join(unknown)}: say strict or map_location")
    if not others.get("strict", True):
        raise ValueError(
            "load_state(strict=False): a checkpoint is loaded whole, into the models that it was saved from; to take "
            "weights over into other models, write them with save_model() and use load_checkpoint_in_model()"
        )
    if others.get("map_location") not in (None, "cpu", "on_device"):
        raise ValueError(f"load_state(map_location={others['map_location']!r}): say cpu, on_device or None")
    without_use = [
        f"load_kwargs[{name!r}]"
        for name, value in (load_kwargs or {}).items()
        if (name, value) != ("weights_only", True)  # which is done anyway
    ]
    if others.get("map_location") is not None:
        without_use.append("map_location")
    if without_use and is_main:
        logger.warning(
            "load_state(): %s: changes nothing: tensors alone are read, each to where it belongs",
            ", ".join(without_use),
        )
