"""What has to be quick is quick and imports nothing heavy: --help and --plan, in a fresh interpreter, by CPU time."""


import pytest

from tests.unit.cpu_time import best

HEAVY = ("torch", "ray", "transformers", "megatron", "sglang")

@pytest.mark.parametrize(("argv", "limit"), [(["--help"], 0.15), (["run", "--help"], 0.4)])
def test_help(tmp_path, argv, limit):
    seconds, names, out = best(argv, tmp_path, limit)
    print(f"miles {' '.join(argv)}: {seconds * 1000:.0f} ms CPU")
    assert "miles" in out.lower() and not set(HEAVY) & set(names)
    assert seconds <= limit


def test_plan_of_the_gpu_stack(run_file):
    """SGLang's and its router's arguments are checked without importing them."""
    path = run_file()
    flags = ["--engine", "sglang", "--colocate", "--sglang-mem-fraction-static", "0.7", "--router-policy", "random"]
    seconds, names, out = best(["run", path, "--plan", *flags], path.parent, 0.4)
    print(f"miles run --plan with SGLang: {seconds * 1000:.0f} ms CPU")
    assert "weights travel by ipc" in out and not {*HEAVY, "numpy", "aiohttp", "smg"} & set(names)
    assert seconds <= 0.4


def test_plan(run_file):
    """Also without numpy; the same bytes each time."""
    path = run_file()
    seconds, names, out = best(["run", path, "--plan", "--max-lag", "1"], path.parent, 0.4)
    print(f"miles run --plan: {seconds * 1000:.0f} ms CPU")
    assert "batch arithmetic" in out and not {*HEAVY, "numpy"} & set(names)
    assert seconds <= 0.4
