"""Plan: what a run would do, from static data alone; frozen, hashed, printed, stored with the run.

`prepare` is the one way from words to a plan: `--plan` prints it, `run` carries it out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_core.config import check as checks
from miles_core.config.hardware import engine_dtype
from miles_core.config.load import declared, load
from miles_core.config.tables import TABLES, RunConfig
from miles_core.plugins import resolve
from miles_core.plugins.bind import bind
from miles_core.plugins.resolve import Choice
from miles_core.plugins.select import Selected, all_specs
from miles_core.types import TRACKER


@dataclass(frozen=True)
class Plan:
    """A run before it starts.

    Args:
        config: typed and checked, with everything derived.
        selected: plugins in order, the built-in ones first.
        choices: who owns each named part.
        notes: announcements.
    """

    config: RunConfig
    selected: tuple[Selected, ...]
    choices: tuple[Choice, ...]
    notes: tuple[str, ...]

    def owner(self, hook: str) -> Choice:
        """The choice for a hook that has one owner."""
        return next(choice for choice in self.choices if choice.hook == hook)

    @property
    def digest(self) -> str:
        """Hash of everything that the run depends on."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict:
        """Plain data, stable from run to run."""
        return {
            "plugins": [{"name": s.manifest.name, "source": s.source, "version": s.version, "origin": s.origin}
                        for s in self.selected],
            "owners": [[c.hook, c.name, c.plugin, c.origin] for c in self.choices],
            "order": _order(self.selected),
            "options": {key: value for key, value, _ in _values(self)},
            "origins": {key: origin for key, _, origin in _values(self)}}

    def to_text(self) -> str:
        """What a person reads."""
        return "\n".join([*_text(self), ""])


def prepare(run_file: Path | None, argv: Sequence[str] = ()) -> Plan:
    """Load, check, resolve. Imports no plugin, and neither torch nor megatron.

    Raises:
        MilesError: everything that can be known before the start is refused here.
    """
    loaded = load(run_file, argv)
    config, notes = checks.check(loaded.config, loaded.selected)
    notes = (*loaded.notes, *notes, *resolve.notes(loaded.selected, config))
    return Plan(config, tuple(loaded.selected), tuple(resolve.resolve(loaded.selected, config)), notes)


def _order(selected: Sequence[Selected]) -> dict[str, list[str]]:
    """Hook -> plugins in call order, for the hooks that several may implement."""
    order: dict[str, list[str]] = {}
    for name, spec in all_specs().items():
        names = [one.manifest.name for one in selected for offer in one.manifest.offers if offer.hook == name]
        if spec.kind != "named" and spec.role != "plan" and names:
            order[name] = names
    return order


def _values(plan: Plan) -> list[tuple[str, object, str]]:
    """(key, value, who set it) of every option, and of fields of Megatron-core, SGLang and its router that are set."""
    config, rows = plan.config, []
    for table, options in declared(plan.selected).items():
        own = vars(getattr(config, table)) if table in TABLES else config.options.get(table, {})
        for name, option in options.items():
            value = own.get(name, option.default)
            rows.append((option.key, value, str(config.origin.get(option.key, "default"))))
    for table, values in config.surfaces.items():
        for name, value in values.items():
            rows.append((f"{table}.{name}", value, str(config.origin.get(f"{table}.{name}", "derived"))))
    return rows


def _text(plan: Plan) -> list[str]:
    config, rollout = plan.config, plan.config.rollout
    lines = [f"plan {plan.digest}", "", *_summary(plan), "", "plugins, in order"]
    ours = [s for s in plan.selected if s.ours]
    lines += [f"  {', '.join(s.manifest.name for s in ours)}: in every run, {', '.join({s.version: 0 for s in ours})}"]
    lines += [f"  {s.manifest.name:<14}{s.source} {s.version}  ({s.origin})" for s in plan.selected if not s.ours]
    lines += ["", "owners"]
    lines += [f"  {c.hook:<18}{c.name:<16}plugin {c.plugin}  ({c.origin})" for c in plan.choices]
    lines += ["", "call order"]
    lines += [f"  {hook:<18}{' -> '.join(names)}" for hook, names in _order(plan.selected).items()]
    size, samples, over = rollout.rollout_batch_size, rollout.n_samples_per_prompt, rollout.over_sampling_batch_size
    batch, steps = rollout.global_batch_size, rollout.num_steps_per_rollout
    sections = _of_plugins(plan)
    lines += ["", "batch arithmetic",
              f"  rollout_batch_size {size} x n_samples_per_prompt {samples} = {size * samples}"
              f" = global_batch_size {batch} x num_steps_per_rollout {steps}",
              f"  in flight at most {size * (rollout.max_lag + 1) + over - size}"
              f" groups (max_lag {rollout.max_lag}, over_sampling_batch_size {over})",
              *sections.pop("batch arithmetic", ())]
    lines += ["", "layout", *sections.pop("layout", ())]
    if config.debug.debug_train_only:
        lines.append("  no engine")
    elif "server_args" not in config.understood:
        where = "" if "servers" in config.understood else " in the driver's process"
        lines.append(f"  engine {plan.owner('engine').name}{where}, {engine_dtype(config)}")
    for title, more in sections.items():
        lines += ["", title, *more]
    changed = [(k, v, o) for k, v, o in _values(plan) if o != "default"]
    lines += ["", "options that are not defaults"]
    lines += [f"  {key} = {value!r}  ({origin})" for key, value, origin in changed]
    lines += ["", f"all other options have their defaults ({len(_values(plan)) - len(changed)})"]
    lines += ["", "notes", *(f"  {note}" for note in plan.notes)] if plan.notes else []
    return lines


def _of_plugins(plan: Plan) -> dict[str, list[str]]:
    """What plugins say of the plan, by title."""
    sections: dict[str, list[str]] = {}
    plan_lines = bind(plan.selected, plan.config, "plan").plan_lines
    for title, line in plan_lines(plan.config, plan.selected) if plan_lines is not None else ():
        sections.setdefault(title, []).append(f"  {line}")
    return sections


def _summary(plan: Plan) -> Iterator[str]:
    """What is trained on what, how much, what is written, and whether the run begins or goes on."""
    rollout, debug, saved = plan.config.rollout, plan.config.debug, plan.config.checkpoint
    prompts = rollout.prompt_data if rollout.prompt_source == "rows" else f"prompts of {rollout.prompt_source}"
    if debug.load_debug_rollout_data:
        prompts = f"saved rollouts, {debug.load_debug_rollout_data}"
    how = f"by {plan.owner('advantage').name} " if not debug.debug_rollout_only else ""
    scored = f", scored by {', '.join(rollout.rm_type)}" if rollout.rm_type else ""
    yield f"{'samples' if debug.debug_rollout_only else 'trains'} {saved.hf_checkpoint} {how}on {prompts}{scored}"
    size, count = rollout.rollout_batch_size, rollout.num_rollout
    total = f"{rollout.num_epoch} x all prompts, in rollouts" if count is None else f"{count} rollout{'s'[:count != 1]}"
    each = f"{size} prompts x {rollout.n_samples_per_prompt} answers"
    steps = 0 if debug.debug_rollout_only else rollout.num_steps_per_rollout
    yield f"for {total} of {each}, each in {steps} optimizer step{'s'[:steps != 1]}"
    if count is not None and (rollout.start_rollout_id or -1) >= count:
        yield f"trains nothing: --start-rollout-id {rollout.start_rollout_id} is after the last rollout, {count - 1}"
    into = f", checkpoints into {saved.save}" if saved.save and steps else ", no checkpoints"
    yield f"writes into {saved.run_dir}{into}"
    tracker = Path(saved.load or "") / TRACKER
    done = tracker.read_text(encoding="utf-8", errors="replace").strip() if saved.load and tracker.is_file() else ""
    iteration = tracker.with_name(f"iter_{done:0>7}")
    if done == "release" or (iteration / "common.pt").is_file() and not (iteration / "miles.json").is_file():
        yield f"starts fresh, from the weights that another program saved in {saved.load}"
    elif done:
        yield f"resumes after {done} rollout{'s'[:done != '1']}, from {saved.load}"
    else:
        yield f"starts fresh, from the weights of {saved.ref_load or saved.hf_checkpoint}"
