"""Settings of functions: the YAML file of --custom-config-path."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from miles_core.errors import DataError

INLINE = "base64:"
"""What Miles's launchers in Python write before the text of a file, in place of its path."""


def text_of(value: str) -> str:
    """The text of the file that a flag names, or that stands in the flag itself."""
    if value.startswith(INLINE):
        return base64.b64decode(value.removeprefix(INLINE), validate=True).decode()
    return Path(value).read_text(encoding="utf-8")


def custom_config(path: str | None) -> dict[str, Any]:
    """What the YAML file of --custom-config-path says: attributes of `args`.

    Raises:
        DataError: it is not there, or no YAML of keys and values.
    """
    if path is None:
        return {}
    import yaml

    try:
        document = yaml.safe_load(text_of(path))
        return {str(key): value for key, value in (document or {}).items()}
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise DataError("the settings of functions cannot be read", got=str(error), who=f"--custom-config-path {path}",
                        fix="name a YAML file of keys and values", code="function-settings-unreadable") from None
