"""Where an item comes from, as the request names it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """One item as the request names it: a data:, http(s): or file: URL, encoded bytes, or a Pillow image.

    trusted: the caller owns this process (offline use), so a string without a URL scheme is a path that may be read.
    """

    value: str | bytes | os.PathLike[str] | Image
    trusted: bool = False
