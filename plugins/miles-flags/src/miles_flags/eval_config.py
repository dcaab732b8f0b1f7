"""Miles's --eval-config: a YAML file of eval datasets as the tables [[eval.datasets]] of a run file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from miles_core.errors import ConfigError, DataError
from miles_flags.settings import text_of

if TYPE_CHECKING:
    from miles_core.config.flags import Given

KEYS = {"n_samples_per_eval_prompt": "n_samples"}
"""Keys of a dataset that have another name here."""


def datasets_of(flag: Given) -> list[dict[str, object]]:
    """The datasets that a file names, each with what `defaults` says of all of them.

    Raises:
        DataError: the file is not there or is no YAML.
        ConfigError: it says something that an evaluation here has no place for.
    """
    import yaml

    who = f"{flag.flag} {' '.join(flag.words)}"
    try:
        document = yaml.safe_load(text_of(*flag.words))
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise DataError("the file of eval datasets cannot be read", got=str(error), who=who,
                        fix="name one YAML file", code="eval-config-unreadable") from None
    whole = document.get("eval", document) if isinstance(document, Mapping) else {}
    if more := sorted(set(whole) - {"defaults", "datasets"}):
        raise ConfigError(f"an evaluation here has no {', '.join(more)}", code="eval-key-unsupported", who=who,
                          fix="datasets are sampled and scored by the run itself: leave the key out of the file")
    tables = ({**(whole.get("defaults") or {}), **dataset} for dataset in whole.get("datasets") or [])
    return [{KEYS.get(key, key): value for key, value in table.items() if value is not None} for table in tables]
