"""Resolve: who owns what. Named parts, capabilities and the order of chains, from manifests alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miles_core import hookspecs
from miles_core.config.surfaces import advice, surfaces_of
from miles_core.config.tables import RunConfig
from miles_core.errors import ManifestError, OwnerError, did_you_mean
from miles_core.plugins import fit
from miles_core.plugins.scan import CALLED_FOR, KNOWN
from miles_core.plugins.select import Selected, readable
from miles_core.reading import format_of

OF_CHECKPOINT = "config.json of the checkpoint"
OPTIONS = tuple(f"{key} = " for key in CALLED_FOR if not key.startswith("quantization_config."))
"""How the origin of a plugin begins that a run has for its checkpoint's sake, or for an option's."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A named part that the run picked: which hook, which name, who offers it, who chose."""

    hook: str
    name: str
    plugin: str
    origin: str


def choices(config: RunConfig) -> list[tuple[str, str, str]]:
    """(hook, name, key that chose it) for every named part that this configuration needs."""
    algorithm, rollout, perf = config.algorithm, config.rollout, config.perf
    estimator = "sft" if algorithm.loss_type == "sft_loss" else algorithm.advantage_estimator
    served = not config.debug.debug_train_only
    paths = {one["path"]: "eval.datasets" if one in config.eval.datasets else "eval.eval_prompt_data"
             for one in config.eval.every if "path" in one}
    if rollout.prompt_data is not None and rollout.prompt_source == "rows":
        paths[rollout.prompt_data] = "rollout.prompt_data"
    picked = [
        *{format_of(path): ("read_rows", format_of(path), key) for path, key in paths.items()}.values(),
        ("prompt_source", rollout.prompt_source, "rollout.prompt_source"),
        *[("engine", rollout.engine or "local", "rollout.engine")] * served,
        ("generate", rollout.generate, "rollout.generate"),
        *(("reward", name, "rollout.rm_type") for name in rollout.rm_type),
        *(("reward", name, "eval.datasets") for name in sorted(
            {str(one["rm_type"]) for one in config.eval.datasets if one.get("rm_type")} - {*rollout.rm_type})),
        ("combine_rewards", rollout.combine_rewards, "rollout.combine_rewards"),
        ("placement", perf.placement, "perf.placement")]
    if not config.debug.debug_rollout_only:
        reduction = algorithm.reduction or ("token" if algorithm.calculate_per_token_loss else "sample")
        picked += [
            ("trainer", perf.trainer, "perf.trainer"),
            ("advantage", estimator, "algorithm.advantage_estimator"),
            ("policy_loss", "custom_loss", "algorithm.loss_type") if algorithm.loss_type == "custom_loss" else
            ("policy_loss", algorithm.policy_loss or estimator, "algorithm.policy_loss"),
            ("reduction", reduction, "algorithm.reduction"),
            ("clip_gradients", config.optimizer.clip_gradients, "optimizer.clip_gradients"),
            *[("weight_sync", perf.weight_sync or "in-process", "perf.weight_sync")] * served,
            *((hook, config.model.model_name, "model.model_name") for hook in config.stated.get(
                f"trainer:{perf.trainer}", ()) if hook == "model_spec" and config.model.model_name),
        ]
    return picked


def chosen(config: RunConfig, hook: str) -> str:
    """The name picked for a hook that has one owner; empty where the run has no such part."""
    return next((name for one, name, _ in choices(config) if one == hook), "")


def policy_loss(selected: Sequence[Selected], config: RunConfig) -> tuple[str, str]:
    """(name, why) of the policy loss of a run that names none: the estimator's namesake where there is one."""
    if config.algorithm.loss_type == "custom_loss":
        return "custom_loss", "--loss-type custom_loss"
    estimator = chosen(config, "advantage")
    if any((offer.hook, offer.name) == ("policy_loss", estimator) for one in selected for offer in one.manifest.offers):
        return estimator, "namesake of the estimator"
    return "clip", "the estimator brings none"


def missing(selected: Sequence[Selected], config: RunConfig) -> list[tuple[str, str]]:
    """(official plugin, key) for every named part that nobody selected offers but an official plugin is known to.

    Naming a part names its plugin: --advantage-estimator grpo and --rm-type math need no --plugin beside them.
    """
    offered = {(offer.hook, offer.name) for one in selected for offer in one.manifest.offers}
    known = {tuple(offer.split(":")): plugin for plugin, offers in KNOWN.items() for offer in offers}
    lacking = {}
    for hook, name, key in choices(config):
        if (hook, name) not in offered and (hook, name) in known:
            lacking.setdefault(known[hook, name], f"{key} = {name!r}, {config.origin.get(key, 'default')}")
    return list(lacking.items())


def called_for(selected: Sequence[Selected], config: RunConfig, quantised: str | None) -> list[tuple[str, str]]:
    """(official plugin, why) for options that are set, and weights that are quantised, which an official plugin is for.

    Args:
        quantised: what config.json of --hf-checkpoint says its weights are quantised by.
    """
    have, called = {one.manifest.name for one in selected}, {}
    for key, plugin in CALLED_FOR.items():
        table, _, name = key.partition(".")
        value = quantised == name if table == "quantization_config" else config.surface(table).get(name)
        if value and plugin not in have:
            called.setdefault(plugin, f"{OF_CHECKPOINT}: {name}" if table == "quantization_config" else
                             f"{key} = {value!r}, {config.origin.get(key, 'default')}")
    return list(called.items())


def resolve(selected: Sequence[Selected], config: RunConfig) -> list[Choice]:
    """The owners of every named part the run needs.

    Raises:
        HookError: a manifest names a hook that does not exist, or a method does not suit its hook.
        ManifestError: written for another plugin API.
        OwnerError: two owners of one name, nobody offers a name, a missing or conflicting capability.
    """
    owners: dict[tuple[str, str], str] = {}
    for one in selected:
        if one.manifest.api != hookspecs.API:
            raise ManifestError(f"plugin {one.manifest.name!r} was written for plugin API {one.manifest.api}",
                                got=f"this is API {hookspecs.API}", who=f"{one.source} {one.version}",
                                fix="install a version that matches miles-core", code="plugin-api-mismatch")
        for offer in one.manifest.offers:
            named, part = fit.hook_of(one, offer).kind == "named", (offer.hook, offer.name)
            if named and (first := owners.setdefault(part, one.manifest.name)) != one.manifest.name:
                raise OwnerError(f"two plugins offer the {offer.hook} {offer.name!r}: {first} and {one.manifest.name}",
                                 code="part-offered-twice", fix="enable only one of them, or rename one",
                                 who=" and ".join(fit.who(one, offer.hook, fit.located(one, mine))
                                                  for one in selected for mine in one.manifest.offers
                                                  if (mine.hook, mine.name) == part))
    _capabilities(selected)
    _resumes(selected, config)
    return [_own(selected, hook, name, key, owners, config) for hook, name, key in choices(config)]


def _own(selected: Sequence[Selected], hook: str, name: str, key: str, owners: dict[tuple[str, str], str],
         config: RunConfig) -> Choice:
    origin = str(config.origin.get(key, "default"))
    if (hook, name) in owners:
        return Choice(hook, name, owners[hook, name], origin)
    if plugins := [one.name for one in readable() for offer in one.offers if (offer.hook, offer.name) == (hook, name)]:
        raise OwnerError(f"no enabled plugin offers the {hook} {name!r}", got=f"not enabled: {', '.join(plugins)}",
                         code="part-not-enabled", who=f"{key} ({origin})", fix=f"add --plugin {plugins[0]}")
    if hook == "model_spec":  # an official plugin that has it would be enabled by now (`missing`)
        built = sorted({*_official(hook), *(n for h, n in owners if h == hook)})
        raise OwnerError(f"no plugin builds the architecture {name!r}",
                         code="architecture-unknown", got=f"there are {', '.join(built)}",
                         who=f"{key} ({origin})", fix=("leave it out: config.json names the architecture" if key in
                         config.origin and config.origin[key].kind != "derived" else "take another checkpoint") +
                         "; or add the family in a plugin of about fifty lines: docs/model-families.md")
    offered = sorted(n for h, n in owners if h == hook)
    fix = (advice(surfaces_of(selected), f"{hook}:{name}")
           or did_you_mean(name.lower(), [*offered, *_official(hook)], 0.7)
           or "add its --plugin, or name a function (--custom-...-path)")
    raise OwnerError(f"no enabled plugin offers the {hook} {name!r}", code="part-not-enabled",
                     got=f"offered: {', '.join(offered) or 'none'}", who=f"{key} ({origin})", fix=fix)


def _official(hook: str) -> list[str]:
    """Names that official plugins offer for a hook; naming one enables its plugin."""
    offered = (offer.partition(":") for offers in KNOWN.values() for offer in offers)
    return [name for one, _, name in offered if one == hook]


def keeper(selected: Sequence[Selected]) -> str | None:
    """The plugin that keeps groups which were called back (hook unfinished); None where nobody does."""
    return next((s.manifest.name for s in selected if any(o.hook == "unfinished" for o in s.manifest.offers)), None)


def notes(selected: Sequence[Selected], config: RunConfig) -> list[str]:
    """What has to be announced once plugins and configuration are known."""
    rollout, keeps, keys = config.rollout, keeper(selected), {hook: key for hook, _, key in choices(config)}
    picked = {(hook, name) for hook, name, _ in choices(config)}
    offers = {one.manifest.name: one.manifest.offers for one in selected if not one.ours and one.manifest.offers}
    unused = [f"plugin {name} has no part in this run: {keys[offered[0].hook]} does not name what it offers: "
              + ", ".join({offer.name: 0 for offer in offered}) for name, offered in offers.items()
              if all(offer.hook in keys and (offer.hook, offer.name) not in picked for offer in offered)]
    surplus = rollout.over_sampling_batch_size > rollout.rollout_batch_size
    if keeps is None or surplus or (rollout.max_lag and (rollout.batch_order == "window"
                                                         or rollout.pause_generation_mode == "abort")):
        return unused
    return [*unused, f"plugin {keeps} has nothing to keep: no group is called back without over-sampling "
                     "(--over-sampling-batch-size), or sampling ahead (--max-lag) with --batch-order window or "
                     "--pause-generation-mode abort"]


def _resumes(selected: Sequence[Selected], config: RunConfig) -> None:
    """
    Raises:
        OwnerError: groups are called back, and their generator could not go on with them.
    """
    keeps, name = keeper(selected), config.rollout.generate
    if keeps is not None and not any(f"resumes:{name}" in one.manifest.provides for one in selected):
        raise OwnerError(f"the generator {name!r} cannot continue partial samples", code="generator-cannot-continue",
                         who=f"plugin {keeps}", fix='use --generate single-turn; a plugin whose generator starts from '
                         f'generation.begun declares provides = ("resumes:{name}",)')


def _capabilities(selected: Sequence[Selected]) -> None:
    provided = {word: one.manifest.name for one in selected for word in (one.manifest.name, *one.manifest.provides)}
    for one in selected:
        for word in one.manifest.requires:
            if word not in provided:
                raise OwnerError(f"plugin {one.manifest.name!r} requires {word!r}, which no enabled plugin provides",
                                 code="plugin-requirement-missing", fix=f"enable one that does: --plugin {word}")
        for word in one.manifest.conflicts:
            if word in provided:
                raise OwnerError(f"plugin {one.manifest.name!r} conflicts with {word!r} of plugin {provided[word]!r}",
                                 code="plugin-conflict", fix="enable only one of them")
