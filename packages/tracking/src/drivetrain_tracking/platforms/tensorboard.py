"""TensorBoard: event files in `DIRECTORY/tensorboard/RUN`, which `tensorboard --logdir` shows."""

import json
import math
import struct
import time
import wave
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from drivetrain_tracking.errors import TrackerStateError
from drivetrain_tracking.platforms.platform import NoOptions, Platform, load_library
from drivetrain_tracking.protocol import Metrics
from drivetrain_tracking.run.run_state import RunState
from drivetrain_tracking.values.plain import Plain
from drivetrain_tracking.values.records import LoggedRecord, StoredMedium, count_first_held

_FORMAT = "tensorboard.compat.proto"
_HPARAMS = "tensorboard.plugins.hparams"
_SIZE_IN_PNG = slice(16, 24)  # of the bytes: width and height
_RGB = 3
_NOT_FINISHED = ".not-finished"  # an empty file in the run's folder, while its text `state` says so


class TensorBoardTracker(Platform[NoOptions]):
    """A tracker that writes TensorBoard's event files, without TensorFlow or torch.

    Numbers and booleans are scalars, strings are texts; None is left out. A record without a step gets the last step.
    The configuration is a text and a row of the HParams tab, the plan a text. Repeated steps of a resumed run are
    another run, `attempt-2`: TensorBoard hides points that a restart seems to have abandoned.

    Each record is one event with a checksum: after a kill, the file holds all of the record or nothing.
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
        parameters = _hyperparameters(self.parameters(config), start_time=time.time())
        self._add(1, wall_time=0.0, values=[_document("config", config), parameters])
        self._flush()

    def write_records(self, records: Sequence[LoggedRecord]) -> None:
        """Write each record as one event."""
        summary = _proto("summary").Summary
        for record in records:
            self._step = self._step if record.step is None else record.step
            # Of a number, TensorBoard stores 32 bits.
            values = [summary.Value(tag=name, simple_value=number) for name, number in record.numbers.items()]
            values += [_text(name, content) for name, content in record.texts.items()]
            values += [_medium_value(name, medium) for name, medium in record.media.items()]
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
        self._add(1, wall_time=0.0, values=[_document(name, document)])
        self._flush()

    def close(self) -> None:
        """Write a text `state` if the run, or an earlier start of it, did not finish."""
        note = self._folder / _NOT_FINISHED
        if self.has_ended_early or (self.state == "finished" and note.exists()):
            self._add(1, wall_time=time.time(), values=[_text("state", self.state_word)])
            note.touch() if self.has_ended_early else note.unlink()

    def end(self, state: RunState | None) -> None:
        """End the run, and close the event files; in a user's run, only the files of later attempts."""
        super().end(state)
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


def _text(name: str, content: str) -> Any:
    """Return a value of the Text tab, which shows Markdown."""
    summary, tensor = _proto("summary"), _proto("tensor")
    metadata = summary.SummaryMetadata(plugin_data=summary.SummaryMetadata.PluginData(plugin_name="text"))
    stored = tensor.TensorProto(dtype=_proto("types").DT_STRING, string_val=[content.encode()])
    return summary.Summary.Value(tag=name, tensor=stored, metadata=metadata)


def _document(name: str, document: Metrics) -> Any:
    return _text(name, f"```json\n{json.dumps(dict(document), indent=2)}\n```")


def _medium_value(name: str, medium: StoredMedium) -> Any:
    """Return the value of an image, a figure, audio, a histogram, a table or a text."""
    if medium.kind == "histogram":
        return _histogram(name, cast("Mapping[str, list[float]]", medium.data))
    if medium.kind == "table":
        table = cast("Mapping[str, Any]", medium.data)
        rows = [table["columns"], ["---"] * len(table["columns"]), *table["rows"]]
        cells = [[str(one).replace("|", "\\|").replace("\n", " ") for one in row] for row in rows]
        return _text(name, "\n".join(f"| {' | '.join(row)} |" for row in cells))
    if medium.kind == "text":
        return _text(name, str(medium.data))
    assert medium.path is not None
    if medium.kind == "audio":
        return _audio(name, medium.path)
    content = medium.path.read_bytes()
    width, height = struct.unpack(">II", content[_SIZE_IN_PNG]) if medium.path.suffix == ".png" else (0, 0)
    summary = _proto("summary").Summary
    image = summary.Image(width=width, height=height, colorspace=_RGB, encoded_image_string=content)
    return summary.Value(tag=name, image=image)


def _hyperparameters(config: Mapping[str, Plain], *, start_time: float) -> Any:
    """Return the value that lists a configuration in the HParams tab, which has no place for None."""
    data = load_library(f"{_HPARAMS}.plugin_data_pb2", extra="tensorboard")
    metadata = load_library(f"{_HPARAMS}.metadata", extra="tensorboard")
    session = data.SessionStartInfo(start_time_secs=start_time)
    for name, value in config.items():
        if isinstance(value, bool):
            session.hparams[name].bool_value = value
        elif isinstance(value, str):
            session.hparams[name].string_value = value
        elif isinstance(value, (int, float)):
            session.hparams[name].number_value = value
    described = metadata.create_summary_metadata(data.HParamsPluginData(session_start_info=session))
    return _proto("summary").Summary.Value(tag=metadata.SESSION_START_INFO_TAG, metadata=described)


def _proto(name: str) -> Any:
    return load_library(f"{_FORMAT}.{name}_pb2", extra="tensorboard")


def _audio(name: str, path: Path) -> Any:
    with wave.open(str(path)) as sound:
        rate, channels, frames = sound.getframerate(), sound.getnchannels(), sound.getnframes()
    summary = _proto("summary").Summary
    audio = summary.Audio(
        sample_rate=rate,
        num_channels=channels,
        length_frames=frames,
        encoded_audio_string=path.read_bytes(),
        content_type="audio/wav",
    )
    return summary.Value(tag=name, audio=audio)


def _histogram(name: str, data: Mapping[str, list[float]]) -> Any:
    edges, counts = data["edges"], data["counts"]
    centres = [(low + high) / 2 for low, high in pairwise(edges)]
    summary = _proto("summary")
    histogram = summary.HistogramProto(
        min=edges[0],
        max=edges[-1],
        num=math.fsum(counts),
        sum=math.fsum(count * at for count, at in zip(counts, centres, strict=True)),
        sum_squares=math.fsum(count * at * at for count, at in zip(counts, centres, strict=True)),
        # Its buckets end at these limits, and the first begins at minus infinity: an empty one begins ours.
        bucket_limit=edges,
        bucket=[0.0, *counts],
    )
    return summary.Summary.Value(tag=name, histo=histogram)
