"""How the tests talk to a live server: messages with pictures, bare requests, what an error has to look like."""

from __future__ import annotations

import base64
import io
from typing import Any

import httpx
from PIL import Image

from tests.live_server import LiveServer


def data_url(image: Image.Image | bytes, kind: str = "PNG") -> str:
    if isinstance(image, Image.Image):
        buffer = io.BytesIO()
        image.save(buffer, kind)
        image = buffer.getvalue()
    return f"data:image/{kind.lower()};base64,{base64.b64encode(image).decode()}"


def image_part(image: Image.Image | bytes, kind: str = "PNG") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(image, kind)}}


def over_http(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A demo question's messages with its pictures as data URLs."""
    return [
        {
            **message,
            "content": message["content"]
            if isinstance(message["content"], str)
            else [image_part(part["image"]) if part["type"] == "image" else part for part in message["content"]],
        }
        for message in messages
    ]


def user(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


TEXT = {"type": "text", "text": "what colour is picture 1?"}


# Goes on to its limit, and shows every token: after its answer a model may have only special ones to say.
ENDLESS = {"ignore_eos": True, "skip_special_tokens": False}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def post(server: LiveServer, body: dict[str, Any], path: str = CHAT, **headers: str) -> httpx.Response:
    return httpx.post(f"{server.base_url}{path}", json=body, headers=headers, timeout=60)


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a response that has to be one, and not the beginning of a stream."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def gauge(server: LiveServer, name: str) -> float:
    lines = httpx.get(f"{server.base_url}/metrics", timeout=10).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"rserve_{name} "))
