"""Link Miles and its plugins into a folder of the module path, with the metadata that an installation would write.

    python tests/gpu/link.py SITE
"""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def link(project: Path, site: Path) -> str:
    """The name of what was linked, whose code stays where it is."""
    facts = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    core = (ROOT / "miles_core/__init__.py").read_text()
    version = facts.get("version") or re.search(r'__version__ = "(.+)"', core)[1]
    for package in (project / "src" if (project / "src").is_dir() else project).glob("miles_*/__init__.py"):
        target = site / package.parent.name
        target.unlink(missing_ok=True)
        target.symlink_to(package.parent.resolve())
    folder = site / f"{facts['name'].replace('-', '_')}-{version}.dist-info"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    needs = "".join(f"Requires-Dist: {need}\n" for need in facts.get("dependencies", []))
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {facts['name']}\nVersion: {version}\n{needs}")
    groups = {"console_scripts": facts.get("scripts", {})} | facts.get("entry-points", {})
    (folder / "entry_points.txt").write_text("".join(
        f"[{group}]\n" + "".join(f"{name} = {where}\n" for name, where in points.items())
        for group, points in groups.items() if points))
    return facts["name"]


def main() -> int:
    site = Path(sys.argv[1])
    site.mkdir(parents=True, exist_ok=True)
    projects = [ROOT, *sorted(path.parent for path in (ROOT / "plugins").glob("miles-*/pyproject.toml"))]
    print(f"{len([link(project, site) for project in projects])} packages linked into {site}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
