"""Checkpoints of one model with its optimizer, in the folders that DeepSpeed names and a program looks for."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.saving.divided import as_in, mark_replicas
from drivetrain.saving.resume import frozen_names
from drivetrain_backends import Prepared
from drivetrain_checkpoint import Checkpointer, CheckpointSettings, NoCheckpointError
from drivetrain_state import Context

_LATEST = "latest"
_MODEL = "model"


@dataclass(frozen=True, slots=True)
class EngineCheckpoints:
    """The checkpoints of one model, `FOLDER/global_stepN`, each a transaction that any number of ranks loads.

    Args:
        prepared: The model with its optimizer.
        context: The ranks that share the model.
    """

    prepared: Prepared
    context: Context

    def save(
        self,
        folder: Path,
        tag: str | None,
        *,
        beside: Mapping[str, Any],
        is_latest: bool = True,
        trained_only: bool = False,
    ) -> None:
        """Save the model and its optimizer. Called on all ranks.

        Args:
            folder: The folder of the checkpoints.
            tag: The name of the checkpoint; by default `global_stepN`.
            beside: Further states, the same on all ranks.
            is_latest: Whether a load that names no checkpoint takes this one.
            trained_only: Whether frozen parameters are left out.
        """
        step = max((each.num_steps for each in self.prepared.optimizers), default=0)
        name = str(tag or f"global_step{step}")
        state = mark_replicas(self.prepared.state_dict(), self.prepared)
        model = state.pop("model")
        left_out = frozen_names(self.prepared) if trained_only else frozenset[str]()
        checkpointer = self._checkpointer(folder / name)
        checkpointer.save(
            step,
            models={_MODEL: {key: value for key, value in model.items() if key not in left_out}},
            replicated={"training": {_MODEL: state}, "beside": beside, "trained_only": trained_only},
            per_rank={},
        )
        checkpointer.close()
        if is_latest and self.context.topology.is_main:
            (folder / _LATEST).write_text(name)

    def load(
        self, folder: Path, tag: str | None, *, with_optimizer: bool = True, strict: bool = True
    ) -> tuple[Path, Mapping[str, Any]]:
        """Load a checkpoint. Called on all ranks.

        Args:
            folder: The folder of the checkpoints.
            tag: The name of the checkpoint; by default the latest.
            with_optimizer: Whether to load the optimizer's state too.
            strict: Whether parameters that were left out as frozen are an error.

        Returns:
            The folder of the checkpoint, and what was saved beside the model.

        Raises:
            FileNotFoundError: The folder does not name its latest checkpoint.
            NoCheckpointError: There is no such checkpoint, or it is one that DeepSpeed itself wrote.
            ValueError: The checkpoint holds no frozen parameters, and `strict` asks for them.
        """
        place = folder / (tag or self._latest(folder))
        if any(place.glob("*model_states.pt")):
            raise NoCheckpointError(
                f"{place} holds files of DeepSpeed's own: merge its weights by zero_to_fp32.py, which lies beside "
                "them, load these into the model, and start the optimizer anew"
            )
        loaded = self._checkpointer(place).load(like=as_in({_MODEL: self.prepared.state_dict()["model"]}))
        own = self.prepared.state_dict()
        model: Mapping[str, Any] = loaded.models[_MODEL]
        if loaded.replicated["trained_only"]:
            if strict:
                raise ValueError(
                    f"{place} holds no frozen parameters: say load_module_strict=False, which keeps the model's own"
                )
            model = {**own["model"], **model}
        training = loaded.replicated["training"][_MODEL] if with_optimizer else own
        self.prepared.load_state_dict({**training, "model": model})
        return place, loaded.replicated["beside"]

    def _checkpointer(self, place: Path) -> Checkpointer:
        return Checkpointer(self.context, place, settings=CheckpointSettings(keep_last=1))

    @staticmethod
    def _latest(folder: Path) -> str:
        if not (folder / _LATEST).is_file():
            raise FileNotFoundError(f"{folder} has no file {_LATEST} that names a checkpoint: say tag=")
        return (folder / _LATEST).read_text().strip()
