"""Settings of functions: the YAML file of --custom-config-path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles_core.errors import DataError


def custom_config(path: str | None) -> dict[str, Any]:
    """What the YAML file of --custom-config-path says: attributes of `args`.

    Raises:
        DataError: it is not there, or no YAML of keys and values.
    """
    if path is None:
        return {}
    import yaml

    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        return {str(key): value for key, value in (document or {}).items()}
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise DataError("the settings of functions cannot be read", got=str(error), who=f"--custom-config-path {path}",
                        fix="name a YAML file of keys and values", code="function-settings-unreadable") from None
