"""A crowded environment: thirty further plugins, one broken, one hostile. Nothing is slow and none of them runs."""

from __future__ import annotations

import pytest

from tests.unit.cpu_time import best
from tests.unit.plugins.installed import install

COUNT = 30
HEAVY = {"torch", "ray", "transformers", "megatron", "sglang", "numpy"}
RUN = ["run", "--plan", "--hf-checkpoint", "x", "--prompt-data", "y", "--rollout-batch-size", "2", "--num-rollout", "1",
       "--rm-type", "plugin-3-reward", "--plugin", "plugin-3", "--plugin", "plugin-4", "--preset", "calm"]  # fmt: skip


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    """A site folder with all of them; the hostile one leaves a trace when it is imported."""
    site = tmp_path_factory.mktemp("crowd")
    presets = {"calm": {"plugins": ["plugin-5"], "values": {"plugin-5.width": 1}}}
    for number in range(COUNT - 2):
        install(site, f"plugin-{number}", stated={"presets": presets} if number == 5 else None)
    install(site, "broken", manifest=False)
    install(site, "hostile", code=f"open({str(site / 'trace')!r}, 'w').close()\n")
    yield site
    assert not (site / "trace").exists(), "a plugin that nobody named has run"


@pytest.mark.parametrize(("argv", "seconds"), [(["--help"], 0.15), (["plugins", "list"], 0.2), (RUN, 0.4)],
                         ids=["help", "list", "plan"])
def test_a_crowd_of_plugins_costs_little(crowd, tmp_path, argv, seconds):
    used, modules, out = best(argv, tmp_path, seconds, PYTHONPATH=str(crowd))
    print(f"miles {argv[0]} beside {COUNT} further plugins: {used * 1000:.0f} ms CPU")
    assert used <= seconds
    assert not HEAVY & set(modules)
    assert not [name for name in modules if name.startswith(("miles_plugin", "miles_host"))]
    if argv[0] == "plugins":
        assert sum(line.startswith("plugin-") for line in out.splitlines()) == COUNT - 2
        assert "cannot be read" in out
