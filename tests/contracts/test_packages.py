"""What the distributions say of themselves: one version, one licence, a changelog each, and all that they import."""

import re
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from source import ROOT, core_files, imports, where

from miles_core import __version__

FOLDERS = {"miles-core": ROOT} | {path.name: path for path in sorted(ROOT.glob("plugins/miles-*"))} | {
    "miles": ROOT / "miles"}
PROJECTS = {name: tomllib.loads((path / "pyproject.toml").read_text())["project"] for name, path in FOLDERS.items()}
PLUGINS = [name for name in FOLDERS if name not in ("miles-core", "miles")]
MODULES = {"PIL": "pillow", "megatron": "megatron-core", "mlflow": "mlflow-skinny",
           "opentelemetry": "opentelemetry-sdk", "yaml": "pyyaml"}
"""Packages that are called otherwise than their distribution."""

UNBUILT = {"transformer-engine", "triton", "fla", "mamba-ssm", "ifbench"}
"""Imported where they are installed: for a CPU, or in the usual index, there are no builds."""


def needs(name, *extras):
    """The names of the distributions that a distribution declares."""
    project = PROJECTS[name]
    texts = [*project["dependencies"], *(text for extra in extras for text in project["optional-dependencies"][extra])]
    return {Requirement(text).name for text in texts}


@pytest.mark.parametrize("name", FOLDERS)
def test_the_metadata_are_the_same_everywhere(name):
    project, core = PROJECTS[name], PROJECTS["miles-core"]
    for key in ("readme", "requires-python", "license", "license-files"):
        assert project[key] == core[key], key
    assert project["license"] == "Apache-2.0"
    assert (FOLDERS[name] / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (FOLDERS[name] / project["readme"]).is_file()
    assert project.keys() <= {"name", "version", "dynamic", "description", "readme", "requires-python", "license",
                              "license-files", "dependencies", "optional-dependencies", "entry-points", "scripts"}


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plugin_has_the_version_of_the_core_and_fits_it_alone(name):
    assert PROJECTS[name]["version"] == __version__
    assert PROJECTS[name]["dependencies"][0] == f"miles-core~={__version__}"
    assert PROJECTS[name]["optional-dependencies"]["test"][0] == "miles-testing" or name == "miles-testing"


def test_the_core_says_its_version_once():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert data["project"]["dynamic"] == ["version"]
    assert data["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "miles_core.__version__"}


def test_what_was_seen_on_gpus_fits_what_is_asked_for():
    """constraints/gpu.txt: one version of each, inside of every bound of the packages that `miles[gpu]` brings, and all
    that is not brought on CPUs has one."""
    text = (ROOT / "constraints/gpu.txt").read_text(encoding="utf-8")
    pins = dict(line.split("==") for line in text.splitlines() if line and not line.startswith("#"))
    asked = [Requirement(text) for name, extra in (("miles", "gpu"), ("miles-sglang", "server"))
             for text in PROJECTS[name]["optional-dependencies"][extra]]
    brought = ["miles-core", "miles-ray", "miles-sglang", *needs("miles")]
    both = [Requirement(text) for name in dict.fromkeys(brought) for text in PROJECTS[name]["dependencies"]]
    for one in (*asked, *both):
        if one.name in pins:
            assert one.specifier.contains(pins[one.name]), one
        assert one.name in pins or one.name.startswith("miles") or one not in asked, f"{one} has no version"
    assert {"torch", "megatron-core", "ray"} <= pins.keys()


def test_the_extra_all_names_every_plugin():
    assert needs("miles-core", "all") - needs("miles-core") == set(PLUGINS)


def test_uv_takes_every_distribution_from_this_tree():
    uv = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    assert uv["sources"] == {name: {"workspace": True} for name in FOLDERS}
    members = {path for pattern in uv["workspace"]["members"] for path in ROOT.glob(pattern)}
    assert members == set(FOLDERS.values()) - {ROOT}


@pytest.mark.parametrize("name", PLUGINS)
def test_data_and_entry_point_are_in_the_package(name):
    data, package = tomllib.loads((FOLDERS[name] / "pyproject.toml").read_text()), name.replace("-", "_")
    assert {"py.typed", "miles-plugin.toml"} <= set(data["tool"]["setuptools"]["package-data"][package])
    assert all((FOLDERS[name] / "src" / package / file).is_file() for file in ("py.typed", "miles-plugin.toml"))
    (entry,) = data["project"]["entry-points"]["miles.plugins"].values()
    module, _, attribute = entry.partition(":")
    source = (FOLDERS[name] / "src" / module.replace(".", "/")).with_suffix(".py").read_text()
    assert re.search(rf"^class {attribute}\b", source, re.MULTILINE)


@pytest.mark.parametrize("name", FOLDERS)
def test_the_changelog_says_what_is_in_this_version(name):
    text = (FOLDERS[name] / "CHANGELOG.md").read_text()
    assert text.startswith(f"# Changelog\n\nNotable changes of {name}, in the form of [Keep a Changelog]")
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    form = re.compile(r"\[[0-9a-z.]+\] - (Unreleased|\d{4}-\d\d-\d\d)")
    assert all(form.fullmatch(heading) for heading in headings), headings
    assert any(heading.startswith(f"[{__version__}] - ") for heading in headings), f"no heading for {__version__}"
    sections = re.findall(r"^### (.*)$", text, re.MULTILINE)
    assert sections and set(sections) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.parametrize("name", FOLDERS)
def test_what_is_imported_is_declared(name):
    """Not only by somebody else whom the distribution needs."""
    folder, found = FOLDERS[name], []
    for path in core_files() if name == "miles-core" else sorted((folder / "src").rglob("*.py")):
        of_tests = ["test"] if "testing" in path.parent.parts else []  # a package's kit for tests of others
        known = {*needs(name, *of_tests), name, *UNBUILT}
        # Inside a function it may be what an extra brings.
        optional = needs(name, *PROJECTS[name]["optional-dependencies"].keys() - {"test", "all", "dev"})
        eager = set(imports(path, lazy=False))
        for line, module in imports(path):
            known |= set() if (line, module) in eager else optional
            top = module.partition(".")[0]
            if not (path.parent / "__init__.py").is_file() and path.with_name(f"{top}.py").is_file():
                continue  # beside it in a folder of PYTHONPATH
            if top not in sys.stdlib_module_names and MODULES.get(top, top.replace("_", "-")) not in known:
                found.append(f"{where(path, line)} imports {top}")
    assert not found, found


def test_what_the_core_declares_it_imports():
    named = {module.partition(".")[0] for path in core_files() for _, module in imports(path)}
    declared = {Requirement(text).name for text in PROJECTS["miles-core"]["dependencies"]}
    assert not declared - {MODULES.get(name, name) for name in named}


def test_the_template_renders_what_the_distributions_here_are():
    template = ROOT / "cookiecutter" / "{{cookiecutter.distribution}}"
    text = (template / "pyproject.toml").read_text()
    assert f'dependencies = ["miles-core~={__version__}"' in text and f'"miles-megatron~={__version__}"' in text
    for line in ('license-files = ["LICENSE"]', 'readme = "README.md"', 'test = ["miles-testing"]', '"py.typed"'):
        assert line in text, line
    ours = (ROOT / "CHANGELOG.md").read_text().replace("miles-core", "{{ cookiecutter.distribution }}")
    assert (template / "CHANGELOG.md").read_text().startswith(ours.partition(" All")[0])
    assert {(FOLDERS[name] / "MANIFEST.in").read_text() for name in PLUGINS} == {(template / "MANIFEST.in").read_text()}
    assert (ROOT / "LICENSE").read_bytes() == (ROOT / "cookiecutter/templates/licences/Apache-2.0").read_bytes()
