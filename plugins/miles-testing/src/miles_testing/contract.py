"""The contract of a plugin, whatever it does: what authors run in three lines.

    from miles_testing import plugin_contract

    TestContract = plugin_contract("my-plugin")

Each check is a method of the class, so that pytest names what fails. Hooks that are called with data are called on
the inputs of sample_inputs.py; parts that play a role of their own (engines, generators, trainers, weight syncs, model
families) have kits beside this one.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import pickle
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from miles_core import hookspecs
from miles_core.columns import CORE
from miles_core.plugins import bind, fit, load, manifest, state
from miles_core.plugins.bind import Hooks
from miles_core.plugins.select import all_specs
from miles_core.types import Sample
from miles_testing import fresh_process, sample_inputs
from miles_testing.manifests import to_toml
from miles_testing.plugin_under_test import PluginUnderTest
from miles_testing.sample_inputs import Inputs


class Contract:
    """The checks; `plugin_contract` gives a class of its own for each plugin."""

    subject: PluginUnderTest
    import_seconds: float
    call_seconds: float
    old_states: Mapping[int, dict[str, Any]]

    def _that(self, holds: object, what: str) -> None:
        if not holds:
            raise AssertionError(f"{self.subject.who}: {what}")

    def test_manifest_matches_code(self) -> None:
        """What its manifest states is what its class has: hooks, names, options, words."""
        one = self.subject.selected
        kind = load.load(one.manifest)
        where = fit.definition(kind)
        for word in (*manifest.WORDS, *manifest.STATED):
            stated, has = getattr(one.manifest, word), getattr(kind, word, type(getattr(one.manifest, word))())
            self._that(sample_inputs.frozen(_listed(stated)) == sample_inputs.frozen(_listed(has)),
                       f"its manifest states {word} = {stated!r}, and {where} has {has!r}; run "
                       "`miles plugins manifest --write`")
        made = load.options_class(kind)
        options = {name: getattr(made(), name) for name in one.manifest.options} if made else {}
        stated = {name: option.default for name, option in one.manifest.options.items()}
        self._that(_listed(stated) == _listed(options), f"its manifest states the options {stated}, and the code has "
                   f"{options}; run `miles plugins manifest --write`")
        if one.source != "file":
            module, _, _ = one.manifest.plugin.rpartition(":")
            path = Path(inspect.getfile(importlib.import_module(module)))
            source = manifest.of_source(path, name=one.manifest.name, module=module)
            written = manifest.of_package(one.manifest.plugin, one.manifest.name)  # plans read an edited checkout
            self._that(to_toml(source) == to_toml(written),
                       f"its manifest is not what {path.name} says; run `miles plugins manifest --write`")

    def test_light_listing(self) -> None:
        """Listing, planning and importing its own module bring in neither torch nor anything as heavy."""
        seen = self.subject.imports
        for step, words in (("listed", "listing it imports"), ("planned", "planning with it imports"),
                            ("loaded", "importing its module imports")):
            self._that(not seen[step], f"{words} {', '.join(seen[step])}; import them inside the functions that need "
                       "them")
        self._that(not seen["early"], f"planning imports {', '.join(seen['early'])} of it")

    def test_idempotent_load(self) -> None:
        """It may be loaded and made more than once in a process, and a load starts nothing."""
        seen = self.subject.imports
        self._that(seen["same"], "a second load gives another class")
        self._that(seen["again"] is None, f"it loads once only: {seen['again']}")
        self._that(not seen["threads"], f"importing it starts {seen['threads']} threads; start them in a hook")

    def test_spawn_safe(self) -> None:
        """What is selected goes to another process, which loads it and binds it for each role, more than once."""
        sent = [pickle.dumps(item) for item in (self.subject.selected, self.subject.plan.config)]
        first, second = fresh_process.ask(fresh_process.binds, self.subject.selected.manifest.name, *sent)["offers"]
        self._that(first == second, f"bound again it offers {second}, and at first {first}")
        roles, table = self.subject.roles(), all_specs()
        with _ended(roles):
            here = {role: sorted(hook for hook in table if getattr(hooks, hook)) for role, hooks in roles.items()}
        self._that(first == here, f"in another process it offers {first}, and here {here}")

    def test_no_input_mutation(self) -> None:
        """A hook changes nothing that it is given but the value that a chain passes on, and never what was drawn."""
        table = all_specs()
        with _ended(self.subject.roles()) as roles:
            declared = {column.name for column in CORE} | {column.name for hooks in roles.values() if hooks.columns
                                                           for column in hooks.columns()}
            for where, call, one in self.subject.calls(roles):
                hook = where.partition(" ")[0]
                samples = sample_inputs.reached(list(one.arguments))
                drawn = sample_inputs.drawn(samples)
                read_only = list(one.arguments[1:] if table[hook].kind == "chain" else one.arguments)
                before, known = sample_inputs.frozen(read_only), [_known(sample) for sample in samples]
                call(one.arguments)
                self._that(sample_inputs.drawn(samples) == drawn,
                           f"{where} changes tokens, log-probs, versions or prompt of a sample")
                strange = sorted({name for sample, (columns_before, _) in zip(samples, known) for name in sample.columns
                                  if name not in columns_before} - declared)
                self._that(not strange, f"{where} adds the columns {strange}, which its hook `columns` lacks")
                _forget_additions(samples, known)
                self._that(sample_inputs.frozen(read_only) == before,
                           f"{where} changes what it is given; work on copies")

    def test_empty_and_one_sample(self) -> None:
        """Batches of nothing, groups of one answer and answers of no token are answered like any other."""
        with _ended(self.subject.roles()) as roles:
            for where, call, one in self.subject.calls(roles):
                try:
                    wrong = sample_inputs.problem(where.partition(" ")[0], one.arguments, call(one.arguments))
                except Exception as error:
                    raise AssertionError(f"{self.subject.who}: {where} raises "
                                         f"{type(error).__name__}: {error}") from error
                self._that(wrong is None, f"{where}: {wrong}")

    def test_determinism(self) -> None:
        """The same inputs give the same results, also in a new instance and whatever the global generators hold."""
        passes = []
        for seed in (1, 2):
            with _ended(self.subject.roles()) as roles, _seeded(seed):
                passes.append([self.subject.answers(roles) for _ in range(2)])
        self._same(passes[0][0], passes[1][0], "in a new instance")
        self._same(passes[0][1], passes[1][1], "in a new instance, called a second time,")
        keeps = any(hasattr(one, "state_dict") for one in roles["rollout"].instances.values())
        if not keeps:
            one, other = passes[0]
            self._same(one, other, "called a second time (a plugin that remembers has state_dict and load_state_dict)")

    def _same(self, first: list[Any], second: list[Any], when: str,
              fix: str = "draw from a generator of your own, with a fixed seed") -> None:
        for (where, one), (_, other) in zip(first, second, strict=True):
            self._that(one == other, f"{where} gives another result {when}; {fix}")

    def test_state_round_trip(self) -> None:
        """State is plain data of a version, a new instance takes it whole, and older forms are migrated."""
        with _ended(self.subject.roles()) as roles, _ended(self.subject.roles()) as others:
            own = [hooks.instances[self.subject.selected.manifest.name] for hooks in roles.values()]
            pair = [hasattr(own[0], name) for name in ("state_dict", "load_state_dict")]
            self._that(pair[0] == pair[1], "it has one of state_dict and load_state_dict; have both")
            version = state.version_of(own[0])
            self._that(type(version) is int and version >= 1, f"state_version is {version!r}, not 1 or more")
            self.subject.answers(roles)
            collected = state.collect(tuple(roles.values()))
            frozen = copy.deepcopy(collected)
            state.restore(tuple(others.values()), json.loads(json.dumps(collected)))
            self._that(state.collect(tuple(others.values())) == frozen, f"a new instance that loaded {frozen} has "
                       f"{state.collect(tuple(others.values()))}")
            self._same(self.subject.answers(roles), self.subject.answers(others), "from a state that was loaded",
                       "keep in state_dict all that an answer depends on")
            self._that(collected == frozen, "a state changes after it was taken; copy what you give")
        for old, saved in self.old_states.items():
            with _ended(self.subject.roles()) as new:
                name = self.subject.selected.manifest.name
                for role in hookspecs.ROLES:
                    state.restore(tuple(new.values()), {name: {role: {
                        "state_version": old, "version": "an older release", "state": saved}}})

    def test_blame(self) -> None:
        """An error inside a hook comes out, says whose it is, and survives the way to another process."""
        one = self.subject.selected
        with _ended(self.subject.roles()) as roles:
            for where, call, inputs in self.subject.calls(roles, all=True):
                if inputs.kind != "typical":
                    continue
                hook, traps = where.partition(" ")[0], [sample_inputs.Trap() for _ in inputs.arguments]
                try:
                    call(traps)
                except Exception as error:  # noqa: BLE001 - whatever it is, it is looked at
                    if not any(trap.sprung for trap in traps):
                        continue  # it refuses the trap itself, without having looked into it
                    notes = " ".join(getattr(error, "__notes__", ()))
                    self._that(all(word in notes for word in (one.manifest.name, one.version, f"hook {hook}")),
                               f"an error in {where} says {notes!r}, not whose it is")
                    self._survives(where, error)
                else:
                    self._that(not any(trap.sprung for trap in traps), f"{where} swallows errors: an input raised, and "
                               "it answered all the same; catch what you expect, nothing more")

    def _survives(self, where: str, error: Exception) -> None:
        try:
            other = pickle.loads(pickle.dumps(error))
        except Exception as problem:
            raise AssertionError(f"{self.subject.who}: the {type(error).__name__} of {where} does not survive the way "
                                 f"to another process: {problem}") from problem
        self._that(getattr(other, "__notes__", None) == error.__notes__,
                   f"the {type(error).__name__} of {where} loses its notes when it is pickled")

    def test_cost_budget(self) -> None:
        """Its import and each of its calls take no more of the CPU than they may."""
        spent = self.subject.imports["seconds"]
        self._that(spent <= self.import_seconds,
                   f"its import takes {spent:.2f} s of the CPU, more than {self.import_seconds:g}")
        with _ended(self.subject.roles()) as roles:
            for where, call, one in self.subject.calls(roles):
                if one.kind == "typical":
                    spent = min(_seconds(call, copy.copy(one.arguments)) for _ in range(3))
                    self._that(spent <= self.call_seconds,
                               f"{where} takes {spent:.3f} s of the CPU, more than {self.call_seconds:g}")

    def test_role_isolation(self) -> None:
        """What one role keeps no other role can reach."""
        with _ended(self.subject.roles()) as roles:
            self.subject.answers(roles)
            bind.check_roles_apart(tuple(roles.values()))


def plugin_contract(plugin: str, *, options: Mapping[str, object] | None = None, flags: Sequence[str] = (),
                    samples: Callable[[], list[Sample]] = sample_inputs.canned_samples,
                    response: Callable[[Sample], Any] | None = None,
                    checkpoint: Path | None = None, old_states: Mapping[int, dict[str, Any]] | None = None,
                    without: Sequence[str] = (), import_seconds: float = 1.0, call_seconds: float = 0.5) -> type:
    """A class of tests that every plugin passes; give it a name that begins with Test.

    Args:
        plugin: its name, or the path of its file.
        options: of its own table; with dots, of others: {"rollout.rm_type": ["math"]}.
        flags: of `miles run`, where it needs more than its options.
        samples: gives the answers that hooks are called with, new ones each time; those of one prompt are a group. By
            default six short ones in two groups.
        response: what an engine answered a sample with, for the hook generate_response.
        checkpoint: a Hugging Face directory with train.jsonl; by default a tiny random one.
        old_states: a recorded state of each older `state_version`.
        without: hooks, or parts such as "reward:mine", that are not called, because they need what a test has not got,
            such as a server.
        import_seconds, call_seconds: of the CPU: what its import and one call may take.
    """
    folder = Path(tempfile.gettempdir())
    subject = PluginUnderTest(plugin, options or {}, flags, Inputs(samples, response, folder), checkpoint,
                      without)
    return type("Contract", (Contract,), {
        "__doc__": f"The contract of {plugin}.", "subject": subject, "import_seconds": import_seconds,
        "call_seconds": call_seconds, "old_states": dict(old_states or {})})


@contextmanager
def _ended(roles: Mapping[str, Hooks]) -> Iterator[Mapping[str, Hooks]]:
    """Let the instances finish, whatever happens."""
    try:
        yield roles
    finally:
        for hooks in roles.values():
            if hooks.finish is not None:
                hooks.finish("completed")


def _listed(value: object) -> object:
    """Tuples as lists, as TOML has them."""
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value


def _known(sample: Sample) -> tuple[set[str], set[str]]:
    return set(sample.columns), set(sample.metadata)


def _forget_additions(samples: Sequence[Sample], known: Sequence[tuple[set[str], set[str]]]) -> None:
    """Leave out of sight what hooks may put beside what there was: columns of their own, words in the metadata."""
    for sample, (columns, words) in zip(samples, known):
        for mapping, names in ((sample.columns, columns), (sample.metadata, words)):
            for name in set(mapping) - names:
                del mapping[name]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Global generators that begin elsewhere, and afterwards go on where they were."""
    import sys

    torch = sys.modules.get("torch")
    before = random.getstate(), np.random.get_state(), torch.random.get_rng_state() if torch else None
    random.seed(seed)
    np.random.seed(seed)
    if torch:
        torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        if torch:
            torch.random.set_rng_state(before[2])


def _seconds(call: Callable[..., Any], arguments: Sequence[object]) -> float:
    begin = time.process_time()
    call(arguments)
    return time.process_time() - begin
