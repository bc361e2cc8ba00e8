"""Images, videos, figures and audio: media whose content is a file."""

import wave
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from drivetrain_tracking.errors import ValueNotLoggableError
from drivetrain_tracking.media.medium import Medium, as_array, copied, media_library
from drivetrain_tracking.values.records import StoredMedium


@dataclass(frozen=True, slots=True)
class Image(Medium):
    """An image of pixels or of a file.

    Args:
        data: An array or tensor of shape (height, width) or (height, width, 1, 3 or 4), of bytes or of floats from 0
            to 1; a Pillow image; or the path of an image file, which is copied.
        channels_first: Whether the channels stand before height and width, as in torch.
        caption: A line of text to show with it.
    """

    data: Any
    channels_first: bool = False
    caption: str = ""

    def store(self, stem: Path) -> StoredMedium:
        """Write a PNG file, or copy the given one; see `Medium.store`."""
        if isinstance(self.data, str | PathLike):
            return copied(Path(self.data), stem, "image", self.caption)
        picture = self.data
        if not hasattr(picture, "save"):
            pixels = as_array(self.data, "Image")
            if self.channels_first and pixels.ndim == 3:
                pixels = pixels.transpose(1, 2, 0)
            if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4)):
                is_first = pixels.ndim == 3 and pixels.shape[0] in (1, 3, 4)
                hint = "; pass channels_first=True" if is_first else ""
                raise ValueNotLoggableError(
                    f"Image: shape {tuple(pixels.shape)}: allowed are (height, width) and (height, width, channels) "
                    f"of 1, 3 or 4 channels{hint}"
                )
            picture = _picture(pixels)
        path = stem.with_name(stem.name + ".png")
        picture.save(path)
        return StoredMedium(kind="image", path=path, caption=self.caption)


@dataclass(frozen=True, slots=True)
class Video(Medium):
    """A video of frames or of a file.

    Args:
        data: The path of a video file, which is copied; or frames of shape (time, height, width, 1, 3 or 4), of bytes
            or of floats from 0 to 1, which become an animated GIF.
        frames_per_second: The rate of frames that are given as an array.
        caption: A line of text to show with it.
    """

    data: Any
    frames_per_second: float = 10.0
    caption: str = ""

    def store(self, stem: Path) -> StoredMedium:
        """Copy the file, or write a GIF; see `Medium.store`."""
        if isinstance(self.data, str | PathLike):
            return copied(Path(self.data), stem, "video", self.caption)
        frames = as_array(self.data, "Video")
        if frames.ndim != 4 or not len(frames) or frames.shape[3] not in (1, 3, 4):
            raise ValueNotLoggableError(
                f"Video: shape {tuple(frames.shape)}: frames have the shape (time, height, width, channels)"
            )
        if self.frames_per_second <= 0:
            raise ValueNotLoggableError(
                f"Video(frames_per_second={self.frames_per_second!r}): must be above 0"
            )
        first, *rest = [_picture(frame) for frame in frames]
        path = stem.with_name(stem.name + ".gif")
        first.save(path, save_all=True, append_images=rest, duration=1000 / self.frames_per_second, loop=0)
        return StoredMedium(kind="video", path=path, caption=self.caption)


@dataclass(frozen=True, slots=True)
class Figure(Medium):
    """A figure of matplotlib, or of any library whose figures have `savefig`. It is not closed.

    Args:
        figure: The figure to draw.
        caption: A line of text to show with it.
    """

    figure: Any
    caption: str = ""

    def store(self, stem: Path) -> StoredMedium:
        """Write a PNG file; see `Medium.store`."""
        if not callable(getattr(self.figure, "savefig", None)):
            raise ValueNotLoggableError(
                f"Figure({type(self.figure).__name__}): it has no savefig, as matplotlib's have"
            )
        path = stem.with_name(stem.name + ".png")
        self.figure.savefig(path)
        return StoredMedium(kind="figure", path=path, caption=self.caption)


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


def _picture(pixels: Any) -> Any:
    """Return a Pillow image of pixels, shape (height, width) or (height, width, channels)."""
    numpy = media_library("numpy")
    if pixels.dtype.kind == "f":
        pixels = numpy.clip(numpy.nan_to_num(pixels), 0, 1) * 255.0 + 0.5
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    return media_library("PIL.Image").fromarray(pixels.astype(numpy.uint8))
