"""Bytes to RGB: sizes from prefixes, every mode, and every way in which a file can be broken."""

from __future__ import annotations

import io
import resource
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from gllm.errors import BadRequest
from gllm.media import image as images
from tests.media.files import bomb_png, encoded, gradient, with_orientation

SAMPLES = {
    "jpeg": encoded(gradient(61, 37), "JPEG"),
    "jpeg progressive": encoded(gradient(61, 37), "JPEG", progressive=True),
    "jpeg turned": encoded(gradient(61, 37), "JPEG", exif=with_orientation(6)),
    "jpeg late header": encoded(gradient(61, 37), "JPEG", exif=with_orientation(8), icc_profile=b"i" * 90_000),
    "jpeg thumbnail": encoded(gradient(61, 37), "JPEG", comment=encoded(gradient(8, 9), "JPEG")),
    "mpo": encoded(gradient(61, 37), "MPO", save_all=True, append_images=[gradient(20, 20)]),
    "png": encoded(gradient(61, 37), "PNG"),
    "png turned": encoded(gradient(61, 37), "PNG", exif=with_orientation(5)),
    "png palette": encoded(gradient(61, 37).quantize(16), "PNG"),
    "webp lossy": encoded(gradient(61, 37), "WEBP"),
    "webp lossless": encoded(gradient(61, 37), "WEBP", lossless=True),
    "webp turned": encoded(gradient(61, 37), "WEBP", exif=with_orientation(7)),
    "webp alpha": encoded(gradient(61, 37).convert("RGBA"), "WEBP", exact=True),
    "gif": encoded(gradient(61, 37), "GIF"),
    "gif animated": encoded(gradient(61, 37), "GIF", save_all=True, append_images=[gradient(61, 37).rotate(90)]),
    "bmp": encoded(gradient(61, 37), "BMP"),
    "tiff": encoded(gradient(61, 37), "TIFF"),
    "tiff turned": encoded(gradient(61, 37), "TIFF", exif=with_orientation(6), compression="tiff_lzw"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_every_prefix_tells_the_final_size_or_nothing(name: str) -> None:
    data = SAMPLES[name]
    size = images.decode(data).size
    step = max(1, len(data) // 400)
    known = False
    for length in [*range(0, len(data), step), len(data)]:
        probed = images.probe(data[:length], complete=length == len(data))
        assert probed in (None, size)
        assert not (known and probed is None), "a size once told does not go away"
        known = probed is not None
    assert known


@pytest.mark.parametrize("name", [name for name in SAMPLES if "turned" not in name and not name.startswith("tiff")])
def test_size_is_known_long_before_the_end(name: str) -> None:
    data = encoded(gradient(900, 700), name.split()[0].upper(), quality=95)
    assert images.probe(data[: max(1000, len(data) // 20)]) == (900, 700)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation_is_applied_as_pillow_does(kind: str, orientation: int) -> None:
    data = encoded(gradient(64, 32), kind, exif=with_orientation(orientation))
    wanted = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert np.array_equal(images.decode(data), wanted)
    assert images.probe(data, complete=True) == wanted.size


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_corrupt_exif_does_not_fail_an_image() -> None:
    for junk in (b"Exif\0\0MM\0*\xff\xff\xff\xff", b"Exif\0\0nonsense", b"Exif\0\0II*\0\x08\0\0\0\xff\xff"):
        data = encoded(gradient(40, 20), "JPEG", exif=junk)
        assert images.probe(data) == images.decode(data).size == (40, 20)


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "La", "CMYK", "YCbCr", "HSV", "I", "F"]
)
def test_each_mode_keeps_its_looks(mode: str) -> None:
    source = gradient(64, 48)
    via = {"La": "LA", "RGBa": "RGBA", "PA": "P"}.get(mode)
    image = (source.convert(via) if via else source).convert(mode)
    grey = mode in ("1", "L", "LA", "La", "I", "F")
    wanted = np.asarray(source.convert("L").convert("RGB") if grey else source).astype(int)
    got = np.asarray(images.picture(image)).astype(int)
    assert got.shape == wanted.shape
    # Dithering and palettes change single pixels, not the average of a neighbourhood.
    blocks = (got - wanted).reshape(6, 8, 8, 8, 3).mean(axis=(1, 3))
    assert np.abs(blocks).max() < 25


def test_sixteen_bit_greyscale_is_scaled_not_clipped() -> None:
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    for image in (
        Image.fromarray(ramp),
        Image.fromarray(ramp.astype(np.int32)),
        Image.fromarray(ramp.astype(np.float32)),
    ):
        assert np.array_equal(np.asarray(images.picture(image))[..., 0], ramp >> 8)
    for kind in ("PNG", "TIFF"):
        assert np.array_equal(np.asarray(images.decode(encoded(Image.fromarray(ramp), kind)))[..., 1], ramp >> 8)


def test_big_endian_sixteen_bit_and_signed_ranges() -> None:
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    tiff = encoded(Image.frombytes("I;16B", (256, 256), ramp.astype(">u2").tobytes()), "TIFF")
    assert np.array_equal(np.asarray(images.decode(tiff))[..., 0], ramp >> 8)
    signed = Image.fromarray(np.linspace(-1000, 1000, 256, dtype=np.int32).reshape(16, 16))
    grey = np.asarray(images.picture(signed))[..., 0].ravel()
    assert grey[0] == 0
    assert grey[-1] >= 254
    assert np.all(np.diff(grey.astype(int)) >= 0)


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [([0.0, 0.5, 1.0], 0, 255), ([0.0, 100.0, 255.0], 0, 255), ([-1.0, 0.0, 1.0], 0, 255), ([7e9, 7e9, 7e9], 0, 0)],
)
def test_float_ranges(values: list[float], low: int, high: int) -> None:
    grey = np.asarray(images.picture(Image.fromarray(np.array([values], dtype=np.float32))))[0, :, 0]
    assert (grey[0], grey[-1]) == (low, high)


def test_float_images_with_holes_are_still_seen() -> None:
    values = np.array([[np.nan, 0.0, 1.0, np.inf, -np.inf]], dtype=np.float32)
    assert np.asarray(images.picture(Image.fromarray(values)))[0, :, 0].tolist() == [0, 0, 255, 255, 0]
    assert images.picture(Image.fromarray(np.full((2, 2), np.nan, dtype=np.float32))).getpixel((0, 0)) == (0, 0, 0)


def test_transparency_lies_over_white() -> None:
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    half = Image.new("LA", (4, 4), (0, 128))
    keyed = Image.new("RGB", (4, 4), (9, 9, 9))
    keyed.info["transparency"] = (9, 9, 9)
    assert images.picture(clear).getpixel((0, 0)) == (255, 255, 255)
    assert images.picture(half).getpixel((0, 0)) == (127, 127, 127)
    assert images.picture(keyed).getpixel((0, 0)) == (255, 255, 255)
    assert images.decode(encoded(keyed, "PNG", transparency=(9, 9, 9))).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\0", b"MZ" + b"\0" * 500, b"%PDF-1.7\n" + b"x" * 500, b"<svg xmlns='http://www.w3.org/2000/svg'/>" * 5,
        b"<html><body>no</body></html>", b"\0\0\0\x20ftypavif" + b"\0" * 99, b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0",
        b"RIFF\0\0\0\0WEBP", b"RIFF\0\0\0\0WAVE" + b"\0" * 99, b"GIF89a", b"BM" + b"\0" * 10, b"II*\0\xff\xff\xff\xff",
        b"II*\0\x08\0\0\0\xff\xff", b"BM" + b"\xff" * 60, b"GIF89a" + b"\xff" * 60, b"P6 9 9 255 " + b"\0" * 243,
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest):
        images.probe(data, complete=True)
    with pytest.raises(BadRequest):
        images.decode(data)


def test_no_image_is_refused_from_its_first_bytes() -> None:
    for start in (b"<!DOCTYPE html>", b"%PDF-1.7 ....", b"{'error': 404}"):
        with pytest.raises(BadRequest):
            images.probe(start)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("cut", [128, 0.5, 0.9])
def test_a_truncated_file_is_refused_at_the_latest_with_its_pixels(kind: str, cut: float) -> None:
    data = encoded(Image.effect_noise((200, 200), 80).convert("RGB"), kind)
    with pytest.raises(BadRequest, match="truncated or corrupt"):
        images.decode(data[: -cut if cut > 1 else int(len(data) * cut)])


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(SAMPLES)), flips=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=8)
)
@pytest.mark.filterwarnings("ignore")
def test_damaged_files_raise_nothing_but_bad_request(name: str, flips: list[tuple[float, int]]) -> None:
    data = bytearray(SAMPLES[name])
    for where, value in flips:
        data[int(where * (len(data) - 1))] = value
    try:
        size = images.probe(bytes(data), complete=True)
        assert images.decode(bytes(data)).mode == "RGB"
    except BadRequest:
        return
    assert size is not None


def test_bombs_are_refused_by_their_header_without_memory() -> None:
    bombs = [bomb_png(14000, 14000)]
    assert len(bombs[0]) < 64_000
    webp = bytearray(SAMPLES["webp turned"])
    webp[24:30] = b"\xff\x3f\0" * 2
    bombs.append(bytes(webp))
    gif = bytearray(SAMPLES["gif"])
    gif[6:10] = b"\xff\xff\xff\xff"
    bombs.append(bytes(gif))
    bmp = bytearray(SAMPLES["bmp"])
    bmp[18:26] = struct.pack("<ii", 60000, 60000)
    bombs.append(bytes(bmp))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for bomb in bombs:
        with pytest.raises(BadRequest, match=r"pixels"):
            images.probe(bomb[:2000])
        with pytest.raises(BadRequest, match=r"pixels"):
            images.decode(bomb)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB


def test_a_jpeg_of_endless_scans_is_refused() -> None:
    data = encoded(gradient(2000, 1500), "JPEG", progressive=True)
    scan = data.rindex(b"\xff\xda")
    with pytest.raises(BadRequest, match="scans"):
        images.decode(data[:scan] + data[scan:-2] * 3000 + data[-2:])


def test_callers_images_stay_as_they_are() -> None:
    image = Image.open(io.BytesIO(SAMPLES["jpeg turned"]))
    assert images.picture_size(image) == images.picture(image).size == (37, 61)
    assert image.size == (61, 37)
    closed = Image.open(io.BytesIO(SAMPLES["png"]))
    closed.close()
    with pytest.raises(BadRequest):
        images.picture_size(closed)
