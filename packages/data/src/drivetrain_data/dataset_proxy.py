"""A proxy of a user's dataset, which neither the dataset's own code nor a `worker_init_fn` notices."""

from typing import Any


class DatasetProxy:
    """A mixin of datasets that read another: all other attributes are those of that dataset."""

    _drivetrain_dataset: Any

    def __init__(self, dataset: Any, **own: Any) -> None:
        values = {"dataset": dataset, **own}
        vars(self).update(
            {f"_drivetrain_{name}": value for name, value in values.items()}
        )  # not by __setattr__

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_drivetrain")):
            raise AttributeError(name)
        return getattr(self._drivetrain_dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._drivetrain_dataset, name, value)
