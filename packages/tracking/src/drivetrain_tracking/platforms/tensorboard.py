"""TensorBoard: event files in `DIRECTORY/tensorboard/RUN`, which `tensorboard --logdir` shows."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain_tracking.plain import Plain
from drivetrain_tracking.platforms.platform import Platform, folder_name, load_library
from drivetrain_tracking.records import LoggedRecord, flat_numbers, flat_texts

_FORMAT = "tensorboard.compat.proto"


class TensorBoardTracker(Platform):
    """A tracker that writes TensorBoard's event files, without TensorFlow or torch.

    Numbers and booleans are scalars, strings are texts; None is left out. A record without a step gets the last step.
    Steps that a resumed run logs again are a run of their own, `attempt-2`, since TensorBoard hides what it takes for
    an abandoned past.
    """

    name = "tensorboard"

    def __init__(self, directory: Path | str) -> None:
        super().__init__(directory)
        self._folder = self.directory
        self._writers: dict[int, Any] = {}  # by attempt
        self._step = 0

    def open(self, run_name: str, config: Mapping[str, Plain]) -> None:
        """Choose the run's folder, and write its configuration as a text."""
        load_library("tensorboard", extra=self.name)
        self._folder = self.directory / self.name / folder_name(run_name)
        told = json.dumps(config, indent=2)
        self._add(1, wall_time=0.0, values=[self._text("config", f"```json\n{told}\n```")])
        self._flush()

    def write_records(self, records: Sequence[LoggedRecord]) -> None:
        """Write each record as one event, which is in its file whole or not at all."""
        for record in records:
            self._step = self._step if record.step is None else record.step
            values = [self._scalar(name, value) for name, value in flat_numbers(record.values).items()]
            values += [self._text(name, text) for name, text in flat_texts(record.values).items()]
            self._add(record.attempt, wall_time=record.time, values=values)
        self._flush()

    def count_held(self, records: Sequence[LoggedRecord]) -> int:
        """Count the records whose times the event files hold."""
        times = {attempt: self._times(attempt) for attempt in {record.attempt for record in records}}
        held = [record.time in times[record.attempt] for record in records]
        return held.index(False) if False in held else len(held)

    def close(self) -> None:
        """Close the event files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _attempt_folder(self, attempt: int) -> Path:
        return self._folder if attempt == 1 else self._folder / f"attempt-{attempt}"

    def _times(self, attempt: int) -> set[float]:
        loader = load_library("tensorboard.backend.event_processing.event_file_loader", extra=self.name)
        files = sorted(self._attempt_folder(attempt).glob("events.out.tfevents.*"))
        return {event.wall_time for file in files for event in loader.EventFileLoader(str(file)).Load()}

    def _add(self, attempt: int, *, wall_time: float, values: list[Any]) -> None:
        event = load_library(f"{_FORMAT}.event_pb2", extra=self.name).Event(
            wall_time=wall_time, step=self._step
        )
        event.summary.value.extend(values)
        if attempt not in self._writers:
            library = load_library("tensorboard.summary.writer.event_file_writer", extra=self.name)
            self._writers[attempt] = library.EventFileWriter(str(self._attempt_folder(attempt)))
        self._writers[attempt].add_event(event)

    def _flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def _value(self, **content: Any) -> Any:
        return load_library(f"{_FORMAT}.summary_pb2", extra=self.name).Summary.Value(**content)

    def _scalar(self, name: str, value: float) -> Any:
        return self._value(tag=name, simple_value=value)

    def _text(self, name: str, text: str) -> Any:
        summary = load_library(f"{_FORMAT}.summary_pb2", extra=self.name)
        tensor = load_library(f"{_FORMAT}.tensor_pb2", extra=self.name)
        kinds = load_library(f"{_FORMAT}.types_pb2", extra=self.name)
        metadata = summary.SummaryMetadata(plugin_data=summary.SummaryMetadata.PluginData(plugin_name="text"))
        content = tensor.TensorProto(dtype=kinds.DT_STRING, string_val=[text.encode()])
        return self._value(tag=name, tensor=content, metadata=metadata)
