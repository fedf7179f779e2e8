"""The requests of measured runs: seeded, of the sizes asked for, every image different."""

from __future__ import annotations

import base64
import io
import json
from random import Random

import pytest
from PIL import Image as Picture

from benchmarks.real.requests import Mix, prepare
from benchmarks.sim.images import Image

MIX = Mix(images=(1, 3), side=(28, 90), text=(1, 5))


def bodies(seed: int, max_tokens: int = 1) -> list[dict]:
    return [json.loads(r.body) for r in prepare(MIX.shapes([0.0, 0.5, 1.0], seed, max_tokens), "m", seed)]


def parts(body: dict, kind: str) -> list[dict]:
    return [part[kind] for part in body["messages"][0]["content"] if part["type"] == kind]


def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not():
    assert bodies(1) == bodies(1)
    assert bodies(1) != bodies(2)


def test_shapes_do_not_depend_on_the_rate():
    slow, fast = (MIX.shapes(times, 4, 1) for times in ([0.0, 9.0], [0.0, 0.1]))
    assert [shape.parts for shape in slow] == [shape.parts for shape in fast]


def test_the_mix_keeps_its_ranges():
    for number in range(50):
        shape = MIX.parts(Random(number))
        images = [part for part in shape if isinstance(part, Image)]
        words = sum(part for part in shape if isinstance(part, int))
        assert 1 <= len(images) <= 3
        assert 1 <= words <= 5
        assert all(28 <= side <= 90 for image in images for side in (image.width, image.height))
        assert isinstance(shape[-1], int)


def test_bodies_hold_the_images_of_the_shape_each_different():
    shapes = MIX.shapes([0.0, 0.5, 1.0], 1, 1)
    urls = []
    for shape, body in zip(shapes, bodies(1), strict=True):
        found = [part["url"] for part in parts(body, "image_url")]
        for image, url in zip(shape.images, found, strict=True):
            picture = Picture.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
            assert picture.size == (image.width, image.height)
        assert parts(body, "text")
        urls += found
    assert len(set(urls)) == len(urls)


def test_output_is_greedy_streamed_and_of_fixed_length():
    body = bodies(1, max_tokens=9)[0]
    assert (body["max_tokens"], body["ignore_eos"], body["stream"], body["temperature"]) == (9, True, True, 0.0)


@pytest.mark.parametrize("wrong", [{"images": (3, 1)}, {"side": (1, 50)}, {"text": (0, 5)}])
def test_a_range_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Mix(**wrong)
