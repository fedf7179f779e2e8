"""Reading image files: regular files only, below one folder when the caller is not trusted, never a hanging open."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gllm.errors import BadRequest

_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # O_NONBLOCK: opening a FIFO does not wait


def read_file_url(url: str, root: str | None, max_bytes: int) -> bytes:
    """The file that a file:// URL names, if it lies below `root`. The error says nothing of what else there is."""
    if root is None:
        raise BadRequest("file URLs are not allowed (see --allowed-local-media-path)", code="not_allowed")
    refused = BadRequest("not a readable image file below the allowed folder", code="not_allowed")
    try:
        parts = urlsplit(url)
        if parts.netloc.lower() not in ("", "localhost"):
            raise refused
        base = Path(root).resolve(strict=True)
        names = Path(unquote(parts.path)).resolve(strict=True).relative_to(base).parts
        return _read_regular(_open_below(base, names), max_bytes)
    except BadRequest:
        raise
    except (OSError, ValueError, RuntimeError):
        raise refused from None


def read_path(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """A file that a trusted caller names."""
    try:
        return _read_regular(os.open(path, _OPEN), max_bytes)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not a path"
        raise BadRequest(f"its file cannot be read: {reason}", code="invalid_image") from None


def _open_below(base: Path, names: tuple[str, ...]) -> int:
    """Open `base`/`names` folder by folder without following links: `names` is resolved, so a link on the way was put
    there since, by somebody who wants out."""
    folder = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for index, name in enumerate(names):
        flags = _OPEN if index == len(names) - 1 else os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            below = os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder)
        finally:
            os.close(folder)
        folder = below
    return folder


def _read_regular(descriptor: int, max_bytes: int) -> bytes:
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadRequest("not a regular file", code="not_allowed")
        if status.st_size <= max_bytes:
            data = file.read(max_bytes + 1)
            if len(data) <= max_bytes:
                return data
    raise BadRequest(f"larger than the {max_bytes:,} bytes that an item may have", code="too_large")
