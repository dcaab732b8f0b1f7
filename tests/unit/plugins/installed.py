"""Distributions of plugins as pip leaves them in a site folder, without pip."""

from __future__ import annotations

from pathlib import Path

from miles_testing.manifests import to_toml

from miles_core.plugins.manifest import FILE, of_source

BODY = '''"""A plugin."""

from dataclasses import dataclass

from miles_core import hookimpl, option


@dataclass(frozen=True, kw_only=True)
class Options:
    width: int = option(3, "How wide.")


class Part:
    """Offers the reward {name}."""

{stated}
    def __init__(self, options: Options):
        self.options = options

    @hookimpl("reward", name="{name}-reward")
    def score(self, sample):
        return 0.0
'''


def install(site: Path, name: str, *, stated: dict | None = None, distribution: str | None = None,
            version: str = "1.0", body: str = BODY, manifest: bool = True, code: str = "",
            editable: bool = False, core: str = "") -> Path:
    """Put a plugin into a site folder; its package's folder.

    Args:
        stated: class attributes such as implies or presets.
        manifest: whether it has its miles-plugin.toml.
        core: what its metadata require of miles-core.
        code: further lines at the top of the module, which run when it is imported, not when the manifest is written.
        editable: as `pip install -e` records it.
    """
    distribution = distribution or f"miles-{name}"
    package = distribution.replace("-", "_")
    folder = site / package
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    attributes = "\n".join(f"    {key} = {value!r}" for key, value in (stated or {}).items())
    text = body.format(name=name, stated=attributes)
    (folder / "plugin.py").write_text(text)
    if manifest:
        (folder / FILE).write_text(to_toml(of_source(folder / "plugin.py", name=name, module=f"{package}.plugin")))
    (folder / "plugin.py").write_text(code + text)
    info = site / f"{package}-{version}.dist-info"
    info.mkdir()
    about = {"Metadata-Version": "2.1", "Name": distribution, "Version": version, "Author": "A. U. Thor"}
    about |= {"Requires-Dist": f"miles-core{core}"} if core else {}
    (info / "METADATA").write_text("".join(f"{key}: {value}\n" for key, value in about.items()))
    (info / "entry_points.txt").write_text(f"[miles.plugins]\n{name} = {package}.plugin:Part\n")
    if editable:
        (info / "direct_url.json").write_text('{"url": "file:///somewhere", "dir_info": {"editable": true}}')
    return folder
