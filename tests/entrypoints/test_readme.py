"""README's example answers what a reader expects."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent.parent / "README.md"


def test_the_example_with_four_pictures_is_answered_rightly(server):
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    assert "http://127.0.0.1:8000/v1" in code
    code = code.replace("http://127.0.0.1:8000/v1", f"{server.base_url}/v1")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "blue"
