"""file:// URLs: confined to one folder, regular files only, and errors that tell nothing about the rest."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from gllm.errors import BadRequest
from gllm.media.local_file import read_file_url, read_path

LIMIT = 1000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with files in it, beside a secret one."""
    allowed = tmp_path / "allowed"
    (allowed / "sub").mkdir(parents=True)
    (allowed / "a b.png").write_bytes(b"inside")
    (allowed / "sub" / "c.png").write_bytes(b"below")
    (tmp_path / "secret.png").write_bytes(b"outside")
    (tmp_path / "allowed-not").mkdir()
    (tmp_path / "allowed-not" / "d.png").write_bytes(b"beside")
    (allowed / "out.png").symlink_to(tmp_path / "secret.png")
    (allowed / "in.png").symlink_to(allowed / "sub" / "c.png")
    (allowed / "up").symlink_to(tmp_path)
    os.mkfifo(allowed / "fifo.png")
    return allowed


@pytest.mark.parametrize(
    ("path", "data"),
    [("a%20b.png", b"inside"), ("sub/c.png", b"below"), ("sub/../a b.png", b"inside"), ("in.png", b"below")],
)
def test_files_below_the_folder_are_read(root: Path, path: str, data: bytes) -> None:
    assert read_file_url(f"file://{root}/{path}", str(root), LIMIT) == data
    assert read_file_url(f"FILE://localhost{root}/{path}", f"{root}/sub/..", LIMIT) == data


@pytest.mark.parametrize(
    "path",
    [
        "../secret.png", "%2e%2e/secret.png", "..%2fsecret.png", "sub/../../secret.png", "out.png", "up/secret.png",
        "../allowed-not/d.png", "missing.png", "", "sub", "fifo.png", "a%20b.png%00", "a b.png/x", "x" * 5000,
    ],
)  # fmt: skip
def test_everything_else_is_refused_and_not_named(root: Path, path: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read_file_url(f"file://{root}/{path}", str(root), LIMIT)
    assert str(root) not in refused.value.message
    assert "secret" not in refused.value.message


@pytest.mark.parametrize("url", ["file:///etc/passwd", "file:/etc/passwd", "file://host/etc/passwd", "file:etc"])
def test_other_places(root: Path, url: str) -> None:
    for folder in (None, str(root), str(root / "missing")):
        with pytest.raises(BadRequest) as refused:
            read_file_url(url, folder, LIMIT)
        assert "passwd" not in refused.value.message


def test_missing_and_forbidden_look_alike(root: Path) -> None:
    messages = set()
    for path in ("missing.png", "out.png", "../secret.png", "sub"):
        with pytest.raises(BadRequest) as refused:
            read_file_url(f"file://{root}/{path}", str(root), LIMIT)
        messages.add(refused.value.message)
    assert len(messages) <= 2  # a folder inside the allowed one may be told apart


def test_size_limit(root: Path) -> None:
    (root / "big.png").write_bytes(bytes(LIMIT + 1))
    with pytest.raises(BadRequest, match="1,000 bytes"):
        read_file_url(f"file://{root}/big.png", str(root), LIMIT)


def test_a_trusted_callers_path(root: Path, tmp_path: Path) -> None:
    assert read_path(root / "out.png", LIMIT) == b"outside"
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        listener.bind(str(tmp_path / "socket.png"))
        for path in (root / "fifo.png", root, root / "missing.png", tmp_path / "socket.png", "/dev/zero", "a\0b"):
            with pytest.raises(BadRequest):
                read_path(path, LIMIT)


@pytest.mark.parametrize("url", ["file://[::1", "file://[::1]x/a", "file://[", "file://\u2100/a"])
def test_urls_that_cannot_be_split(root: Path, url: str) -> None:
    with pytest.raises(BadRequest, match="below the allowed folder"):
        read_file_url(url, str(root), LIMIT)
