"""What plugins keep: versioned, migrated or dropped on purpose; everything else is an error that names the plugin."""

from __future__ import annotations

import json
import os

import pytest

from miles_core.config.tables import Checkpoint, RunConfig
from miles_core.errors import StateError
from miles_core.execute import Attempt, _published
from miles_core.plugins import bind, select, state
from miles_core.plugins.plan import Plan
from miles_core.types import TRACKER, Rank

BODY = '''
from miles_core import hookimpl


class Keeps:
    {more}

    def __init__(self):
        self.seen = 0

    @hookimpl
    def filter_group(self, group):
        self.seen += 1
        return group

    def state_dict(self):
        return {gives}

    def load_state_dict(self, state):
        self.seen = state["seen"]
'''
MIGRATES = """state_version = 3

    def migrate_state(self, version, state):
        return {"seen": state["count"] * version}
"""


@pytest.fixture
def roles(tmp_path):
    """(name, source of the class, roles) -> hooks of driver and rollout, or of the roles."""
    number = iter(range(9))

    def make(name="keeps", more="pass", gives='{"seen": self.seen}', roles=("driver", "rollout")):
        folder = tmp_path / str(next(number))
        folder.mkdir()
        path = folder / f"{name}.py"
        path.write_text(BODY.format(more=more, gives=gives))
        selected = select.select([(str(path), "--plugin")], [])
        return [bind.bind(selected, RunConfig(options={name: {}}), role) for role in roles]

    return make


def saved(**changes):
    """What a checkpoint of the plugin holds."""
    return {"keeps": {"rollout": {"state_version": 1, "version": "0.9", "state": {"seen": 5}, **changes}}}


def test_each_role_has_its_own_state_and_gets_it_back(roles):
    first = roles()
    first[1].filter_group("group")
    kept = json.loads(json.dumps(state.collect(first)))
    assert kept["keeps"]["rollout"]["state"] == {"seen": 1} and kept["keeps"]["driver"]["state"] == {"seen": 0}
    assert kept["keeps"]["rollout"]["state_version"] == 1
    second = roles()
    assert state.restore(second, kept) == []
    assert state.collect(second) == {"keeps": {
        role: {**one, "version": second[0].versions["keeps"]} for role, one in kept["keeps"].items()}}


@pytest.mark.parametrize(("seen", "keys"), [((5, 5), ["trainer"]), ((5, 6), ["trainer/0", "trainer/1"])])
def test_the_trainers_ranks_have_one_state_or_each_its_own(roles, seen, keys):
    ranks = [roles(roles=["trainer"]) for _ in seen]
    for hooks, count in zip(ranks, seen, strict=True):
        hooks[0].instances["keeps"].seen = count
    both = {str(rank): state.collect(hooks) for rank, hooks in enumerate(ranks)}
    kept = state.with_ranks(state.collect(roles()), both)
    assert list(kept["keeps"]) == ["driver", "rollout", *keys]
    for rank, count in enumerate(seen):
        new = roles(roles=["trainer"])
        state.restore(new, kept, rank=Rank(rank, 2))
        assert new[0].instances["keeps"].seen == count
    if len(keys) > 1:
        with pytest.raises(StateError, match="plugin keeps .*of 2 ranks, 3 in this.*--drop-plugin-state keeps"):
            state.restore(roles(roles=["trainer"]), kept, rank=Rank(0, 3))


def test_older_state_passes_the_migration_and_is_announced(roles):
    hooks = roles(more=MIGRATES)
    notes = state.restore(hooks, saved(state_version=2, state={"count": 4}))
    assert hooks[1].instances["keeps"].seen == 8
    assert notes == ["plugin keeps (rollout): its state of form 2 was migrated to 3"]
    assert state.collect(hooks)["keeps"]["rollout"]["state_version"] == 3


@pytest.mark.parametrize(("more", "found", "words"), [
    ("pass", saved(state_version=2), r"state_version 2, .* up to 1.*saved by keeps 0\.9.*"
                                     r"install keeps 0\.9 or newer.*--drop-plugin-state keeps"),
    ("state_version = 2", saved(), r"state_version 1, .* only 2.*migrate_state\(version, state\)"),
    (MIGRATES, saved(state={}), "its state of form 1 cannot be migrated.*KeyError: 'count'"),
    ("state_version = 2\n    def migrate_state(self, version, state):\n        pass", saved(),
     "migrate_state should return.*NoneType"),
    ("pass", saved(state={}), "its state cannot be loaded.*KeyError: 'seen'"),
    ("pass", {"other": saved()["keeps"]}, "state of plugin 'other', which is not enabled.*saved by other "
                                          r"0\.9.*--plugin other, .*--drop-plugin-state other"),
], ids=["newer", "no-migration", "failing-migration", "empty-migration", "failing-load", "not-enabled"])  # fmt: skip
def test_state_that_cannot_be_gone_on_with_is_an_error_and_nothing_is_loaded(roles, more, found, words):
    hooks = roles(more=more)
    with pytest.raises(StateError, match=words) as caught:
        state.restore(hooks, {**found, **({} if "keeps" in found else saved())})
    assert hooks[1].instances["keeps"].seen == 0 and ("--drop-plugin-state" in str(caught.value) or "return" in words)
    if "other" not in found:
        assert "plugin keeps" in str(caught.value) and "keeps.py:" in str(caught.value)


def test_state_is_left_out_on_purpose_and_announced(roles):
    hooks = roles()
    notes = state.restore(hooks, {"gone": saved()["keeps"], **saved(state_version=7)}, drop=["gone", "keeps"])
    assert hooks[1].instances["keeps"].seen == 0
    assert notes == [f"the state of plugin {name} is left out, as --drop-plugin-state says"
                     for name in ("gone", "keeps")]


@pytest.mark.parametrize("gives", ["[1]", "{'a': (1, 2)}", "{1: 2}", "{'a': float('nan')}", "{'a': {3}}"])
def test_a_state_that_json_would_change_is_refused_when_it_is_saved(roles, gives):
    with pytest.raises(StateError, match=r"plugin keeps .*keeps\.py:\d+ Keeps.state_dict.*plain data"):
        state.collect(roles(gives=gives))


def test_a_restart_leaves_out_what_the_start_left_out_until_it_has_a_checkpoint_of_its_own(tmp_path):
    (tmp_path / TRACKER).write_text("1")
    folder = str(tmp_path)
    config = RunConfig(checkpoint=Checkpoint(load=folder, save=folder, drop_plugin_state=["keeps"]))
    attempt = Attempt(Plan(config, (), (), ()), "digest", _published(folder), {})
    assert attempt.next().plan.config.checkpoint.drop_plugin_state == ["keeps"]
    (tmp_path / TRACKER).write_text("2 and more")
    os.utime(tmp_path / TRACKER, (1, 1))
    again = attempt.next().plan.config.checkpoint
    assert (again.load, again.drop_plugin_state) == (folder, [])
