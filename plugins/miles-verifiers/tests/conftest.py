"""The environments that tests name are modules beside the example's and this file's."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOLDERS = [str(HERE.parent / "examples"), str(HERE)]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Here, and in the processes of tools."""
    monkeypatch.setattr(sys, "path", [*FOLDERS, *sys.path])
    monkeypatch.setenv("PYTHONPATH", ":".join(FOLDERS))
