"""A request's bits do not depend on its company, whichever vector instructions PyTorch, MKL and oneDNN use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SETTINGS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "MKL_ENABLE_INSTRUCTIONS": "AVX512",
               "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "without": {"ATEN_CPU_CAPABILITY": "default"},
    "all": {"ONEDNN_MAX_CPU_ISA": "ALL"},  # AMX, where the processor has it
}


@pytest.mark.parametrize("setting", [
    *(pytest.param(name, marks=pytest.mark.full) for name in ("avx2", "avx512")),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("without", "all"))])
def test_bits_do_not_depend_on_company(setting):
    """Libraries read these variables when they are loaded, so that each setting has a process of its own; one that the
    processor lacks falls back to what it has."""
    bits = ["-k", "same_bits or (bits and float32)"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "test_decode.py"), *bits]
    done = subprocess.run(command, env={**os.environ, **SETTINGS[setting]}, capture_output=True, text=True,
                          cwd=HERE.parents[3], timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
