"""Which numbers compute what: a table of the plan, from the configuration, config.json and the plugins' manifests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from miles_core.config.hardware import engine_dtype
from miles_core.config.load import quantised
from miles_core.config.tables import RunConfig
from miles_core.errors import ManifestError

if TYPE_CHECKING:
    from miles_core.plugins.select import Selected

ROWS = ("trainer", "log-probs", "engine", "KV cache", "sync")
WORDS = ("own", "checkpoint", "computed", "local", "server")
"""What a plugin's text may name beside its own options and `megatron.FIELD`: the row as it stands, what the engine's
checkpoint is quantised by, and what the engine computes in; the last two are that of one kind of engine, else unset."""
UNSTATED = "as the engine has it; its plugin does not say"
_BRACES = re.compile(r"\{([^{}]*)\}")


def lines(config: RunConfig, selected: Sequence[Selected]) -> list[str]:
    """What the plan says.

    Raises:
        ManifestError: a plugin states a row that there is not, or names an option that it does not have.
    """
    rows = _own(config)
    for one in selected:
        for row, text in _stated(one, config, rows):
            rows[row] = text if text == rows[row] else f"{text}  (plugin {one.manifest.name})"
    return [f"{row:<12}{rows[row]}" for row in (ROWS[:2] if config.debug.debug_train_only else ROWS)]


def _own(config: RunConfig) -> dict[str, str]:
    """The core's, as far as the configuration tells."""
    trained = "bfloat16, float32 masters" if config.perf.bf16 else "float32"
    computed, method = _computed(config), quantised(config)
    cache = str(config.surface("server").get("kv_cache_dtype", "auto") if "server_args" in config.understood else next(
        (word.partition("=")[2] for word in config.understood if word.startswith("cache=")), UNSTATED))
    return {
        "trainer": trained, "log-probs": "the trainer's forward, log-softmax in float32",
        "engine": f"{method} weights (config.json), {computed}" if method else computed,
        "KV cache": computed if cache == "auto" else cache,
        "sync": f"{computed}, though the engine's checkpoint is {method}: nothing quantises" if method else computed,
    }  # fmt: skip


def _computed(config: RunConfig) -> str:
    """What the engine's activations are."""
    served = config.surface("server") if "server_args" in config.understood else {}
    return str(served.get("dtype", engine_dtype(config)))


def _stated(one: Selected, config: RunConfig, rows: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Of each row's texts, the first whose words in braces are all set."""
    manifest = one.manifest
    options = {option.name: config.options.get(manifest.name, {}).get(option.name, option.default)
               for option in manifest.options.values()}
    computed, server = _computed(config), "server_args" in config.understood
    for row, texts in manifest.precision.items():
        own = {"own": rows.get(row), "checkpoint": quantised(config), "computed": computed,
               "local": None if server else computed, "server": computed if server else None}
        values = {**own, **options}
        for text in [texts] if isinstance(texts, str) else texts:
            names = _BRACES.findall(text)
            unknown = [name for name in names if name not in values and not name.startswith("megatron.")]
            if row not in ROWS or unknown or not _BRACES.sub("", text).isprintable() or (
                    {"{", "}"} & set(_BRACES.sub("", text))):
                raise ManifestError(f"the precision that plugin {manifest.name!r} states cannot be read",
                                    got=f"{row}: {text!r}", who=manifest.plugin,
                                    fix=f"rows are {', '.join(ROWS)}; words in braces are its options, megatron.FIELD, "
                                    f"{', '.join(WORDS)}", code="manifest-precision-unreadable")
            fields = {f"megatron.{name}": value for name, value in config.surface("megatron").items()}
            replacements = {name: (fields if name.startswith("megatron.") else values).get(name) for name in names}
            if all(value is not None for value in replacements.values()):
                yield row, _filled(text, replacements)
                break


def _filled(text: str, values: Mapping[str, object]) -> str:
    """The text with each word in braces replaced by its value."""
    return _BRACES.sub(lambda match: str(values[match[1]]), text)
