"""The values of TensorBoard's events: scalars, texts, media and hyperparameters."""

import math
import struct
import wave
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from drivetrain_tracking.platforms.library import load_library
from drivetrain_tracking.values.plain import Plain
from drivetrain_tracking.values.records import StoredMedium

_FORMAT = "tensorboard.compat.proto"
_HPARAMS = "tensorboard.plugins.hparams"
_SIZE_IN_PNG = slice(16, 24)  # of the bytes: width and height
_RGB = 3


def scalar(name: str, number: float) -> Any:
    """Return a value of a curve; TensorBoard stores 32 bits."""
    return _proto("summary").Summary.Value(tag=name, simple_value=number)


def text(name: str, content: str) -> Any:
    """Return a value of the Text tab, which shows Markdown."""
    summary, tensor = _proto("summary"), _proto("tensor")
    metadata = summary.SummaryMetadata(plugin_data=summary.SummaryMetadata.PluginData(plugin_name="text"))
    stored = tensor.TensorProto(dtype=_proto("types").DT_STRING, string_val=[content.encode()])
    return summary.Summary.Value(tag=name, tensor=stored, metadata=metadata)


def medium_value(name: str, medium: StoredMedium) -> Any:
    """Return the value of an image, a figure, audio, a histogram, a table or a text."""
    if medium.kind == "histogram":
        return _histogram(name, cast("Mapping[str, list[float]]", medium.data))
    if medium.kind == "table":
        return text(name, _markdown(cast("Mapping[str, Any]", medium.data)))
    if medium.kind == "text":
        return text(name, str(medium.data))
    assert medium.path is not None
    return _audio(name, medium.path) if medium.kind == "audio" else _image(name, medium.path)


def hyperparameters(config: Mapping[str, Plain], *, start_time: float) -> Any:
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


def _image(name: str, path: Path) -> Any:
    content = path.read_bytes()
    width, height = struct.unpack(">II", content[_SIZE_IN_PNG]) if path.suffix == ".png" else (0, 0)
    summary = _proto("summary").Summary
    image = summary.Image(width=width, height=height, colorspace=_RGB, encoded_image_string=content)
    return summary.Value(tag=name, image=image)


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


def _markdown(table: Mapping[str, Any]) -> str:
    rows = [table["columns"], ["---"] * len(table["columns"]), *table["rows"]]
    return "\n".join(
        "| " + " | ".join(str(one).replace("|", "\\|").replace("\n", " ") for one in row) + " |"
        for row in rows
    )
