"""Grids and pixels against transformers' own image processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from gllm.errors import BadRequest, StartupError
from gllm.media.image import picture
from gllm.media.processor import ImageProcessor
from tests.media.files import gradient

SETTINGS: list[dict[str, Any]] = [
    {},
    {"min_pixels": 3136, "max_pixels": 50176},
    {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
    {"size": {"shortest_edge": 784, "longest_edge": 200704}},
    {"size": {"shortest_edge": 3136, "longest_edge": 12845056}, "min_pixels": 10000, "max_pixels": 90000},
    {"patch_size": 16, "merge_size": 2, "min_pixels": 4096, "max_pixels": 65536},
]


def checkpoint(folder: Path, settings: dict[str, Any], name: str = "preprocessor_config.json") -> Path:
    (folder / name).write_text(json.dumps(settings))
    return folder


def reference(settings: dict[str, Any]) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(**settings)


def patches(pixels: np.ndarray, patch: int, merge: int, mean: list[float], std: list[float]) -> np.ndarray:
    """What the encoder makes of uint8 [H, W, 3]: float [patches, 3 * 2 * patch * patch], merge blocks together."""
    values = (pixels.astype(np.float64) / 255 - np.array(mean)) / np.array(std)
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    blocks = values.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    blocks = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, 1, patch * patch)
    return np.broadcast_to(blocks, (rows * columns, 3, 2, patch * patch)).reshape(rows * columns, -1)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(
    "size", [(1, 1), (26, 28), (332, 27), (448, 448), (301, 199), (1000, 5), (13, 700), (900, 640)]
)
def test_pixels_are_those_of_the_library(tmp_path: Path, settings: dict[str, Any], size: tuple[int, int]) -> None:
    ours, library = ImageProcessor(checkpoint(tmp_path, settings)), reference(settings)
    image = gradient(*size)
    wanted = library(image, return_tensors="np")
    grid, pixels = ours.grid(*size), ours.pixels(image)
    assert grid == tuple(wanted["image_grid_thw"][0])
    assert pixels.dtype == np.uint8
    assert pixels.shape == (grid[1] * ours.patch_size, grid[2] * ours.patch_size, 3)
    got = patches(pixels, ours.patch_size, ours.merge_size, library.image_mean, library.image_std)
    assert np.abs(got - wanted["pixel_values"]).max() < 1e-5


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "1", "CMYK", "RGB keyed"])
def test_other_modes_are_those_of_the_library_too(mode: str) -> None:
    source = gradient(70, 50)
    image = source.convert(mode.split()[0])
    if mode in ("RGBA", "LA"):
        image.putalpha(source.getchannel(1))
    elif "keyed" in mode:
        image.info["transparency"] = image.getpixel((5, 5))
    wanted = reference({}).process_image(image, do_convert_rgb=True)
    assert np.array_equal(np.moveaxis(np.asarray(picture(image)), -1, 0), wanted)


@settings(max_examples=300, deadline=None)
@given(width=st.integers(1, 5000), height=st.integers(1, 5000), choice=st.sampled_from(SETTINGS))
def test_grids_are_those_of_the_library(
    tmp_path_factory: pytest.TempPathFactory, width: int, height: int, choice: dict[str, Any]
) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    ours = ImageProcessor(checkpoint(tmp_path_factory.mktemp("checkpoint"), choice))
    arguments = (height, width, ours.factor, ours.min_pixels, ours.max_pixels)
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(BadRequest, match="aspect ratio"):
            ours.grid(width, height)
        with pytest.raises(ValueError):
            smart_resize(*arguments)
        return
    _, rows, columns = ours.grid(width, height)
    assert (rows * ours.patch_size, columns * ours.patch_size) == smart_resize(*arguments)
    assert ours.num_tokens((1, rows, columns)) >= 1


@pytest.mark.parametrize(("size", "tokens"), [((1, 1), 4), ((26, 28), 6), ((332, 27), 12), ((448, 448), 256)])
def test_small_sides_are_enlarged(tmp_path: Path, size: tuple[int, int], tokens: int) -> None:
    processor = ImageProcessor(checkpoint(tmp_path, {"min_pixels": 3136, "max_pixels": 12845056}))
    assert processor.num_tokens(processor.grid(*size)) == tokens


def test_the_longest_strip(tmp_path: Path) -> None:
    processor = ImageProcessor(tmp_path)
    assert processor.grid(1000, 5)[0] == 1
    assert processor.grid(5, 1000)[0] == 1
    with pytest.raises(BadRequest, match=r"1093x5 .*218\.6"):
        processor.grid(1093, 5)


def test_overrides_come_first_and_change_the_fingerprint(tmp_path: Path) -> None:
    plain = ImageProcessor(checkpoint(tmp_path, {"size": {"shortest_edge": 3136, "longest_edge": 50176}}))
    small = ImageProcessor(tmp_path, {"max_pixels": 28 * 28 * 4})
    assert (plain.max_pixels, small.max_pixels) == (50176, 3136)
    assert small.num_tokens(small.grid(448, 448)) == 4
    assert plain.fingerprint != small.fingerprint


def test_settings_inside_processor_config_go_first(tmp_path: Path) -> None:
    checkpoint(tmp_path, {"max_pixels": 5000})
    checkpoint(tmp_path, {"image_processor": {"max_pixels": 6000}}, "processor_config.json")
    assert ImageProcessor(tmp_path).max_pixels == 6000
    checkpoint(tmp_path, {"processor_class": "Qwen2_5_VLProcessor"}, "processor_config.json")
    assert ImageProcessor(tmp_path).max_pixels == 5000


@pytest.mark.parametrize("bad", [{"min_pixels": 0}, {"min_pixels": 9000, "max_pixels": 8000}, {"max_pixels": "many"}])
def test_senseless_settings_stop_the_start(tmp_path: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(StartupError):
        ImageProcessor(tmp_path, bad)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(StartupError, match="not JSON"):
        ImageProcessor(tmp_path)


def test_pixels_are_writable_and_the_caller_keeps_the_image() -> None:
    image = Image.new("RGB", (56, 56), "red")
    pixels = ImageProcessor(Path("/nonexistent")).pixels(image)
    pixels[:] = 0
    assert image.getpixel((0, 0)) == (255, 0, 0)
