"""A plugin that somebody else writes is checked strictly against the public surface, as it is installed (py.typed).

`mypy` without arguments, which `make lint` calls, checks the surface itself; pyproject.toml says what belongs to it.
"""

import re
import subprocess
import sys
import sysconfig
import venv

import pytest
from source import ROOT

GOOD = '''
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from miles_core import hookimpl, option
from miles_core.columns import Align, Column
from miles_core.config import RunConfig
from miles_core.errors import ConfigError
from miles_core.stages.loss import LossInputs, Metrics, at_trained, bounded_exp, log_ratio
from miles_core.stages.rollout import Generation, single_turn
from miles_core.types import Batch, Drop, Group, Prompt, Sample
from miles_testing import filter_contract, plugin_contract, reward_contract


@dataclass(frozen=True, kw_only=True)
class Options:
    """What counts as short."""

    most: int = option(100, "Tokens from which an answer is worth nothing.")


class Plugin:
    """One hook of each kind."""

    def __init__(self, options: Options, config: RunConfig) -> None:
        if options.most < 1:
            raise ConfigError("an answer of no token is short", got=options.most, fix="at least 1")
        self.options, self.config = options, config

    @hookimpl
    def columns(self) -> list[Column]:
        return [Column("brevity", Align.RESPONSE, owner="plugin")]

    @hookimpl("reward", name="brevity")
    def score(self, sample: Sample) -> float:
        return max(0.0, 1 - sample.response_length / self.options.most)

    @hookimpl
    def filter_group(self, group: Group) -> Group | Drop:
        return group if any(sample.response_length for sample in group.samples) else Drop("no_answer")

    @hookimpl(name="careful")
    async def generate(self, prompt: Prompt, generation: Generation) -> list[Sample]:
        return await single_turn(prompt, generation)

    @hookimpl
    def advantage(self, batch: Batch) -> Sequence[float]:
        return [sample.reward or 0.0 for sample in batch.samples]

    @hookimpl
    def policy_loss(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        ratio = bounded_exp(log_ratio(inputs))
        return -ratio * at_trained(inputs, inputs.advantages), {"ratio": ratio.detach()}


TestContract = plugin_contract("plugin", options={"most": 50})


def test_parts() -> None:
    plugin = Plugin(Options(most=10), RunConfig())
    reward_contract(plugin.score, right={"": 1.0})
    filter_contract(plugin.filter_group)
'''

BAD = '''
from miles_core import hookimpl
from miles_core.types import Drop, Group, Sample
from miles_testing import filter_contract


class Plugin:
    @hookimpl
    def filter_group(self, group: Sample) -> Sample | Drop:
        return Drop("long", detail=group.length)  # reported: no text

    @hookimpl("reward", name="brevity")
    def score(self, sample: Sample) -> float:
        return 1 / sample.respons_length  # reported: no such attribute

    @hookimpl(naem=3)
    def combine_rewards(self, sample, weights: dict[str, float]) -> float:  # reported: an argument without a type
        return 0.0


def test_parts(group: Group) -> None:
    plugin = Plugin()
    plugin.score(group)  # reported: not what the implementation takes
    filter_contract(plugin.filter_group)  # reported: the hook is given a group
    hookimpl(3)  # reported: neither a name nor a function
'''


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """A folder with both, and what mypy says of them where the core and the kit are among the installed packages."""
    folder = tmp_path_factory.mktemp("outside")
    venv.create(folder / "venv", with_pip=False)
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    kit = ROOT / "plugins/miles-testing/src"
    (site / "installed.pth").write_text(f"{ROOT}\n{kit}\n{sysconfig.get_paths()['purelib']}\n")
    (folder / "good.py").write_text(GOOD)
    (folder / "bad.py").write_text(BAD)
    (folder / "mypy.ini").write_text("[mypy]\nstrict = true\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-executable", str(folder / "venv/bin/python"), "good.py", "bad.py"],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False)  # fmt: skip
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.mark.full
def test_a_plugin_with_a_hook_of_each_kind_has_no_error(outside):
    assert "good.py" not in outside, outside


def test_each_mistake_is_reported_and_nothing_else(outside):
    marked = {number for number, line in enumerate(BAD.splitlines(), 1) if "# reported" in line}
    assert {int(line) for line in re.findall(r"^bad\.py:(\d+): error", outside, re.MULTILINE)} == marked, outside
