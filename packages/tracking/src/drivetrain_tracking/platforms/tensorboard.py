"""TensorBoard: event files in `DIRECTORY/tensorboard/RUN`, which `tensorboard --logdir` shows."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain_tracking.errors import TrackerStateError
from drivetrain_tracking.platforms.library import load_library
from drivetrain_tracking.platforms.platform import NoOptions, Platform
from drivetrain_tracking.platforms.tensorboard_values import hyperparameters, medium_value, scalar, text
from drivetrain_tracking.protocol import Metrics
from drivetrain_tracking.values.plain import Plain
from drivetrain_tracking.values.records import LoggedRecord, count_first_held, flat_numbers, flat_texts

_NOT_FINISHED = ".not-finished"  # an empty file in the run's folder, while its text `state` says so


class TensorBoardTracker(Platform[NoOptions]):
    """A tracker that writes TensorBoard's event files, without TensorFlow or torch.

    Numbers and booleans are scalars, strings are texts; None is left out. A record without a step gets the last step.
    The configuration is a text and a row of the HParams tab, the plan a text. Steps that a resumed run logs again are
    a run of their own, `attempt-2`, since TensorBoard hides what it takes for an abandoned past.

    Each record is one event, with a checksum: a kill leaves it in its file whole or not at all.
    """

    name = "tensorboard"
    library = "tensorboard"
    media_kinds = frozenset({"image", "figure", "audio", "table", "histogram", "text"})

    def __init__(self, directory: Path | str) -> None:
        super().__init__(directory)
        self._folder = self.directory
        self._writers: dict[int, Any] = {}  # by attempt
        self._step = 0

    @staticmethod
    def directory_of(given: Any) -> Path:
        """Return the folder of a `SummaryWriter` of torch or tensorboardX.

        Raises:
            TrackerStateError: The writer is closed.
        """
        if given.file_writer is None:
            raise TrackerStateError("tensorboard: this SummaryWriter is closed: make another one")
        return Path(given.file_writer.get_logdir())

    def open(self, run_name: str, config: Mapping[str, Plain]) -> None:
        """Choose the run's folder, and write its configuration."""
        load_library("tensorboard", extra=self.name)
        if self._given is None:
            self._folder = self.directory / self.name / self.file_name(run_name)
        told = text("config", f"```json\n{json.dumps(config, indent=2)}\n```")
        self._add(
            1, wall_time=0.0, values=[told, hyperparameters(self.parameters(config), start_time=time.time())]
        )
        self._flush()

    def write_records(self, records: Sequence[LoggedRecord]) -> None:
        """Write each record as one event."""
        for record in records:
            self._step = self._step if record.step is None else record.step
            values = [scalar(name, value) for name, value in flat_numbers(record.values).items()]
            values += [text(name, content) for name, content in flat_texts(record.values).items()]
            values += [medium_value(name, medium) for name, medium in record.media.items()]
            self._add(record.attempt, wall_time=record.time, values=values)
        self._flush()

    def count_held(self, records: Sequence[LoggedRecord]) -> int:
        """Count the records whose times the event files hold."""
        loader = load_library("tensorboard.backend.event_processing.event_file_loader", extra=self.name)
        times: set[float] = set()
        for attempt in {record.attempt for record in records}:
            for file in self._attempt_folder(attempt).glob("events.out.tfevents.*"):
                times |= {event.wall_time for event in loader.EventFileLoader(str(file)).Load()}
        return count_first_held(records, times)

    def keep_document(self, name: str, document: Metrics) -> None:
        """Write a document as a text."""
        self._add(
            1, wall_time=0.0, values=[text(name, f"```json\n{json.dumps(dict(document), indent=2)}\n```")]
        )
        self._flush()

    def close(self) -> None:
        """Close the event files, after a text `state` if the run did not finish, or did not before."""
        told = self._given is None and self.has_ended_early
        if told or (self.state == "finished" and self._folder.joinpath(_NOT_FINISHED).exists()):
            self._add(1, wall_time=time.time(), values=[text("state", self.state_word)])
            note = self._folder / _NOT_FINISHED
            note.touch() if told else note.unlink()
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _attempt_folder(self, attempt: int) -> Path:
        return self._folder if attempt == 1 else self._folder / f"attempt-{attempt}"

    def _add(self, attempt: int, *, wall_time: float, values: list[Any]) -> None:
        event = load_library("tensorboard.compat.proto.event_pb2", extra=self.name).Event(
            wall_time=wall_time, step=self._step
        )
        event.summary.value.extend(values)
        if attempt == 1 and self._given is not None:
            if type(self._given).__module__.startswith("tensorboardX."):  # it has an Event class of its own
                own = load_library("tensorboardX.proto.event_pb2", extra=self.name).Event
                event = own.FromString(event.SerializeToString())
            self._given.file_writer.add_event(event, self._step, wall_time)
            return
        if attempt not in self._writers:
            library = load_library("tensorboard.summary.writer.event_file_writer", extra=self.name)
            self._writers[attempt] = library.EventFileWriter(str(self._attempt_folder(attempt)))
        self._writers[attempt].add_event(event)

    def _flush(self) -> None:
        if self._given is not None:
            self._given.flush()
        for writer in self._writers.values():
            writer.flush()
