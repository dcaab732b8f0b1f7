"""Tiny random models that read images."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pictures.py


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """model_type -> a directory with a tiny random model, its processor's files and train.jsonl."""
    from pictures import make_model

    @functools.cache
    def made(kind):
        if kind == "llama4":
            pytest.importorskip("torchvision", reason="its processor wants it")
        return make_model(tmp_path_factory.mktemp(kind), kind)

    return made
