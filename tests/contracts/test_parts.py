"""A part is an object with the members of its protocol: the code asks no part for more."""

import inspect
from collections import defaultdict

import pytest
from source import ROOT, core_files, plugin_files, where
from uses import COMPUTED, Typed

from miles_core.hosts import Handle
from miles_core.plugins.load import import_file
from miles_core.resume import Hosted
from miles_core.stages.placement import Placement
from miles_core.stages.prompts import PromptSource, Records
from miles_core.stages.rollout import Engine, ServerEngine
from miles_core.stages.step import Trainer
from miles_core.stages.sync import Sender, WeightSync


def members(kind):
    """Public attributes and methods, those of the protocols that it builds on included."""
    return {name for base in kind.__mro__ for name in (*vars(base), *inspect.get_annotations(base))
            if name[0] != "_" and base.__name__ not in ("Protocol", "Generic", "object")}


PROTOCOLS = {kind.__name__: members(kind) for kind in (
    Engine, ServerEngine, Trainer, WeightSync, Placement, PromptSource, Records, Sender)}
PARTS = {**PROTOCOLS, "Handle": members(Handle) | members(Hosted) | members(Trainer)}
"""The core meets a trainer through the handle of its host, which adds plugins' state and a bound on each call."""


@pytest.fixture(scope="module")
def used():
    """Part -> member -> where it is used, in the core and in the packages."""
    found = defaultdict(lambda: defaultdict(list))
    for path, line, part, member in Typed([*core_files(), *plugin_files()], PARTS).uses():
        if part != "Handle" or member in PARTS[part] or path in core_files():  # packages host other things, too
            found[part][member].append(where(path, line))
    return found


def test_a_protocol_has_every_member_that_is_used_of_its_parts(used):
    missing = {f"{part}.{member}": places for part, uses in used.items() for member, places in uses.items()
               if member not in PARTS[part]}
    assert not missing, missing


def test_the_uses_that_are_known_are_found(used):
    """Else the test above would say nothing."""
    for part, member, file in (
            ("Engine", "generate", "miles_core/stages/rollout.py"), ("Engine", "path", "miles_core/build.py"),
            ("Engine", "release", "miles_core/handover.py"), ("ServerEngine", "recover", "miles_core/build.py"),
            ("ServerEngine", "stale", "plugins/miles-sglang/src/miles_sglang/sync/sequence.py"),
            ("Handle", "hashes", "miles_core/run.py"), ("Handle", "offload", "miles_core/handover.py"),
            ("Placement", "figures", "miles_core/run.py"), ("WeightSync", "sync", "miles_core/run.py")):
        assert any(place.startswith(file) for place in used[part][member]), f"{part}.{member} in {file}"


def test_what_a_protocol_asks_for_somebody_uses(used):
    """An author of a part writes nothing for nobody."""
    def of(*parts):
        return {member for part in parts for member in used[part]}

    engines, trainers = of("Engine", "ServerEngine"), of("Trainer", "Handle")
    assert PROTOCOLS["ServerEngine"] - engines <= {"servers"}  # whoever looks at a run from outside reads it
    assert not PROTOCOLS["Trainer"] - trainers
    for part in ("WeightSync", "Placement"):
        assert not PROTOCOLS[part] - of(part), PROTOCOLS[part] - of(part)


def test_more_than_the_protocol_has_is_found(tmp_path, monkeypatch):
    """Reads through a field, a name of its own, a default and a computed name."""
    path = tmp_path / "bad.py"
    path.write_text("""
class Loop:
    engine: Engine

    def run(self, placement: "Placement | None", name: str) -> None:
        engine, turns = self.engine, 3
        engine.warm_up()
        getattr(self.engine, "colour", None)
        getattr(placement, name)
        if isinstance(engine, ServerEngine):
            engine.stale(1)
""")
    found = {(part, member) for _, _, part, member in Typed([path], PARTS).uses()}
    assert found == {("Engine", "warm_up"), ("Engine", "colour"), ("Placement", COMPUTED), ("ServerEngine", "stale")}


def test_the_page_has_every_member_of_the_protocols():
    text = (ROOT / "docs" / "contracts.md").read_text(encoding="utf-8")
    made = import_file(ROOT / "docs" / "contracts.py")
    assert {kind.__name__ for kind in made.PARTS} >= PROTOCOLS.keys() - {"Sender"}
    for part, names in PROTOCOLS.items():
        section = text.partition(f"\n## {part}\n")[2].partition("\n## ")[0]
        own = names - (PROTOCOLS["Engine"] if part == "ServerEngine" else set())
        assert not {name for name in own if name not in section}, part
