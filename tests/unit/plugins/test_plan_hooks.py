"""Hooks of the time when a run is planned: option_surface, derive, check and plan_lines."""

import pytest

from miles_core.errors import ConfigError, UnknownKeyError
from miles_core.plugins.plan import prepare

PLUGIN = '''
"""Plans."""
from dataclasses import dataclass, replace
from miles_core import hookimpl, option
from miles_core.errors import ConfigError, UnknownKeyError


@dataclass(frozen=True, kw_only=True)
class Options:
    most: int = option(4, "Most prompts.")


class Planner:
    """Takes half of the prompts, and refuses more than it likes."""

    name = "planner"

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def derive(self, config, note):
        """Sample ahead by one."""
        note("one rollout ahead")
        return replace(config, rollout=replace(config.rollout, max_lag=1))

    @hookimpl
    def check(self, config, note):
        """Not too many prompts."""
        if config.rollout.rollout_batch_size > self.options.most:
            raise ConfigError("too many prompts", who="plugin planner", got=config.rollout.rollout_batch_size)
        note(f"weights travel by {config.perf.weight_sync}")
        return config

    @hookimpl
    def plan_lines(self, config):
        """A section of its own."""
        return [("weather", "sunny"), ("layout", "a line more")]
'''
BASE = ["--rm-type", "math", "--hf-checkpoint", "x", "--prompt-data", "y", "--num-rollout", "1"]


@pytest.fixture
def planner(tmp_path):
    path = tmp_path / "planner.py"
    path.write_text(PLUGIN)
    return [*BASE, "--plugin", str(path)]


def test_a_plugin_derives_checks_and_describes(planner):
    plan = prepare(None, [*planner, "--rollout-batch-size", "4"])
    assert plan.config.rollout.max_lag == 1
    assert [note for note in plan.notes if "ahead" in note or "travel" in note][:1] == ["one rollout ahead"]
    assert "weights travel by in-process" in plan.notes, "what is derived is there when checks are asked"
    text = plan.to_text()
    assert "\nweather\n  sunny\n" in text
    assert "  a line more\n" in text.partition("\nlayout\n")[2].partition("\n\n")[0]


def test_a_plugin_refuses_with_its_own_options(planner):
    with pytest.raises(ConfigError, match="planner"):
        prepare(None, [*planner, "--rollout-batch-size", "5"])
    assert prepare(None, [*planner, "--rollout-batch-size", "5", "--planner.most", "5"]).config


def test_a_chain_that_forgets_to_return_is_named(planner, tmp_path):
    path = tmp_path / "planner.py"
    path.write_text(PLUGIN.replace("        return config\n", "        return None if config else config\n"))
    with pytest.raises(Exception, match=r"\[filter-returned-other-type\]"):
        prepare(None, [*planner, "--rollout-batch-size", "4"])


ROCKET = '''
"""Brings the options of a program."""
from miles_core import hookimpl
from miles_core.config.flags import Assignment
from miles_core.config.options import Origin
from miles_core.config.surfaces import Surface


class RocketOptions(Surface):
    """--rocket-NAME, for tables and the plan alike."""

    tables = stored = ("rocket",)

    def from_flag(self, flag, notes):
        name = flag.flag.removeprefix("--rocket-")
        return None if name == flag.flag else [Assignment(f"rocket.{name}", flag.words[0], Origin("flag", flag.flag))]

    def typed(self, assignment):
        return (assignment.key, int(assignment.value)) if assignment.key == "rocket.thrust" else None

    def suggest(self, flag):
        return [(0.9, "--rocket-thrust")]


class Rocket:
    """Flies."""

    name = "rocket"

    @hookimpl
    def option_surface(self):
        """Its options."""
        return [RocketOptions()]
'''


def test_a_plugin_brings_the_options_of_a_program(tmp_path):
    path = tmp_path / "rocket.py"
    path.write_text(ROCKET)
    flags = [*BASE, "--rollout-batch-size", "4", "--plugin", str(path)]
    assert prepare(None, [*flags, "--rocket-thrust", "3"]).config.surface("rocket") == {"thrust": 3}
    with pytest.raises(UnknownKeyError, match="rocket.*trust"):
        prepare(None, [*flags, "--rocket-trust", "3"])
    with pytest.raises(UnknownKeyError):
        prepare(None, [*BASE, "--rocket-thrust", "3"])
