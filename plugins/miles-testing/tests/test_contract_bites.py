"""Each check of the contract of a plugin, and a plugin that it catches; a good one passes all of them."""

from __future__ import annotations

import textwrap

import pytest
from miles_testing import plugin_contract
from miles_testing.contract import Contract

from miles_core.errors import MilesError
from tests.unit.plugins.installed import install

HEAD = """import random, sys, threading
from dataclasses import dataclass
from miles_core import hookimpl, option
from miles_core.types import Drop

@dataclass(frozen=True, kw_only=True)
class Options:
    width: int = option(3, "How wide.")

class BadlyPicklable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")

SHARED = []

"""
GOOD = """class Good:
    def __init__(self, options: Options):
        self.options, self.seen = options, 0

    @hookimpl("reward", name="short")
    def short(self, sample):
        return 1.0 if sample.response_length < self.options.width else 0.0

    @hookimpl
    def filter_group(self, group):
        self.seen += 1
        return group if len(group.samples) > 1 else Drop("alone")

    @hookimpl(name="centred")
    def advantage(self, batch):
        return [sample.reward - 0.5 for sample in batch.samples]

    @hookimpl
    def policy_loss(self, inputs):
        return -inputs.advantages * inputs.log_probs * inputs.mask, {}

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]
"""
CHECKS = [name for name in vars(Contract) if name.startswith("test_")]


@pytest.fixture
def contract(tmp_path):
    """(source of the class, what stands above it, arguments of plugin_contract) -> an instance of the contract."""

    def make(body=GOOD, *, above="", **arguments):
        path = tmp_path / "subject.py"
        path.write_text(HEAD + above + textwrap.dedent(body))
        return plugin_contract(str(path), **arguments)()

    return make


def test_a_good_plugin_passes_every_check(contract):
    good = contract(options={"width": 4})
    for check in CHECKS:
        getattr(good, check)()


LOSS = '    @hookimpl(name="x")\n    def policy_loss(self, inputs):\n        return {0}, {{}}'
REWARD = '    @hookimpl("reward", name="x")\n    def score(self, sample):\n        {0}'
STATE = '''    @hookimpl("reward", name="x")
    def score(self, sample):
        self.seen.append(1)
        return 1.0

    def __init__(self):
        self.seen = []

    def state_dict(self):
        return {gives}

    def load_state_dict(self, state):
        self.seen = {takes}
'''


ANEW = """class Anew(type(sys)):
    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        return type(name, (found,), {}) if name == "Broken" else found

sys.modules[__name__].__class__ = Anew
"""


def plugin(*parts):
    return "class Broken:\n" + "\n".join(parts) + "\n"


BROKEN = {
    "a default that is set later": (
        "test_manifest_matches_code", plugin("    def __init__(self, options: Options):\n        pass",
                                             REWARD.format("return 1.0")), {},
        "states the options", "Options.__init__.__kwdefaults__ = {'width': 4}\n"),
    "words that are computed": (
        "test_manifest_matches_code", plugin("    provides = ('a',)", REWARD.format("return 1.0")), {},
        "states provides", None),
    "torch at the top": ("test_light_listing", plugin(REWARD.format("return 1.0")), {}, "imports torch; import them",
                         "import torch\n"),
    "a registry that is filled on import": (
        "test_idempotent_load", plugin(REWARD.format("return 1.0")), {}, "it loads once only.*registered twice",
        "if hasattr(sys, '_miles_registry'):\n    raise ValueError('registered twice')\nsys._miles_registry = 1\n"),
    "a thread that is started on import": (
        "test_idempotent_load", plugin(REWARD.format("return 1.0")), {}, "starts 1 threads",
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"),
    "a class that is made anew by every load": (
        "test_idempotent_load", plugin(REWARD.format("return 1.0")), {}, "a second load gives another class",
        ANEW),
    "an instance that is made once a process": (
        "test_spawn_safe", plugin("    def __init__(self):\n        if hasattr(sys, '_made'):\n"
                                  "            raise ValueError('made twice')\n        sys._made = 1",
                                  REWARD.format("return 1.0")), {}, "made twice", ""),
    "a scorer that writes the reward": ("test_no_input_mutation", plugin(
        REWARD.format("sample.reward = 7.0; return 1.0")), {}, "reward 'x' .* changes what it is given", ""),
    "a filter that shortens tokens": ("test_no_input_mutation", plugin(
        "    @hookimpl\n    def filter_group(self, group):\n        group.samples[0].columns['tokens'] = "
        "group.samples[0].tokens[:-1]\n        return group"), {}, "changes tokens, log-probs", ""),
    "a column that nobody declared": ("test_no_input_mutation", plugin(
        REWARD.format("sample.columns['mine'] = sample.tokens; return 1.0")), {}, "adds the columns .'mine'.", ""),
    "a loss in place": ("test_no_input_mutation", plugin(LOSS.format("inputs.advantages.mul_(2)")), {},
                        "policy_loss 'x' .* changes what it is given", ""),
    "a loss that reduces": ("test_empty_and_one_sample", plugin(LOSS.format("inputs.log_probs.mean()")), {},
                            r"the loss has shape \[\] for", ""),
    "a scorer that divides by the length": ("test_empty_and_one_sample", plugin(
        REWARD.format("return 1 / sample.response_length")), {}, r"\(empty\) raises ZeroDivisionError", ""),
    "an estimator that wants two answers": ("test_empty_and_one_sample", plugin(
        "    @hookimpl(name='x')\n    def advantage(self, batch):\n        import numpy as np\n        return ["
        "np.float64(s.reward) / (len(g.samples) - 1) for g in batch.groups for s in g.samples]"), {},
        r"advantage 'x' \(one\)", ""),
    "a global generator": ("test_determinism", plugin(REWARD.format("return random.random()")), {},
                           "in a new instance; draw from a generator of your own", ""),
    "memory that is not saved": ("test_determinism", plugin(
        "    def __init__(self):\n        self.seen = 0",
        REWARD.format("self.seen += 1; return float(self.seen)")), {}, "called a second time", ""),
    "a state that is not taken back": ("test_state_round_trip", plugin(
        STATE.format(gives="{'seen': list(self.seen)}", takes="[]")), {}, "a new instance that loaded", ""),
    "a state that lacks what answers depend on": ("test_state_round_trip", plugin(
        STATE.format(gives="{}", takes="[]").replace("return 1.0", "return float(len(self.seen))")), {},
        "another result from a state that was loaded", ""),
    "a state that goes on changing": ("test_state_round_trip", plugin(
        STATE.format(gives="{'seen': self.seen}", takes="list(state['seen'])")), {}, "changes after it was taken", ""),
    "a state that is no plain data": ("test_state_round_trip", plugin(
        STATE.format(gives="{'seen': {1, 2}}", takes="[]")), {}, "plain data", ""),
    "a state that nobody can load": ("test_state_round_trip", plugin(
        REWARD.format("return 1.0"), "    def state_dict(self):\n        return {}"), {}, "have both", ""),
    "no migration of what was recorded": ("test_state_round_trip", plugin(
        "    state_version = 2", STATE.format(gives="{'seen': list(self.seen)}", takes="list(state['seen'])")),
        {"old_states": {1: {"seen": []}}}, "state_version 1, and this version reads only 2", ""),
    "a state version that is no number": ("test_state_round_trip", plugin(
        "    state_version = '2'", STATE.format(gives="{'seen': list(self.seen)}", takes="list(state['seen'])")), {},
        "state_version is '2', not 1 or more", ""),
    "errors that are swallowed": ("test_blame", plugin(
        "    @hookimpl('reward', name='x')\n    def score(self, sample):\n        try:\n"
        "            return float(sample.text == '4')\n        except Exception:\n            return 0.0"), {},
        "swallows errors", ""),
    "an error that cannot be sent": ("test_blame", plugin(
        "    @hookimpl('reward', name='x')\n    def score(self, sample):\n        try:\n"
        "            return float(sample.text == '4')\n        except Exception as error:\n"
        "            raise BadlyPicklable(1, 2) from error"), {}, "does not survive the way to another process", ""),
    "a slow import": ("test_cost_budget", plugin(REWARD.format("return 1.0")), {"import_seconds": 0.02},
                      "its import takes .* more than 0.02", "sum(i * i for i in range(2_000_000))\n"),
    "a slow scorer": ("test_cost_budget", plugin(REWARD.format("return sum(i * 1.0 for i in range(2_000_000))")),
                      {"call_seconds": 0.02}, "reward 'x' .* takes .* more than 0.02", ""),
    "memory of the module": ("test_role_isolation", plugin(
        "    def __init__(self):\n        self.seen = SHARED", REWARD.format("return 1.0")), {},
        "shares self.seen between its roles", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_caught(case, contract):
    check, body, arguments, words, above = BROKEN[case]
    if above is None:  # what the source says is not what the class has in the end
        body += "\nBroken.provides = ('a', 'b')\n"
    broken = contract(body, above=above or "", **arguments)
    with pytest.raises((AssertionError, MilesError), match=words):
        getattr(broken, check)()


@pytest.mark.parametrize(("name", "editable"), [("drifting", False), ("edited", True)])
def test_a_package_whose_manifest_was_not_written_anew_is_caught(tmp_path, monkeypatch, name, editable):
    monkeypatch.syspath_prepend(str(tmp_path))
    source = install(tmp_path, name, editable=editable) / "plugin.py"
    plugin_contract(name)().test_manifest_matches_code()
    source.write_text(source.read_text().replace("Offers the reward", "No longer offers the reward"))
    with pytest.raises(AssertionError, match="not what plugin.py says; run `miles plugins manifest --write`"):
        plugin_contract(name)().test_manifest_matches_code()


def test_every_check_has_a_plugin_that_it_catches():
    assert {check for check, *_ in BROKEN.values()} == set(CHECKS)


def test_the_kit_is_light_to_import():
    import subprocess
    import sys

    code = ("import sys; import miles_testing as t; dir(t); t.plugin_contract\n"
            "print(*(m for m in ('torch', 'transformers', 'megatron', 'hypothesis', 'pytest') if m in sys.modules))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
