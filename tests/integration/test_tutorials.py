"""Each tutorial, followed to the letter by a reader who has docs/ and the wheels of the project, nothing else of it.

What others publish comes from this Python, by a path file; Miles comes from the wheels alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

from miles_core.record.events import read
from tests.pages import ROOT, blocks, commands, compare_printed

TUTORIALS = {"tutorials/reward.md": "digits", "tutorials/loss.md": "soft-gate", "tutorials/model-spec.md": "ernie",
             "publish-a-plugin.md": "varied"}
"""Page -> the plugin that stands at its end."""
MODULES = ("pip", "pytest", "twine")
OURS = re.compile(r"(__editable__.*|miles[_-].*|.*\.pth)")
MILES = tomllib.loads((ROOT / "miles/pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
PARTS = {".": ("pyproject.toml", "setup.py", "README.md", "LICENSE", "miles_core", "cookiecutter"), "miles": ("",),
         **{f"plugins/{needed.partition('~')[0]}": ("",) for needed in (*MILES, "miles-testing")
            if not needed.startswith("miles-core")}}
"""Distributions that the tutorials ask for, and what each is built of."""
PATIENCE = 240
"""Seconds for one command on a busy machine; all of a page take about twenty on a quiet one."""

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("tutorials")]


class Reader:
    """Does in a folder what pages say.

    Args:
        place: where it begins; `cd` leads elsewhere.
        python: the one that `python`, `pip`, `pytest` and `miles` are.
    """

    def __init__(self, place: Path, python: Path, wheels: Path):
        self.place, self.at, self.python = place, place, python
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | {
            "OMP_NUM_THREADS": "1", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}

    def run(self, *words: str) -> str:
        """What a command prints.

        Raises:
            AssertionError: it failed.
        """
        command, *rest = words
        if command in MODULES:
            command, rest = "python", ["-m", command, *rest]
        if words[:3] == ("python", "-m", "build"):
            rest.append("--no-isolation")  # what builds it is here, and no network is
        assert command in ("python", "miles", "ruff"), f"nobody knows how to run {command}"
        done = subprocess.run([self.python.with_name(command), *rest], cwd=self.at, capture_output=True, text=True,
                              timeout=PATIENCE, env=self.environment, check=False)
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout + done.stderr

    def follow(self, page: Path) -> str:
        """Every block of a page, in order; everything that was printed.

        Raises:
            AssertionError: a command failed, or did not print what the page says.
        """
        printed = [""]
        for block in blocks(page):
            where = f"{page.name}:{block.line}"
            if block.mark in ("not run", "quoted"):
                continue
            if block.mark == "file":
                (self.at / block.what).parent.mkdir(parents=True, exist_ok=True)
                (self.at / block.what).write_text(block.text, encoding="utf-8")
            elif block.language == "text":
                compare_printed(block.text, printed[-1], where)
            elif block.language == "python":
                printed.append(self.run("python", "-c", block.text))
            else:
                assert block.language == "sh", f"{where}: nobody knows how to run {block.language}"
                printed.append("".join(self._shell(words) for _, words in commands(block.text)))
        return "".join(printed)

    def _shell(self, words: list[str]) -> str:
        if words[0] != "cd":
            return self.run(*(found for word in words for found in self._files(word)))
        self.at = (self.at / words[1]).resolve()
        assert self.at.is_relative_to(self.place) and self.at.is_dir(), f"there is no {words[1]}"
        return ""

    def _files(self, word: str) -> list[str]:
        found = sorted(self.at.glob(word)) if "*" in word else []
        return [str(path.relative_to(self.at)) for path in found] or [word]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    """The wheels, built of copies, as a build leaves files behind."""
    folder, sources = tmp_path_factory.mktemp("wheels"), []
    for number, (project, names) in enumerate(PARTS.items()):
        sources.append(tmp_path_factory.mktemp(f"source{number}"))
        for name in names:
            path = ROOT / project / name
            if path.is_dir():
                shutil.copytree(path, sources[-1] / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
                                dirs_exist_ok=True)
            else:
                shutil.copy(path, sources[-1])
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder,
                    *sources], check=True, timeout=PATIENCE)
    return folder


@pytest.fixture
def reader(tmp_path, wheels) -> Reader:
    """In a folder with docs/ and wheels/, with a Python of its own that has no Miles yet."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    [packages] = (tmp_path / "venv").glob("lib/python*/site-packages")
    others = tmp_path / "others"
    others.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not OURS.fullmatch(path.name):
            (others / path.name).symlink_to(path)
    (packages / "others.pth").write_text(f"{others}\n")
    (tmp_path / "venv" / "bin" / "ruff").symlink_to(Path(sysconfig.get_path("scripts")) / "ruff")
    place = tmp_path / "empty"
    shutil.copytree(ROOT / "docs", place / "docs")
    shutil.copytree(wheels, place / "wheels")
    return Reader(place, tmp_path / "venv" / "bin" / "python", place / "wheels")


@pytest.mark.full
@pytest.mark.parametrize(("page", "plugin"), TUTORIALS.items(), ids=lambda value: str(value).rpartition("/")[2])
def test_a_tutorial_ends_in_a_plugin_that_passes(page, plugin, reader):
    printed = reader.follow(reader.place / "docs" / page)
    paths = json.loads(reader.run("python", "-c", "import json, sys; print(json.dumps(sys.path[1:]))"))
    assert not [path for path in paths if Path(path).resolve().is_relative_to(ROOT)], "the repository is not needed"
    reader.at = reader.place
    where = Path(reader.run("python", "-c", "import miles_core; print(miles_core.__file__)").strip())
    assert where.is_relative_to(reader.python.parents[1]), "Miles is the one of the wheel"
    listed = {one["name"]: one for one in json.loads(reader.run("miles", "plugins", "list", "--json"))}
    assert plugin in listed, listed
    assert re.search(r"^\d+ passed\b", printed, re.MULTILINE), printed


@pytest.mark.slow
def test_the_guide_to_a_mixture_of_experts_makes_a_family(reader):
    printed = reader.follow(reader.place / "docs" / "new-architecture.md")
    assert re.search(r"^1 passed\b", printed, re.MULTILINE)
    assert re.search(r"^\| GLM-4.5 \| `glm4_moe` \| miles-specs-moe \|(?: \d\.\de[-+]\d\d \|){6} exact \|", printed,
                     re.MULTILINE), printed
    where = reader.run("python", "-c", "import miles_specs_moe; print(miles_specs_moe.__file__)").strip()
    assert Path(where).is_relative_to(reader.place), "the family is the one of the guide"
    found = [event["metrics"]["train/train_rollout_logprob_abs_diff_max"]
             for event in read(reader.place / "runs" / "new" / "events.jsonl") if event["event"] == "metrics"]
    assert len(found) == 2 and max(found) <= 1e-5


@pytest.mark.parametrize(("text", "wrong"), [
    ("```sh\nmiles plugins info nobody\n```\n", "plugin 'nobody'"), ("```python\nassert False\n```\n", "Assertion"),
    ("```sh\npip --version\n```\n\n```text\npip of another kind\n```\n", "nobody printed 'pip of another kind'"),
    ("```sh\ngit init\n```\n", "nobody knows how to run git"),
], ids=["command", "python", "printed", "unknown"])  # fmt: skip
def test_a_page_that_is_wrong_is_found(text, wrong, tmp_path):
    """By this Python, since nothing has to be installed for it."""
    page = tmp_path / "page.md"
    page.write_text(text)
    reader = Reader(tmp_path, Path(sys.executable), tmp_path)
    with pytest.raises(AssertionError, match=wrong):
        reader.follow(page)
