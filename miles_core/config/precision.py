"""Which numbers compute what: a table of the plan, from the configuration, config.json and the plugins' manifests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from miles_core.backends.sglang.arguments import dtype
from miles_core.config.load import config_json
from miles_core.config.tables import RunConfig
from miles_core.errors import ManifestError

if TYPE_CHECKING:
    from miles_core.plugins.select import Selected

ROWS = ("trainer", "log-probs", "engine", "KV cache", "sync")


def lines(config: RunConfig, selected: Sequence[Selected]) -> list[str]:
    """What the plan says.

    Raises:
        ManifestError: a plugin states a row that there is not, or names an option that it does not have.
    """
    rows = _own(config)
    for one in selected:
        for row, text in _stated(one, config):
            rows[row] = f"{text}  (plugin {one.manifest.name})"
    return ["", "precision", *(f"  {row:<12}{rows[row]}" for row in ROWS)]


def _own(config: RunConfig) -> dict[str, str]:
    """The core's, as far as the configuration tells."""
    trained = "bfloat16, float32 masters" if config.perf.bf16 else "float32"
    server = config.rollout.engine == "sglang"
    computed = str(config.server.get("dtype", dtype(config))) if server else dtype(config)
    method = quantised(config)
    cache = config.server.get("kv_cache_dtype", "auto") if server else "float32"
    return {
        "trainer": trained, "log-probs": "the trainer's forward, log-softmax in float32",
        "engine": f"{method} weights (config.json), {computed}" if method else computed,
        "KV cache": computed if cache == "auto" else str(cache),
        "sync": f"{computed}, though the engine's checkpoint is {method}: nothing quantises" if method else computed,
    }  # fmt: skip


def quantised(config: RunConfig) -> str | None:
    """What config.json of --hf-checkpoint says its weights are quantised by; None for plain ones."""
    said = (config_json(config)[1] or {}).get("quantization_config")
    return str(said.get("quant_method", "quantised")) if isinstance(said, Mapping) else None


def _stated(one: Selected, config: RunConfig) -> Iterator[tuple[str, str]]:
    manifest = one.manifest
    values = {option.name: config.options.get(manifest.name, {}).get(option.name, option.default)
              for option in manifest.options.values()}
    for row, text in manifest.precision.items():
        try:
            if row not in ROWS:
                raise KeyError(row)
            yield row, text.format(**values)
        except (KeyError, IndexError, ValueError) as error:
            raise ManifestError(f"the precision that plugin {manifest.name!r} states cannot be read",
                                got=f"{row}: {text!r}, {error}", who=manifest.plugin,
                                fix=f"rows are {', '.join(ROWS)}; words in braces are its options") from None
