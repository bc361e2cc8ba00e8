from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from drivetrain_tracking.platforms.tensorboard import TensorBoardTracker
from drivetrain_tracking.records import flat_values
from drivetrain_tracking.testing import PlatformContract

events = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")


class Contract(PlatformContract):
    def make(self, directory: Path) -> TensorBoardTracker:
        return TensorBoardTracker(directory)

    def logged(self, directory: Path) -> Sequence[tuple[int | None, Mapping[str, object]]]:
        found = []
        for file in sorted(directory.glob("tensorboard/**/events.*")):
            for event in events.EventFileLoader(str(file)).Load():
                if event.wall_time and event.summary.value:
                    found.append(
                        (event.wall_time, event.step, {v.tag: _content(v) for v in event.summary.value})
                    )
        return [(step, values) for _, step, values in sorted(found, key=lambda one: one[0])]

    def as_stored(self, values: Mapping[str, object]) -> Mapping[str, object]:
        return {
            name: value if isinstance(value, str) else float(np.float32(value))
            for name, value in flat_values(values).items()
        }


def _content(value: object) -> object:
    if value.metadata.plugin_data.plugin_name == "text":
        return value.tensor.string_val[0].decode()
    return float(value.tensor.float_val[0])  # the loader makes tensors of scalars


def test_the_contract_of_platforms(tmp_path: Path) -> None:
    Contract().check_all(tmp_path)
