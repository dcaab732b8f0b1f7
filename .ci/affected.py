#!/usr/bin/env python3
"""Which tests a change can break: what `.ci/run` gives to pytest.

    python .ci/affected.py [--base REF] [--explain] gate|full|sglang

prints the files and folders of one tier on one line; an empty line says that nothing of it has to run. The change is
what differs between REF and the working tree. Without a REF it is what differs from the point where this branch left
upstream/main or origin/main. Where that point is unknown, or is the commit at hand, everything runs.

A package is tested when the environment of its tests holds a package that changed: by the `dependencies` of the
pyproject.tomls and by the extra `test`. A file of tests/ runs when it names such a package. The gate covers what
depends on the change; the full tier covers the changed packages alone, and everything where all of Miles may have
changed. The contracts always run. Standard library only: CI asks before anything is installed.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONTRACTS, SGLANG = "tests/contracts", "tests/sglang"
EVERYTHING = ("plugins", "tests")
MAINS = ("upstream/main", "origin/main")

WHOLE = (".ci/", ".gitignore", "MANIFEST.in", "Makefile", "conftest.py", "constraints/", "cookiecutter/",
         "miles_core/", "pyproject.toml", "setup.py", "tests/contracts/")
"""What every package stands on, or what decides which tests run: both tiers, whole."""
MATERIAL = ("examples/",)
"""Models, prompts and run files that tests of every kind use: the whole gate."""
DISTRIBUTED = ("LICENSE", "miles/", "release/")
"""What only the tests of archives and releases look at."""
PAGES = ("docs/", "recipes/", "AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "mkdocs.yml")
LAUNCH = ("launch/",)
"""Files that start runs on clusters, which have tests of their own."""
SCRIPTS = ("bench/", "tests/gpu/")
"""Started by tests/contracts, which run anyway."""

READS_PAGES = re.compile(r"""["']docs["']|["']docs/|tests\.pages|["']README\.md["']""")
"""In a test that reads the documentation."""
ASKS_ALL = re.compile(r"""\bKNOWN\b|testing\.parity|glob\(["'](?:plugins/)?miles-""")
"""In a test that goes through all official packages and names none."""


@dataclass
class Selection:
    """What runs. `reasons` has a line for each changed file.

    Attributes:
        gate, full: paths for pytest; a path below another one of its tier is left out by `paths`.
        sglang: whether the tests on a real SGLang server run.
    """

    gate: set[str] = field(default_factory=lambda: {CONTRACTS})
    full: set[str] = field(default_factory=set)
    sglang: bool = False
    reasons: list[str] = field(default_factory=list)

    def paths(self, tier: str) -> list[str]:
        """The paths of a tier, sorted."""
        if tier == "sglang":
            return [SGLANG] if self.sglang else []
        chosen = self.gate if tier == "gate" else self.full
        return sorted(path for path in chosen if not any(path.startswith(f"{other}/") for other in chosen))


class Repository:
    """The packages of a checkout, what each needs, and which tests name it.

    Args:
        root: the folder with plugins/ and tests/.
    """

    def __init__(self, root: Path = ROOT):
        self.root = root
        self.runtime: dict[str, set[str]] = {"miles-core": set()}
        self.for_tests: dict[str, set[str]] = {"miles-core": set()}
        for path in sorted(root.glob("plugins/miles-*/pyproject.toml")):
            project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
            self.runtime[project["name"]] = _ours(project.get("dependencies", ()))
            self.for_tests[project["name"]] = _ours(project.get("optional-dependencies", {}).get("test", ()))

    def closure(self, packages: Iterable[str]) -> set[str]:
        """The packages and all that an installation of them brings."""
        found: set[str] = set()
        waiting = list(packages)
        while waiting:
            package = waiting.pop()
            if package not in found:
                found.add(package)
                waiting += self.runtime.get(package, ())
        return found

    def tested_with(self, package: str) -> set[str]:
        """The packages whose tests may meet this one."""
        return {one for one in self.runtime if package in self.closure({one, *self.for_tests[one]})}

    def built_on(self, package: str) -> set[str]:
        """The packages that do not work without this one; it is among them."""
        return {one for one in self.runtime if package in self.closure({one})}

    @functools.cached_property
    def hubs(self) -> set[str]:
        """The packages of the smallest run, which tests/ starts everywhere without naming them."""
        return self.closure({"miles-testing", *self.for_tests.get("miles-testing", ())})

    @functools.cached_property
    def shared_tests(self) -> Mapping[str, str]:
        """Path -> source of each test file of tests/, with that of the modules beside it that it imports.

        Without the contracts, which always run, and those that need a server or a GPU.
        """
        found = {}
        for path in sorted(self.root.glob("tests/**/test_*.py")):
            if path.relative_to(self.root).as_posix().startswith((CONTRACTS, SGLANG, "tests/gpu")):
                continue
            text = path.read_text(encoding="utf-8")
            beside = [other for other in path.parent.glob("*.py") if not other.name.startswith("test_")
                      and re.search(rf"import.*\b{other.stem}\b|\b{other.stem} import", text)]
            found[path.relative_to(self.root).as_posix()] = "\n".join(
                [text, *(other.read_text(encoding="utf-8") for other in beside)])
        return found

    def naming(self, packages: Iterable[str]) -> set[str]:
        """The files of tests/ that name one of the packages or ask them all."""
        words = {word for package in packages for word in self._spellings(package)}
        return self._asking_all | {path for path in self.shared_tests
                                   if words & self._words[path]}

    @functools.cached_property
    def reading_pages(self) -> set[str]:
        """The files of tests/ that read the documentation."""
        return {path for path, text in self.shared_tests.items() if READS_PAGES.search(text)}

    def tests_of(self, packages: Iterable[str]) -> set[str]:
        """The folders of the packages' own tests."""
        return {f"plugins/{one}/tests" for one in packages if (self.root / "plugins" / one / "tests").is_dir()}

    @functools.cached_property
    def _asking_all(self) -> set[str]:
        return {path for path, text in self.shared_tests.items() if ASKS_ALL.search(text)}

    @functools.cached_property
    def _words(self) -> Mapping[str, set[str]]:
        """Of each file; those with hyphens whole and in parts, so that --rollout-batch-size names no batch-size."""
        return {path: {*re.findall(r"\w+", text), *re.findall(r"\w+(?:-\w+)+", text)}
                for path, text in self.shared_tests.items()}

    def _spellings(self, package: str) -> set[str]:
        """How tests spell a package: distribution, module, plugin; the named parts and options of its manifest."""
        plugin = package.removeprefix("miles-")
        words = {package, package.replace("-", "_"), plugin, plugin.replace("-", "_")}
        for path in self.root.glob(f"plugins/{package}/src/*/miles-plugin.toml"):
            manifest = tomllib.loads(path.read_text(encoding="utf-8"))
            named = {offer["name"] for offer in manifest.get("offers", ()) if "name" in offer}
            named |= set(manifest.get("options", ()))
            words |= named | {name.replace("_", "-") for name in named}
        return words


def _ours(requirements: Iterable[str]) -> set[str]:
    """The packages of this project among requirements, extras and bounds taken off."""
    names = (re.match(r"[\w.-]+", text.strip()) for text in requirements)
    return {name[0] for name in names if name and name[0].startswith("miles-")}


def select(changed: Iterable[str], repository: Repository) -> Selection:
    """What a change of these files, by their paths from the root, can break."""
    chosen = Selection()
    for path in sorted(set(changed)):
        why = _add(chosen, path, repository)
        chosen.reasons.append(f"{path}: {why}")
    return chosen


def everything(why: str) -> Selection:
    """All tests of both tiers, and those on a real server."""
    return Selection(set(EVERYTHING), set(EVERYTHING), True, [why])


def _add(chosen: Selection, path: str, repository: Repository) -> str:
    """Add what a changed file can break; says what that is."""
    if path.startswith("plugins/"):
        package = path.split("/")[1]
        if package in repository.runtime:
            return _add_package(chosen, path, package, repository)
    elif path.startswith(MATERIAL):
        chosen.gate.update(EVERYTHING)
        return "the whole gate"
    elif path.startswith(DISTRIBUTED):
        chosen.gate.add("tests/packages")
        chosen.full.add("tests/packages")
        return "tests of archives and releases"
    elif path.startswith(PAGES):
        chosen.gate.update(repository.reading_pages)
        chosen.full.update(repository.reading_pages)
        return "the tests that read pages"
    elif path.startswith(LAUNCH):
        chosen.gate.add("tests/launch")
        chosen.full.add("tests/launch")
        return "the tests of launch/"
    elif path.startswith(SCRIPTS):
        return "the contracts, which start scripts"
    elif path.startswith(f"{SGLANG}/"):
        chosen.sglang = True
        return "the tests on a real SGLang server"
    elif path.startswith("tests/") and path.count("/") > 1 and not path.startswith(WHOLE):
        # A test file is what it tests. Whatever else lies in a folder of tests may be used by all of the folder.
        folder, _, name = path.rpartition("/")
        kept = (repository.root / path).is_file()
        target = path if kept and name.startswith("test_") else "/".join(folder.split("/")[:2])
        chosen.gate.add(target)
        chosen.full.add(target)
        return target
    # What every package stands on; and what is not known, such as a package that is gone: it may be anything.
    chosen.gate.update(EVERYTHING)
    chosen.full.update(EVERYTHING)
    chosen.sglang = True
    return "everything" if path.startswith((*WHOLE, "tests/")) else "everything: nothing is known of this file"


def _add_package(chosen: Selection, path: str, package: str, repository: Repository) -> str:
    """A file of a package: its tests in both tiers, those of its dependents in the gate."""
    inside = path.removeprefix(f"plugins/{package}/")
    if inside.startswith("tests/"):
        chosen.gate.update(repository.tests_of({package}))
        chosen.full.update(repository.tests_of({package}))
        return f"the tests of {package}"
    dependents = repository.tested_with(package)
    chosen.gate.update(repository.tests_of(dependents))
    chosen.full.update(repository.tests_of({package}), repository.naming({package}))
    if package in repository.hubs:
        chosen.gate.add("tests")
    else:
        chosen.gate.update(repository.naming(repository.built_on(package)))
    if inside == "pyproject.toml":
        chosen.gate.add("tests/packages")
    # The tests on a real server hold the engine, its syncs and what the engine is built on.
    chosen.sglang |= package in repository.closure({"miles-sglang"})
    return f"{package} and {len(dependents) - 1} packages that are tested with it"


def changed_since(base: str | None, root: Path) -> list[str] | None:
    """The files that differ from the base, untracked ones too; None where the base is not known."""
    try:
        for ref in [base] if base else MAINS:
            if base or _git(root, "rev-parse", "--quiet", "--verify", f"{ref}^{{commit}}", check=False):
                common = _git(root, "merge-base", ref, "HEAD").strip()
                if not base and common == _git(root, "rev-parse", "HEAD").strip():
                    return None  # main itself: no one says since when
                names = _git(root, "diff", "--name-only", "--no-renames", "-z", common)
                names += _git(root, "ls-files", "-z", "--others", "--exclude-standard")
                return [name for name in names.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        return None  # no git, no history, a shallow clone, or no such base
    return None


def _git(root: Path, *words: str, check: bool = True) -> str:
    return subprocess.run(["git", *words], cwd=root, check=check, capture_output=True, text=True).stdout


def selection(base: str | None, root: Path = ROOT) -> Selection:
    """What runs for the change since the base."""
    changed = changed_since(base, root)
    if not changed:
        return everything(f"everything: {'it is not known what' if changed is None else 'nothing'} changed")
    return select(changed, Repository(root))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tier", choices=("gate", "full", "sglang"))
    parser.add_argument("--base", default=os.environ.get("MILES_CI_BASE") or None,
                        help="the commit, branch or tag to compare with (MILES_CI_BASE)")
    parser.add_argument("--explain", action="store_true", help="say on stderr what each changed file selects")
    given = parser.parse_args()
    chosen = selection(given.base)
    if given.explain:
        print(*chosen.reasons, sep="\n", file=sys.stderr)
    print(*chosen.paths(given.tier))


if __name__ == "__main__":
    main()
