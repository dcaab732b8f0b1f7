"""Manifests: a plugin's hooks, names and options are known without running a line of it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from miles_testing.manifests import to_toml

from miles_core.config.options import Option
from miles_core.errors import ManifestError
from miles_core.plugins import manifest
from miles_core.plugins.load import load
from miles_core.plugins.manifest import Manifest, Offer, of_source, of_toml
from miles_core.plugins.plan import prepare

HOSTILE = '''
from pathlib import Path
Path({trace!r}).write_text("executed")
from dataclasses import dataclass
from miles_core import hookimpl, option

@dataclass(frozen=True, kw_only=True)
class Options:
    width: int = option(3, "How wide.", flags=("--width",))
    words: list[str] = option([], "Which words.")

class Hostile:
    """Leaves a trace when it runs."""
    name = "gentle"
    provides = ("calm",)
    implies = {{"server.enable_return_routed_experts": True}}
    precision = {{"sync": "{{width}} bits"}}

    def __init__(self, options: Options):
        self.options = options

    @hookimpl("reward", name="zero")
    def zero(self, sample):
        return 0.0

    @hookimpl
    def filter_group(self, group):
        return group
'''

STATED = '''
from dataclasses import dataclass
from typing import ClassVar

from miles_core import hookimpl, option


@dataclass(frozen=True, kw_only=True)
class Options:
    wide: int = option(3, "How wide.", flags="--width")


class Stated:
    name: str = "calm"
    requires = "grpo"
    conflicts: ClassVar[tuple[str, ...]] = ("math",)

    def __init__(self, options: Options):
        self.options = options

    @hookimpl
    def filter_group(self, group):
        return group
'''


@pytest.fixture
def hostile(tmp_path):
    path = tmp_path / "hostile.py"
    path.write_text(HOSTILE.format(trace=str(tmp_path / "trace")))
    return path


def test_a_file_is_read_and_not_executed(hostile, tmp_path):
    found = of_source(hostile)
    assert found.name == "gentle" and found.provides == ("calm",)
    assert found.offers == (Offer("reward", "zero", "zero"), Offer("filter_group", "gentle", "filter_group"))
    assert found.implies == {"server.enable_return_routed_experts": True}
    assert found.precision == {"sync": "{width} bits"}
    assert found.options["width"] == Option("gentle", "width", "int", 3, "How wide.", ("--width",))
    assert not (tmp_path / "trace").exists()


def test_what_a_class_states_may_be_annotated_and_one_word(tmp_path):
    path = tmp_path / "stated.py"
    path.write_text(STATED)
    stated = of_source(path)
    assert (stated.name, stated.requires, stated.conflicts) == ("calm", ("grpo",), ("math",))
    assert stated.options["wide"].flags == ("--width",)
    load(stated)


def test_a_plan_with_a_plugin_file_does_not_execute_it(hostile, tmp_path):
    flags = ["--plugin", hostile, "--rm-type", "zero", "--width", "5", "--hf-checkpoint", "x", "--prompt-data", "y",
             "--rollout-batch-size", "2", "--num-rollout", "1"]
    plan = prepare(None, [str(flag) for flag in flags])
    text = plan.to_text()
    assert "gentle.width = 5  (--width)" in text and "zero" in text and "filter_group" in text
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(("text", "message"), [
    ("def broken(:", r"line 1.*\[plugin-file-not-python\]"),
    ("x = 1", "exactly one class.*none"),
    ("from miles_core import hookimpl\nclass A:\n @hookimpl\n def finish(self): ...\n"
     "class B:\n @hookimpl\n def finish(self): ...", "exactly one class.*A, B"),
    ("from miles_core import hookimpl\nN = 'x'\nclass A:\n @hookimpl('reward', name=N)\n def f(self, sample): ...",
     r"got N\).*\[declaration-not-literal\]"),
    ("from miles_core import hookimpl\nclass A:\n def __init__(self, options): ...\n @hookimpl\n def finish(self): ...",
     "annotate `options`"),
    ("from miles_core import hookimpl\nclass O:\n a: int = 3\n"
     "class A:\n def __init__(self, options: O): ...\n @hookimpl\n def finish(self): ...", "option\\(default, help\\)"),
])
def test_what_cannot_be_read_says_where_and_how_to_write_it(tmp_path, text, message):
    path = tmp_path / "plugin.py"
    path.write_text(text)
    with pytest.raises(ManifestError, match=message):
        of_source(path)


words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)
values = st.one_of(st.none(), st.booleans(), st.integers(-10**6, 10**6),
                   st.floats(allow_nan=False, allow_infinity=False), words, st.lists(words, max_size=3))
options = st.builds(lambda name, default, help, flags: Option("p", name, "str", default, help, tuple(flags)),
                    st.from_regex("[a-z][a-z_]{0,8}", fullmatch=True), values, words, st.lists(words, max_size=2))


implied = st.dictionaries(words, st.one_of(st.booleans(), st.integers(-10**6, 10**6), words), max_size=2)


@given(words, st.lists(options, max_size=3, unique_by=lambda o: o.name), st.lists(words, max_size=2), implied,
       st.dictionaries(words, words, max_size=2))
def test_a_manifest_survives_its_toml(summary, found, provides, implies, precision):
    one = Manifest("p", "m:C", summary, 1, (Offer("reward", "x", "f"),), {o.name: o for o in found}, tuple(provides),
                   implies=implies, precision=precision)
    assert of_toml(to_toml(one)) == one


@pytest.mark.parametrize("project", sorted(Path(__file__).parents[3].glob("plugins/miles-*")),
                         ids=lambda path: path.name)
def test_the_manifests_of_the_official_plugins_are_what_their_code_says(project):
    package = project.name.replace("-", "_")
    folder = project / "src" / package
    name = project.name.removeprefix("miles-")
    fresh = of_source(folder / "plugin.py", name=name, module=f"{package}.plugin")
    assert of_toml((folder / manifest.FILE).read_text()) == fresh
