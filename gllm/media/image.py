"""Bytes to an RGB image: the size from the header alone, then the pixels, with every failure a BadRequest.

Nothing here fetches, resizes or knows of a model. All functions are CPU work for a pool, never for an event loop.
"""

from __future__ import annotations

import io
import math
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from PIL import BmpImagePlugin, GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin, TiffImagePlugin, WebPImagePlugin

from gllm.errors import BadRequest

# Image.open imports its plugins on the first call, which is not safe from several threads: they are imported here.
_PLUGINS = (BmpImagePlugin, GifImagePlugin, JpegImagePlugin, PngImagePlugin, TiffImagePlugin, WebPImagePlugin)

MAX_PIXELS = 64 << 20  # a decoded image of this size takes 256 MiB in Pillow
_MAX_JPEG_WORK = 4 << 30  # pixels times scans; libjpeg visits every pixel once a scan, and scans cost few bytes
_SIGNATURE_BYTES = 12
_TILE_WIDTH, _TILE_LENGTH, _BITS_PER_SAMPLE, _ORIENTATION = 322, 323, 258, 274
_CALLERS_IMAGES = threading.Lock()
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class Size(NamedTuple):
    """Pixels of an image as it is shown, that is after its EXIF orientation."""

    width: int
    height: int

    @property
    def pixels(self) -> int:
        return self.width * self.height


def probe(data: bytes, *, complete: bool = False) -> Size | None:
    """The size of the image that `data` begins with; None while more bytes are needed.

    complete: `data` is the whole file. Raises BadRequest as soon as the bytes show that no image comes of them.
    """
    kind = _sniff(data, complete)
    if kind is None:
        return None
    if kind == "WEBP" and not complete:
        # Pillow opens a whole WebP only; its size stands in the first 30 bytes, its EXIF behind the pixels.
        canvas, final = _webp_canvas(data)
        if canvas is not None:
            _check_pixels(canvas)
        return canvas if final else None
    if kind == "TIFF" and not complete:
        return None  # its tags may stand anywhere, and Pillow takes a cut list of tags for the whole
    try:
        with _failures_named(kind), _opened(data, kind) as image:
            return _shown_size(image, _orientation(image))
    except _Unreadable:
        if complete:
            raise
        return None


def decode(data: bytes) -> Image.Image:
    """The first frame of `data` as an upright, fully loaded RGB image. Raises BadRequest."""
    kind = _sniff(data, complete=True)
    assert kind is not None
    with _failures_named(kind), _opened(data, kind) as image:
        if kind == "JPEG" and data.count(b"\xff\xda") * image.width * image.height > _MAX_JPEG_WORK:
            raise BadRequest("a JPEG of too many scans", code="invalid_image")
        orientation = _orientation(image)
        image.load()
        return _upright(to_rgb(image), orientation)


def picture_size(image: Image.Image) -> Size:
    """The shown size of a Pillow image that a caller made; loads it. Raises BadRequest."""
    with _failures_named("image"):
        _load_callers(image)
        return _shown_size(image, _orientation(image))


def picture(image: Image.Image) -> Image.Image:
    """A Pillow image that a caller made, upright and in RGB; `image` stays as it is. Raises BadRequest."""
    with _failures_named("image"):
        _load_callers(image)
        return _upright(to_rgb(image), _orientation(image))


def _load_callers(image: Image.Image) -> None:
    """One image may stand in several prompts, and Pillow's lazy loading is not safe from several threads."""
    _check_pixels(image.size)
    with _CALLERS_IMAGES:
        image.load()


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode to RGB: transparency over white, deep greyscale scaled to 8 bits rather than clipped."""
    if image.mode.startswith("I") or image.mode == "F":
        return _deep_grey(image).convert("RGB")
    if image.has_transparency_data:
        rgba = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        if rgba.getchannel("A").getextrema() == (255, 255):
            return rgba.convert("RGB")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


class _Unreadable(BadRequest):
    """The decoder gave up: the file is corrupt, or not all here yet."""


@contextmanager
def _failures_named(kind: str) -> Iterator[None]:
    """Whatever a decoder raises (OSError, SyntaxError, struct.error, MemoryError, ...) leaves as a BadRequest."""
    try:
        yield
    except BadRequest:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadRequest(f"more than the {MAX_PIXELS:,} pixels that an image may have", code="invalid_image") from None
    except MemoryError:
        raise BadRequest("too large to decode", code="invalid_image") from None
    except Exception as error:
        raise _Unreadable(f"a truncated or corrupt {kind}", code="invalid_image") from error


def _sniff(data: bytes, complete: bool) -> str | None:
    """Pillow's name of the format; None when there are too few bytes to tell."""
    head = bytes(data[:_SIGNATURE_BYTES])
    if len(head) < _SIGNATURE_BYTES and not complete:
        return None
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if head.startswith(b"RIFF") and head[8:] == b"WEBP":
        return "WEBP"
    if head.startswith(b"BM"):
        return "BMP"
    if head.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")):
        return "TIFF"
    what = "not a supported image" if head else "empty"
    raise BadRequest(f"{what} (supported: JPEG, PNG, WebP, GIF, BMP, TIFF)", code="invalid_image")


@contextmanager
def _opened(data: bytes, kind: str) -> Iterator[Image.Image]:
    """The image with its header read, its size checked, and no pixel decoded."""
    if declared := _declared_size(data, kind):
        _check_pixels(declared)  # first, since Pillow warns of large sizes, and allocates a WebP's canvas on opening
    with Image.open(io.BytesIO(data), formats=(kind,)) as image:
        _check_pixels(image.size)
        if kind == "TIFF":
            tags = image.tag_v2  # type: ignore[attr-defined]
            _check_pixels((int(tags.get(_TILE_WIDTH, 1)), int(tags.get(_TILE_LENGTH, 1))))
        if kind == "JPEG" and not image.tile:
            raise _Unreadable("a truncated or corrupt JPEG", code="invalid_image")  # cut between two header segments
        yield image


def _check_pixels(size: tuple[int, int]) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise BadRequest(f"{width}x{height} pixels", code="invalid_image")
    if width * height > MAX_PIXELS:
        raise BadRequest(
            f"{width}x{height} is {width * height:,} pixels, more than the {MAX_PIXELS:,} that an image may have",
            code="invalid_image",
        )


def _declared_size(data: bytes, kind: str) -> tuple[int, int] | None:
    """The size that stands at a fixed place, for the formats that have one; not turned yet."""
    if kind == "PNG" and len(data) >= 24:
        return struct.unpack_from(">II", data, 16)
    if kind == "GIF" and len(data) >= 10:
        return struct.unpack_from("<HH", data, 6)
    return _webp_canvas(data)[0] if kind == "WEBP" else None


def _webp_canvas(data: bytes) -> tuple[Size | None, bool]:
    """The size in a WebP's header, and whether it is the shown size (no EXIF or XMP that may rotate it follows)."""
    if len(data) < 30:
        return None, False
    chunk = bytes(data[12:16])
    if chunk == b"VP8X":
        width = int.from_bytes(data[24:27], "little") + 1
        height = int.from_bytes(data[27:30], "little") + 1
        return Size(width, height), not data[20] & 0b1100
    if chunk == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return Size((bits & 0x3FFF) + 1, ((bits >> 14) & 0x3FFF) + 1), True
    if chunk == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return Size(width & 0x3FFF, height & 0x3FFF), True
    raise _Unreadable("a truncated or corrupt WEBP", code="invalid_image")


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8; 1 when there is none, or none that can be read.

    Read from what precedes the pixels: a PNG's may also follow them, where it would change a size already told.
    """
    if image.format == "TIFF":
        return 1  # Pillow applies a TIFF's orientation itself, to `size` on opening and to the pixels on loading
    try:
        orientation = Image.Image.getexif(image).get(_ORIENTATION, 1)
    except Exception:
        return 1
    return orientation if orientation in _TRANSPOSE else 1


def _shown_size(image: Image.Image, orientation: int) -> Size:
    width, height = image.size
    return Size(height, width) if orientation >= 5 else Size(width, height)


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    return image if orientation == 1 else image.transpose(_TRANSPOSE[orientation])


def _deep_grey(image: Image.Image) -> Image.Image:
    """Greyscale of more than 8 bits to L. 16-bit files use their whole range; others by the range of their values."""
    if image.mode.startswith("I;16"):
        bits = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, (16,))[0]
        scale, offset = (1 / 16 if bits == 12 else 1 / 256), 0.0
        image = image if image.mode == "I;16" else image.convert("I")
        return image.point(lambda value: value * scale + offset).convert("L")
    low, high = (float(extreme) for extreme in image.getextrema())  # type: ignore[arg-type]  # one band
    if not (math.isfinite(low) and math.isfinite(high)):
        values = np.asarray(image)
        finite = values[np.isfinite(values)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        image = Image.fromarray(np.nan_to_num(values, nan=low, posinf=high, neginf=low))
    scale, offset = _to_8_bits(low, high, image.mode)
    return image.point(lambda value: value * scale + offset).convert("L")


def _to_8_bits(low: float, high: float, mode: str) -> tuple[float, float]:
    """(scale, offset) that map the customary ranges 0..1 (float), 0..255 and 0..65535 as a whole, others linearly."""
    if low >= 0:
        if mode == "F" and high <= 1:
            return 255.0, 0.0
        if high <= 255:
            return 1.0, 0.0
        if high <= 65535:
            return 1 / 256, 0.0
    scale = 255 / (high - low) if high > low else 0.0
    return scale, -low * scale
