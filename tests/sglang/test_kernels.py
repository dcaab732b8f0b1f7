"""Triton's kernels in its interpreter: SGLang's environment for the CPU has a Triton, torch's wheel for it has none."""

import os
import subprocess
import sys

from conftest import PYTHON, ROOT

TESTS = ("plugins/miles-megatron/tests/test_fused_logits.py", "plugins/miles-fsdp/tests/test_scored.py")


def test_log_probs_by_kernels(tmp_path):
    where = subprocess.run([PYTHON, "-c", "import triton; print(triton.__path__[0])"], capture_output=True, text=True,
                           check=True).stdout.strip()
    (tmp_path / "triton").symlink_to(where)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS], cwd=ROOT,
                          capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"})  # fmt: skip
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-3000:]
