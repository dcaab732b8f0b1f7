"""What the words of a manifest's `provides` ask of a run, checked by a plan without importing any plugin.

    files:NAME      the folder that the plugin's option NAME names has whole files, and nothing writes over it
    weights:NAME    and they are weights of a model that reads the policy's tokens
    compares:NAME   the estimator NAME compares the answers to one prompt
    labels:NAME     the scorer NAME needs the row's label
    rows:NAME:KEY   the scorer NAME needs of a row, or of its metadata, what the option KEY names, else the label
    answers:NAME:KEY  so does the generator NAME, or a conversation that ends with the answer
    made:ENDING     rows of a path with this ending are made, and read from no file
    read-by:TYPE:VERSION      from this release on transformers reads config.json of the model_type TYPE as is meant
    computed-by:TYPE:VERSION  from this release on its module computes what was published; it does for a trainer or an
                    engine that has the word `transformers`, as in `engine:NAME:transformers`

The last two count of any installed official plugin that builds the architecture, as --trainer fsdp enables none.

Whatever else a plugin has to say of a run, its constructor does, in the process that reads the configuration.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from miles_core.config.load import config_json, who
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError
from miles_core.plugins.resolve import choices
from miles_core.plugins.scan import BUILT_IN, KNOWN, installed
from miles_core.plugins.select import Selected, manifest_of
from miles_preflight.checkpoint_files import check_other, check_whole
from miles_preflight.paths import check_source
from miles_preflight.rows import OF_ROWS, File, check_answers, present
from miles_preflight.silent import check_apart


def check_statements(selected: Sequence[Selected], config: RunConfig, files: Sequence[File]) -> None:
    """
    Args:
        files: the beginnings of the prompt files.

    Raises:
        ConfigError, CheckpointError, DataError: by what its plugins state the run cannot be meant.
    """
    if not config.debug.load_debug_rollout_data:
        _scored(selected, config, files)
    if config.trains:
        _compared(selected, config)
    _folders(selected, config)
    _releases(selected, config)


def _words(selected: Sequence[Selected], *kinds: str) -> list[tuple[Selected, str, str, list[str]]]:
    """(plugin, kind, name, what follows) of the words of these kinds."""
    split = [(one, word.split(":")) for one in selected for word in one.manifest.provides if ":" in word]
    return [(one, kind, name, arguments) for one, (kind, name, *arguments) in split if kind in kinds]


def _option(one: Selected, name: str, config: RunConfig) -> str | None:
    """The key of a row that the plugin's option names."""
    value = config.options.get(one.manifest.name, {}).get(name, one.manifest.options[name].default)
    return cast("str | None", value)  # options that rows: and answers: name are text


def _scored(selected: Sequence[Selected], config: RunConfig, files: Sequence[File]) -> None:
    """Somebody scores what the core's generator makes, and has what it compares with."""
    rollout, official = config.rollout, {*BUILT_IN, *KNOWN}
    others = any(one.manifest.name not in official and offer.hook == "generate_response"
                 for one in selected for offer in one.manifest.offers)
    if not rollout.rm_type and rollout.generate == "single-turn" and (
            rollout.num_rollout != 0 and present(config) and not others):
        raise ConfigError("nobody scores the answers", who=who(config, "rollout.rm_type"),
                          fix="name a scorer with --rm-type: math compares with the row's --label-key",
                          code="nobody-scores")
    scorers = [name for hook, name, _ in choices(config) if hook == "reward"]
    chosen = {"labels": scorers, "rows": scorers, "answers": [rollout.generate]}
    for one, kind, name, arguments in _words(selected, *chosen):
        if name not in chosen[kind]:
            continue
        unread = rollout.label_key is None and rollout.prompt_source in OF_ROWS and name in rollout.rm_type
        if kind == "labels" and unread and present(config):
            raise ConfigError(f"the scorer {name!r} compares with labels, and none are read",
                              who=who(config, "rollout.rm_type", "rollout.label_key"),
                              fix="name the rows' key of the ground truth with --label-key",
                              code="scorer-without-labels")
        key = _option(one, arguments[0], config) if arguments else None
        check_answers(config, files, name, key, generates=kind == "answers")


def _compared(selected: Sequence[Selected], config: RunConfig) -> None:
    """Estimators that compare answers have several. Raw rewards, and advantages that others shape, do without."""
    algorithm, rollout = config.algorithm, config.rollout
    chosen = next((name for hook, name, _ in choices(config) if hook == "advantage"), None)
    compares = any(name == chosen for _, _, name, _ in _words(selected, "compares"))
    known = present(config) or "rollout.n_samples_per_prompt" in config.origin
    shaped = any(offer.hook == "shape_advantages" for one in selected for offer in one.manifest.offers)
    if compares and known and rollout.n_samples_per_prompt == 1 and algorithm.rewards_normalization and not shaped:
        raise ConfigError(f"{chosen} compares the answers to one prompt, and of one answer all advantages are 0",
                          got="n_samples_per_prompt = 1",
                          who=who(config, "rollout.n_samples_per_prompt", "algorithm.advantage_estimator"),
                          fix="--n-samples-per-prompt 8 is usual; or an estimator that looks at one answer alone",
                          code="group-of-one-answer")


def _folders(selected: Sequence[Selected], config: RunConfig) -> None:
    for one, kind, name, _ in _words(selected, "files", "weights"):
        key, value = f"{one.manifest.name}.{name}", config.options.get(one.manifest.name, {}).get(name)
        if value is None:
            continue
        folder = cast("str", value)  # options that files: and weights: name are paths
        check_apart(config, {key: folder})
        if kind == "files":
            check_whole(Path(folder))
        elif not config.debug.debug_rollout_only:
            check_source(folder, f"{who(config, key)}, {folder}")
            check_other(config, Path(folder))


def _releases(selected: Sequence[Selected], config: RunConfig) -> None:
    """The installed transformers knows the architecture, in what the run leaves to it."""
    path, constants = config_json(config)
    keys: Mapping[str, Any] = constants or {}
    types = {keys.get("model_type"), (keys.get("text_config") or {}).get("model_type")} - {None}
    module = ("transformers" in config.understood
              or "transformers" in config.stated.get(f"trainer:{config.perf.trainer}", ()))
    families = [one for one in installed()
                if one.official and any(f"model_spec:{each}" in KNOWN[one.name] for each in types)]
    words = {word for manifest in (*(one.manifest for one in selected), *map(manifest_of, families))
             for word in manifest.provides if word.startswith(("read-by:", "computed-by:"))}
    for kind, name, oldest in sorted(word.split(":") for word in words):
        if name in types and (kind == "read-by" or module):
            from packaging.version import Version  # 20 ms, which most plans save

            if Version(have := importlib.metadata.version("transformers")) < Version(oldest):
                servers = "; or --trainer megatron and an engine of servers, which compute it themselves"
                raise ConfigError(f"transformers does not know {name!r} as it was published before {oldest}",
                                  got=have, who=f"{path}: model_type", code="transformers-too-old",
                                  fix=f"pip install 'transformers>={oldest}'{servers * (kind == 'computed-by')}")
