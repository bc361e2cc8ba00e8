"""Audio, of samples or of files."""

import wave
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from drivetrain_tracking.errors import ValueNotLoggableError
from drivetrain_tracking.media.medium import Medium, as_array, copied, media_library
from drivetrain_tracking.values.records import StoredMedium


@dataclass(frozen=True, slots=True)
class Audio(Medium):
    """A sound of samples or of a file.

    Args:
        data: Samples of shape (time,) or (time, channels), floats from -1 to 1 or integers of 16 bits; or the path of
            an audio file, which is copied.
        sample_rate: The samples per second; needed for samples.
        caption: A line of text to show with it.
    """

    data: Any
    sample_rate: int | None = None
    caption: str = ""

    def store(self, stem: Path) -> StoredMedium:
        """Write a WAV file of 16 bits, or copy the given file; see `Medium.store`."""
        if isinstance(self.data, str | PathLike):
            return copied(Path(self.data), stem, "audio", self.caption)
        samples = as_array(self.data, "Audio")
        if samples.ndim not in (1, 2) or not samples.size:
            raise ValueNotLoggableError(
                f"Audio: shape {tuple(samples.shape)}: samples have the shape (time,) or (time, channels)"
            )
        if self.sample_rate is None or self.sample_rate <= 0:
            raise ValueNotLoggableError(
                f"Audio(sample_rate={self.sample_rate!r}): say the samples per second"
            )
        numpy = media_library("numpy")
        if samples.dtype.kind == "f":
            samples = numpy.clip(numpy.nan_to_num(samples), -1, 1) * 32767
        path = stem.with_name(stem.name + ".wav")
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
            file.setsampwidth(2)
            file.setframerate(self.sample_rate)
            file.writeframes(samples.astype("<i2").tobytes())
        return StoredMedium(kind="audio", path=path, caption=self.caption)
