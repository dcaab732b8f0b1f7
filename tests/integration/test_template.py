"""The template renders projects that are right from the start, by either tool, and older projects can be brought up.

A rendered project is built, installed from its wheel in an environment of its own, listed, tested, linted and typed.
"""

from __future__ import annotations

import dataclasses
import filecmp
import itertools
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from miles_testing import scaffold
from miles_testing.manifests import to_toml
from miles_testing.stubs import listed

from miles_core import __version__
from miles_core.config.tables import TABLES
from miles_core.errors import ConfigError, PluginError
from miles_core.plugins.load import import_file
from miles_core.plugins.manifest import of_source

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "cookiecutter"
HOOKS = list(listed())
AWKWARD = {
    "my-reward": {"hooks": "reward"},
    "x2": {"hooks": ",".join(HOOKS), "state": "yes", "gpu_tests": "yes", "licence": "MIT",
           "summary": "Says \"yes\" \\ 'no', often.", "author": "O'Neil \"X\""},
    "tiny-family": {"family": "seed_oss", "summary": "A \"family\" \\ of models."},
    "a-b-c": {"hooks": "filter_group, metrics", "distribution": "miles-a-b-c", "licence": "BSD-3-Clause"},
}  # fmt: skip

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("template")]


def shell(*words: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run([str(word) for word in words], cwd=cwd, capture_output=True, text=True, timeout=300,
                          env={**os.environ, **environment}, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def by_copier(folder: Path, name: str, **answers: str) -> Path:
    return scaffold.new(name, template=None, out=folder / answers.get("distribution", f"miles-plugin-{name}"),
                        answers=answers)


def by_cookiecutter(folder: Path, name: str, **answers: str) -> Path:
    from cookiecutter.main import cookiecutter

    return Path(cookiecutter(str(TEMPLATE), no_input=True, output_dir=str(folder),
                             extra_context={"name": name, **answers}))


@pytest.fixture(scope="module")
def projects(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("projects")
    return {name: by_copier(folder, name, **answers) for name, answers in AWKWARD.items()}


@pytest.mark.parametrize("name", AWKWARD)
def test_both_tools_render_the_same_files(projects, tmp_path, name):
    other = by_cookiecutter(tmp_path, name, **AWKWARD[name])
    files = {path.relative_to(other) for path in other.rglob("*") if path.is_file()}
    assert files == {path.relative_to(projects[name]) for path in projects[name].rglob("*") if path.is_file()}
    differing = [str(file) for file in files if not filecmp.cmp(other / file, projects[name] / file, shallow=False)]
    assert differing == [scaffold.ANSWERS], "which each writes in its own way"


@pytest.mark.parametrize(("name", "distribution"), [
    ("miles-plugin-gmpo", "miles-plugin-gmpo"), ("miles-gmpo", "miles-gmpo")])
def test_the_name_of_a_distribution_stands_for_that_of_its_plugin(tmp_path, name, distribution):
    made = [scaffold.new(name, template=None, out=tmp_path / "one", answers={}),
            by_cookiecutter(tmp_path / "two", name, distribution=distribution)]
    for project in made:
        stated = tomllib.loads((project / "pyproject.toml").read_text())["project"]
        assert stated["name"] == distribution and list(stated["entry-points"]["miles.plugins"]) == ["gmpo"]
        (manifest,) = project.rglob("miles-plugin.toml")
        assert tomllib.loads(manifest.read_text())["name"] == "gmpo"


@pytest.mark.parametrize("name", AWKWARD)
def test_the_rendered_manifest_is_what_the_code_says(projects, name):
    package = projects[name].name.replace("-", "_")
    folder = projects[name] / "src" / package
    fresh = to_toml(of_source(folder / "plugin.py", name=name, module=f"{package}.plugin"))
    assert (folder / "miles-plugin.toml").read_text() == fresh
    assert tomllib.loads((projects[name] / "pyproject.toml").read_text())["project"]["name"] == projects[name].name


@pytest.mark.parametrize("name", AWKWARD)
def test_a_rendered_project_is_linted(projects, name):
    shell(sys.executable, "-m", "ruff", "check", "--no-cache", ".", cwd=projects[name])  # nothing is left in it


def test_the_command_of_a_rendered_readme_chooses_what_the_plugin_offers(projects):
    def flags(name):
        command = (projects[name] / "README.md").read_text().partition("miles run ")[2].partition("\n")[0].split()
        return dict(zip(command[1::2], command[2::2], strict=True))

    assert flags("my-reward") == {"--plugin": "my-reward", "--rm-type": "my-reward"}
    assert flags("a-b-c") == {"--plugin": "a-b-c"} and flags("tiny-family").keys() == {"--plugin", "--hf-checkpoint"}
    known = {f"--{one.name.replace('_', '-')}" for table in TABLES.values() for one in dataclasses.fields(table)}
    assert len(flags("x2")) > 8 and flags("x2").keys() - {"--plugin"} <= known and {*flags("x2").values()} == {"x2"}


@pytest.mark.slow
def test_every_hook_alone_makes_a_plugin_that_binds(tmp_path):
    """With the arguments and kind that its specification wants; and all of them are clean."""
    from miles_core.config.tables import RunConfig
    from miles_core.plugins import bind
    from miles_core.plugins.select import Selected

    for number, hook in enumerate(HOOKS):
        source = by_cookiecutter(tmp_path, f"p{number}", hooks=hook) / f"src/miles_plugin_p{number}/plugin.py"
        manifest = of_source(source, name=f"p{number}")
        for role in ("driver", "rollout", "trainer"):
            bind.bind([Selected(manifest, "file", "0", "a test")], RunConfig(), role)
    shell(sys.executable, "-m", "ruff", "check", ".", cwd=tmp_path)


@pytest.mark.parametrize(("name", "answers", "message"), [
    ("My Reward", {}, "not a valid plugin name"), ("x--y", {}, "not a valid plugin name"),
    ("rollout", {}, "name rollout is already used"), ("grpo", {}, "name grpo is already used"),
    ("fine", {"hooks": "rewrd"}, "'rewrd'.*did you mean 'reward'"),
    ("fine", {"distribution": "other"}, "miles-fine or"), ("fine", {"family": "Seed-OSS"}, "model_type"),
])  # fmt: skip
def test_answers_that_make_no_plugin_are_refused(tmp_path, name, answers, message):
    with pytest.raises((ConfigError, PluginError), match=message):
        by_copier(tmp_path, name, **answers)
    from cookiecutter.exceptions import FailedHookException

    with pytest.raises(FailedHookException):
        by_cookiecutter(tmp_path / "other", name, **answers)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    """The Python of a new environment; what Miles itself needs comes from this one, by a path file."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder / "venv", with_pip=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    ours = [sysconfig.get_paths()["purelib"]]
    (site / "zz-host.pth").write_text("\n".join(f"import site; site.addsitedir({path!r})" for path in ours) + "\n")
    return folder / "venv" / "bin" / "python"


@pytest.mark.full
@pytest.mark.parametrize("name", ["my-reward", "tiny-family"])
def test_a_project_is_built_installed_listed_tested_and_typed(projects, clean, tmp_path, name):
    """Of a family the tests compare random models with transformers."""
    project = shutil.copytree(projects[name], tmp_path / "project")
    shell(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path, ".",
          cwd=project)
    (wheel,) = tmp_path.glob("*.whl")
    shell(clean, "-m", "pip", "install", "--quiet", "--no-deps", wheel, cwd=tmp_path)
    miles = [clean, "-c", "from miles_core.cli import main; main()"]
    assert f"{name:17} miles-plugin-{name} 0.1.0" in shell(*miles, "plugins", "list", cwd=tmp_path)
    shell(*miles, "plugins", "doctor", name, cwd=tmp_path)
    shell(clean, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=project, OMP_NUM_THREADS="1")
    shell(sys.executable, "-m", "mypy", cwd=project, MYPYPATH=str(ROOT))


@pytest.mark.slow
def test_projects_are_typed_beside_a_core_that_is_installed_from_a_checkout(projects, tmp_path):
    """By a type checker that runs none of the code that setuptools may put in place of the package; with any hook."""
    checkout, environment = tmp_path / "checkout", tmp_path / "venv"
    for name in ("miles_core", "cookiecutter"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    venv.create(environment, with_pip=False)  # an older setuptools comes with it
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "below.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")  # whose own path files do not count
    python = environment / "bin" / "python"
    shell(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "-e", checkout, cwd=tmp_path,
          PYTHONPATH="")
    for name in ("my-reward", "x2"):
        shell(python, "-m", "mypy", "--cache-dir", tmp_path / "cache", cwd=projects[name], PYTHONPATH="")


@pytest.mark.full
def test_an_older_project_with_edits_of_its_own_is_brought_up(tmp_path):
    """What the template changed comes, what the author changed stays, and uncommitted work is not touched."""
    git = ["git", "-c", "user.name=T", "-c", "user.email=t@example.org"]
    environment = {f"GIT_{who}_{what}": value for who, (what, value) in itertools.product(
        ("AUTHOR", "COMMITTER"), (("NAME", "T"), ("EMAIL", "t@example.org")))}
    template = tmp_path / "template"
    shutil.copytree(TEMPLATE, template)

    def commit(folder: Path, *tag: str) -> None:
        if not (folder / ".git").exists():
            shell("git", "init", "--quiet", "-b", "main", cwd=folder)
        shell("git", "add", "-A", cwd=folder)
        shell(*git, "commit", "--quiet", "-m", "A step", cwd=folder)
        for name in tag:
            shell("git", "tag", name, cwd=folder)

    commit(template, "v1")
    project = scaffold.new("my-reward", template=str(template), out=tmp_path / "project", answers={"hooks": "reward"})
    commit(project)
    readme, plugin = project / "README.md", project / "src/miles_plugin_my_reward/plugin.py"
    plugin.write_text(plugin.read_text().replace("return float(", "return 2.0 * float("))
    with pytest.raises(ConfigError, match="uncommitted"):
        scaffold.update(project, None)
    commit(project)
    theirs = template / "{{cookiecutter.distribution}}" / "README.md"
    theirs.write_text(theirs.read_text().replace("## Development", "## Contributing"))
    commit(template, "v2")
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environment.items():
            patch.setenv(key, value)
        said = scaffold.update(project, None)
    assert "README.md" in said and "## Contributing" in readme.read_text()
    assert "return 2.0 * float(" in plugin.read_text() and "<<<<<<<" not in plugin.read_text() + readme.read_text()


@pytest.mark.full
@pytest.mark.parametrize("make", [by_copier, by_cookiecutter])
def test_a_project_of_the_template_that_miles_ships_is_brought_up(tmp_path, monkeypatch, make):
    """At once there is nothing to do; of an older miles-core pip fetches the template, here from a folder."""
    project = make(tmp_path, "my-reward")
    answers = project / scaffold.ANSWERS
    assert f"_commit: {__version__}\n" in answers.read_text() and str(ROOT) not in answers.read_text()

    def commit() -> None:
        shell("git", "init", "--quiet", cwd=project)
        shell("git", "add", "-A", cwd=project)
        shell("git", "-c", "user.name=T", "-c", "user.email=t@example.org", "commit", "-qm", "A step", cwd=project)

    commit()
    assert scaffold.update(project, None) == "nothing has changed"
    ignore, readme = project / ".gitignore", project / "README.md"
    with zipfile.ZipFile(tmp_path / "miles_core-0.0.9-py3-none-any.whl", "w") as wheel:
        for path in (one for one in TEMPLATE.rglob("*") if one.is_file() and one.suffix != ".pyc"):
            text = path.read_text(encoding="utf-8").replace(f"version = '{__version__}'", "version = '0.0.9'")
            text = text.replace("/runs/\n", "").replace("## Development", "## Working on it")
            wheel.writestr(f"miles_core/template/{path.relative_to(TEMPLATE)}", text)
        for name, text in {"METADATA": "Metadata-Version: 2.1\nName: miles-core\nVersion: 0.0.9\n", "RECORD": "",
                           "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}.items():
            wheel.writestr(f"miles_core-0.0.9.dist-info/{name}", text)
    answers.write_text(answers.read_text().replace(f"_commit: {__version__}", "_commit: 0.0.9"))
    ignore.write_text(ignore.read_text().replace("/runs/\n", "") + "/mine/\n")
    readme.write_text(readme.read_text().replace("## Development", "## Working on it") + "Mine.\n")
    commit()
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    assert "README.md" in scaffold.update(project, None)
    assert "/runs/\n" in ignore.read_text() and "/mine/\n" in ignore.read_text()
    assert "## Development" in readme.read_text() and readme.read_text().endswith("Mine.\n")
    assert f"_commit: {__version__}\n" in answers.read_text()


def test_what_is_generated_in_the_template_is_up_to_date():
    module = import_file(TEMPLATE / "make_stubs.py")
    stale = [path.name for path, text in module.files().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run python cookiecutter/make_stubs.py"
