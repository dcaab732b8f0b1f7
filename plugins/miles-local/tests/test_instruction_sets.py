"""A request's bits do not depend on its company, whichever vector instructions PyTorch, MKL and oneDNN use."""

import os
import shutil
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

INSTRUCTIONS = {"avx2": "avx2", "avx512": "avx512f"}
"""What Linux calls those that PyTorch means."""


@pytest.mark.parametrize("setting", [
    *(pytest.param(name, marks=pytest.mark.full) for name in ("avx2", "avx512")),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("without", "all"))])
def test_bits_do_not_depend_on_company(setting):
    """Libraries read these variables when they are loaded, so that each setting has a process of its own."""
    keeps_bits(SETTINGS[setting])


@pytest.mark.full
@pytest.mark.parametrize("setting", ["avx2", "avx512"])
def test_bits_do_not_depend_on_company_with_the_kernels_for_intel(setting, tmp_path):
    """MKL asks a function of its own who made the processor; another answer gives it Intel's kernels on any."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    (tmp_path / "intel.c").write_text("int mkl_serv_intel_cpu(void) { return 1; }\n"
                                      "int mkl_serv_intel_cpu_true(void) { return 1; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", "intel.so", "intel.c"], cwd=tmp_path, check=True, timeout=60)
    keeps_bits(SETTINGS[setting] | {"LD_PRELOAD": str(tmp_path / "intel.so")})


def keeps_bits(variables: dict[str, str]) -> None:
    wanted = variables.get("ATEN_CPU_CAPABILITY", "default")
    if wanted.startswith("avx") and f" {INSTRUCTIONS[wanted]} " not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"the processor lacks {wanted}, and PyTorch takes its word for it")
    bits = ["-k", "same_bits or (bits and float32)"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "test_decode.py"), *bits]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True,
                          cwd=HERE.parents[3], timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
