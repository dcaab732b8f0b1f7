"""Plan: what a run would do, from static data alone; frozen, hashed, printed, stored with the run.

`prepare` is the one way from words to a plan: `--plan` prints it, `run` carries it out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_core import hookspecs
from miles_core.backends.megatron.layout import Layout, layout_of
from miles_core.config import check as checks
from miles_core.config import memory, precision
from miles_core.config.check_machine import check_listening
from miles_core.config.check_paths import check_weights
from miles_core.config.hardware import engines, trainer_gpus
from miles_core.config.load import load
from miles_core.config.options import options_of
from miles_core.config.tables import TABLES, RunConfig
from miles_core.plugins import refusals, resolve
from miles_core.plugins.resolve import Choice
from miles_core.plugins.select import Selected


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

    def chosen(self, hook: str) -> list[str]:
        """The names chosen for a hook, in order."""
        return [choice.name for choice in self.choices if choice.hook == hook]

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
            "origins": {key: origin for key, _, origin in _values(self)},
        }

    def to_text(self) -> str:
        """What a person reads."""
        return "\n".join([*_text(self), ""])


def prepare(run_file: Path | None, argv: Sequence[str] = ()) -> Plan:
    """Load, check, resolve. Imports no plugin, and neither torch nor megatron.

    Raises:
        MilesError: everything that can be known before the start is refused here.
    """
    loaded = load(run_file, argv)
    config, notes = checks.check(loaded.config)
    notes = (*loaded.notes, *notes, *resolve.notes(loaded.selected, config))
    chosen = tuple(resolve.resolve(loaded.selected, config))
    refusals.check_statements(loaded.selected, config)
    check_weights(config)
    check_listening(config)
    return Plan(config, tuple(loaded.selected), chosen, notes)


def _order(selected: Sequence[Selected]) -> dict[str, list[str]]:
    """Hook -> plugins in call order, for the hooks that several may implement."""
    order: dict[str, list[str]] = {}
    for name, spec in hookspecs.specs().items():
        found = [one.manifest.name for one in selected for offer in one.manifest.offers if offer.hook == name]
        if spec.kind != "named" and found:
            order[name] = found
    return order


def _values(plan: Plan) -> list[tuple[str, object, str]]:
    """(key, value, who set it) of every option, and of fields of Megatron-core, SGLang and its router that are set."""
    config, found = plan.config, []
    for table, kind in TABLES.items():
        for name, option in options_of(table, kind).items():
            value = getattr(getattr(config, table), name)
            found.append((option.key, value, str(config.origin.get(option.key, "default"))))
    for table in ("megatron", "server", "router"):
        for name, value in getattr(config, table).items():
            found.append((f"{table}.{name}", value, str(config.origin.get(f"{table}.{name}") or "run file")))
    for one in plan.selected:
        for option in one.manifest.options.values():
            value = config.options.get(one.manifest.name, {}).get(option.name, option.default)
            found.append((option.key, value, str(config.origin.get(option.key, "default"))))
    return found


def _text(plan: Plan) -> list[str]:
    config, rollout, layout = plan.config, plan.config.rollout, layout_of(plan.config)
    lines = [f"plan {plan.digest}", "", "plugins, in order"]
    lines += [f"  {s.manifest.name:<14}{s.source} {s.version}  ({s.origin})" for s in plan.selected]
    lines += ["", "owners"]
    lines += [f"  {c.hook:<18}{c.name:<16}plugin {c.plugin}  ({c.origin})" for c in plan.choices]
    lines += ["", "call order"]
    lines += [f"  {hook:<18}{' -> '.join(names)}" for hook, names in _order(plan.selected).items()]
    size, samples, over = rollout.rollout_batch_size, rollout.n_samples_per_prompt, rollout.over_sampling_batch_size
    batch, steps = rollout.global_batch_size, rollout.num_steps_per_rollout
    lines += ["", "batch arithmetic",
              f"  rollout_batch_size {size} x n_samples_per_prompt {samples} = {size * samples}"
              f" = global_batch_size {batch} x num_steps_per_rollout {steps}",
              f"  in flight at most {size * (rollout.max_lag + 1) + over - size}"
              f" groups (max_lag {rollout.max_lag}, over_sampling_batch_size {over})",
              _micro_batches(config, layout)]
    dtype = "bfloat16" if config.perf.bf16 else "float32"
    lines += ["", "layout",
              f"  {_ranks(config, layout)}: {layout.sizes}, {dtype}", *_engines(plan, rollout.engine_dtype or dtype)]
    lines += precision.lines(config, plan.selected)
    lines += memory.lines(config)
    given = [(k, v, o) for k, v, o in _values(plan) if o != "default"]
    lines += ["", "options that are not defaults"]
    lines += [f"  {key} = {value!r}  ({origin})" for key, value, origin in given]
    lines += ["", f"all other options have their defaults ({len(_values(plan)) - len(given)})"]
    lines += ["", "notes", *(f"  {note}" for note in plan.notes)] if plan.notes else []
    return lines


def _ranks(config: RunConfig, layout: Layout) -> str:
    host = "ray" if config.perf.placement == "ray" else config.perf.trainer_host
    one, several = {"thread": ("a thread", "threads"), "process": ("a process", "processes"),
                    "ray": ("a Ray actor", "Ray actors")}[host]
    return f"1 trainer rank in {one}" if layout.world == 1 else f"{layout.world} trainer ranks in {several}"


def _engines(plan: Plan, dtype: str) -> list[str]:
    """What samples, where, and how it gets the weights."""
    config, perf, name = plan.config, plan.config.perf, plan.owner("engine").name
    if name != "sglang":
        where = " in the driver's process" * (name == "local")
        return [f"  engine {name}{where}, {dtype}"]
    each, number = perf.rollout_num_gpus_per_engine, engines(config)
    running = " that run already" * config.sglang.rollout_external
    router = "no router" if config.sglang.router == "none" else f"router {config.sglang.router}"
    dtype = config.server.get("dtype", dtype)
    lines = [f"  {number} SGLang engine{'s'[:number != 1]} of {each} GPU{'s'[:each != 1]}{running}, {dtype}; {router}"]
    whose = f"{trainer_gpus(config)} for the trainer" + f", {perf.rollout_num_gpus} for engines" * (not running)
    if perf.colocate:
        whose = f"trainer and engines take turns on {trainer_gpus(config)}"
    lines.append(f"  placement {perf.placement}, GPUs: {whose}")
    size = perf.update_weight_buffer_size / 1024**2
    return [*lines, f"  weights travel by {perf.weight_sync}, in buckets of at most {size:g} MiB"]


def _micro_batches(config: RunConfig, layout: Layout) -> str:
    """What each data-parallel rank runs in a step."""
    perf, data, multiple = config.perf, layout.data, layout.micro_batch_multiple
    if perf.use_dynamic_batch_size:
        size = f"at most {perf.max_tokens_per_gpu * layout.context} tokens"
        size += f" ({perf.max_tokens_per_gpu} x cp {layout.context})" if layout.context > 1 else ""
        number = f"a multiple of {multiple} per step" if multiple > 1 else "the same number per step" * (data > 1)
    else:
        size = f"{perf.micro_batch_size} samples"
        number = f"{config.rollout.global_batch_size // (perf.micro_batch_size * data)} per step"
    text = f"  micro-batches of {size}" + (f": {number}" if number else "")
    if data == 1:
        return text
    load = "operations" if perf.balance_by_flops else "tokens"
    dealt = f"balanced by {load}" if perf.balance_data else "dealt in turn"
    return f"{text} on each of {data} data-parallel ranks, {dealt}"
