from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.checkpoints import write_tiny


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """The models here are tiny: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("untied"), tied=False)
