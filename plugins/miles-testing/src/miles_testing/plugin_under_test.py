"""A plugin under test: how it is enabled, what it is bound to, and the canned calls of what it offers."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_core import hookspecs
from miles_core.plugins import bind, manifest
from miles_core.plugins.bind import Hooks
from miles_core.plugins.plan import Plan, prepare
from miles_core.plugins.select import Selected, all_specs, select, short
from miles_testing import fresh_process, sample_inputs
from miles_testing.sample_inputs import Inputs, SampleInput
from miles_testing.tiny import run_file


class PluginUnderTest:
    """A plugin and how it is enabled; its properties are computed on first access.

    Args:
        plugin: its name, or the path of its file.
    """

    def __init__(self, plugin: str, options: Mapping[str, object], flags: Sequence[str], inputs: Inputs,
                 checkpoint: Path | None, without: Sequence[str]):
        self.plugin, self.options, self.flags, self.inputs = plugin, dict(options), list(flags), inputs
        self.checkpoint, self.without = checkpoint, frozenset(without)

    @functools.cached_property
    def run_file(self) -> Path:
        """A run file that enables it and chooses what it offers."""
        stated = self._stated()
        names = {hook: [o.name for o in stated.offers if o.hook == hook] for hook in all_specs()}
        tables: dict[str, dict[str, object]] = {"rollout": {}, "algorithm": {}, stated.name: {}}
        if names["reward"]:
            tables["rollout"]["rm_type"] = names["reward"]
        for hook, key in (("advantage", "advantage_estimator"), ("policy_loss", "policy_loss")):
            if names[hook]:
                tables["algorithm"][key] = names[hook][0]
        folder = Path(tempfile.mkdtemp(prefix="miles-contract-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return run_file(folder / "run.toml", [self._named], tables, self.options, stated.name, self.checkpoint)

    @property
    def _named(self) -> str:
        return str(Path(self.plugin).resolve()) if self.plugin.endswith(".py") else self.plugin

    def _stated(self) -> manifest.Manifest:
        return select([(self._named, "plugin_contract")], [])[0].manifest

    @functools.cached_property
    def plan(self) -> Plan:
        """What a run with it would be."""
        return prepare(self.run_file, self.flags)

    @functools.cached_property
    def selected(self) -> Selected:
        """The plugin as the plan has it."""
        name = self._stated().name if self.plugin.endswith(".py") else short(self.plugin)
        return next(one for one in self.plan.selected if one.manifest.name == name)

    @functools.cached_property
    def who(self) -> str:
        """How failures refer to it."""
        return f"plugin {self.selected.manifest.name} {self.selected.version}"

    def roles(self) -> dict[str, Hooks]:
        """A new instance for every role, bound."""
        return {role: bind.bind([self.selected], self.plan.config, role) for role in hookspecs.ROLES}

    @functools.cached_property
    def imports(self) -> dict[str, Any]:
        """What a fresh process saw of its import."""
        return fresh_process.ask(fresh_process.imports, self.selected.manifest.name, self.run_file, self.flags)

    def calls(self, roles: Mapping[str, Hooks], *, all: bool = False,
              ) -> Iterator[tuple[str, Callable[..., Any], SampleInput]]:
        """(hook, what is bound, inputs) for everything that it offers and that can be called with canned inputs.

        Args:
            all: also what is left out, because it needs what is not there.
        """
        without, algorithm = frozenset() if all else self.without, self.plan.config.algorithm
        measured = algorithm.observe_training_entropy or algorithm.entropy_coef != 0
        inputs = dataclasses.replace(self.inputs, entropy=measured)
        for hook in (hook for hook in sample_inputs.HOOKS if hook not in without):
            parts = sample_inputs.callables(roles[all_specs()[hook].role], hook)
            for name, bound in ((name, bound) for name, bound in parts.items() if f"{hook}:{name}" not in without):
                for one in inputs.of(hook):
                    yield f"{hook} {name!r} ({one.kind})", functools.partial(sample_inputs.call, hook, bound), one

    def answers(self, roles: Mapping[str, Hooks]) -> list[tuple[str, object]]:
        """Every canned call and what came of it."""
        answers = []
        for where, call, one in self.calls(roles):
            answer = call(one.arguments)
            answers.append((where, sample_inputs.frozen(answer)))
        return answers
