"""A proxy of a user's dataset; the dataset's own code and a `worker_init_fn` do not notice the proxy."""

from typing import Any


class DatasetProxy:
    """A mixin for datasets that read another dataset: attributes not defined here come from the other dataset."""

    _drivetrain_dataset: Any

    def __init__(self, dataset: Any, **own: Any) -> None:
        values = {"dataset": dataset, **own}
        # Not by __setattr__.
        vars(self).update((f"_drivetrain_{name}", value) for name, value in values.items())

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_drivetrain")):
            raise AttributeError(name)
        return getattr(self._drivetrain_dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._drivetrain_dataset, name, value)
