"""What authors of plugins get wrong and pluggy says nothing of: each is an error of its own, before anything runs.

The rows are those of a table of pluggy's silences: what it does there is told by `SILENT`, where pluggy can be asked.
Each error names plugin, version, hook and definition, and says what to do.
"""

from __future__ import annotations

import copy
import pickle
import re
import textwrap

import pluggy
import pytest

from miles_core import hookspecs
from miles_core.config.tables import RunConfig
from miles_core.errors import HookError, MilesError, OwnerError
from miles_core.hookspecs import hookimpl
from miles_core.plugins import bind, resolve, select
from tests.unit.plugins.installed import install

HEAD = """import pluggy
from miles_core import hookimpl
from miles_core.types import Drop, Group, Sample

class Wrong:
"""
GOOD = "@hookimpl\ndef finish(self):\n    pass\n"


@pytest.fixture
def plugin(tmp_path):
    """(source of a class body, name="wrong", head) -> the selected plugin."""

    def write(body, name="wrong", head=HEAD):
        path = tmp_path / f"{name}.py"
        path.write_text(head + textwrap.indent(body, "    ") + "\n")
        return select.select([(str(path), "--plugin")], [])

    return write


def bound(selected, role="rollout"):
    return bind.bind(selected, RunConfig(options={one.manifest.name: {} for one in selected}), role)


OTHER = 'hookimpl = pluggy.HookimplMarker("{0}")\n'
MISTAKES = {
    "misspelt hook": ("@hookimpl\ndef filter_gruop(self, group):\n    return group", "filter_gruop", 7,
                      "which is not a hook", "did you mean 'filter_group'"),
    "forgotten marker": (GOOD + "def filter_group(self, group):\n    return group", "filter_group", 9,
                         "no @hookimpl", "mark it"),
    "wrapper": ("@hookimpl(wrapper=True)\ndef filter_group(self, group):\n    yield", "filter_group", 7,
                "wrapper", "order of the run file"),
    "old-style wrapper": ("@hookimpl(hookwrapper=True)\ndef filter_group(self, group):\n    yield", "filter_group", 7,
                          "hookwrapper", "order of the run file"),
    "tryfirst": ("@hookimpl(tryfirst=True)\ndef filter_group(self, group):\n    return group", "filter_group", 7,
                 "tryfirst", "order of the run file"),
    "generator without wrapper": ("@hookimpl\ndef train_step(self, proceed):\n    yield", "train_step", 7,
                                  "it has a yield", "calls `proceed`"),
    "no return": ("@hookimpl\ndef microbatch(self, proceed, packed):\n    proceed(packed)", "microbatch", 7,
                  "returns None whatever it is given", "return torch.Tensor"),
    "default": ("@hookimpl\ndef filter_group(self, group=None):\n    return group", "filter_group", 7,
                "defaults or are keyword-only", "take plain arguments"),
    "unknown argument": ("@hookimpl\ndef filter_group(self, groop):\n    return groop", "filter_group", 7,
                         "it takes 'groop'", "filter_group has: group"),
    "unknown argument with a default": ("@hookimpl\ndef filter_group(self, group, cfg=None):\n    return group",
                                        "filter_group", 7, "it takes 'cfg'", "filter_group has: group"),
    "keyword-only": ("@hookimpl\ndef filter_group(self, *, group):\n    return group", "filter_group", 7,
                     "keyword-only", "take plain arguments"),
    "async where plain": ("@hookimpl\nasync def filter_group(self, group):\n    return group", "filter_group", 7,
                          "is not async and this is", "write def"),
    "plain where async": ("@hookimpl(name='g')\ndef generate(self, prompt, generation):\n    return []", "generate", 7,
                          "is async and this is not", "write async def"),
    "async generator": ("@hookimpl(name='g')\nasync def generate(self, prompt):\n    yield 1", "generate", 7,
                        "is async and this is not|yield", "write async def|return"),
    "no method of an instance": ("@staticmethod\n@hookimpl\ndef filter_group(group):\n    return group",
                                 "filter_group", 8, "no method of an instance", "self"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_refused_with_plugin_version_hook_definition_and_remedy(case, plugin):
    body, hook, line, words, remedy = MISTAKES[case]
    selected = plugin(body)
    with pytest.raises(HookError, match=words) as caught:
        bound(selected)
    _complete(caught.value, selected[0], hook, line, remedy)


@pytest.mark.parametrize("project", ["pytest", "miles"])
def test_a_marker_that_is_not_ours_is_refused(project, plugin):
    """The name in the source is the same, so that only the object tells."""
    head = HEAD.replace("\nclass", OTHER.format(project) + "\nclass")
    selected = plugin("@hookimpl\ndef filter_group(self, group):\n    return group", head=head)
    with pytest.raises(HookError, match=f"pluggy's for '{project}', not miles_core.hookimpl") as caught:
        bound(selected)
    _complete(caught.value, selected[0], "filter_group", 8, "miles_core.hookimpl")


def test_a_marker_forgotten_in_a_base_class_is_found(plugin):
    head = HEAD.replace("class Wrong:", "class Base:\n    def filter_group(self, group):\n        return group\n\n"
                                        "class Wrong(Base):")
    with pytest.raises(HookError, match=r"hook filter_group, .*:6 Base\.filter_group.*no @hookimpl"):
        bound(plugin(GOOD, head=head))


def _complete(error, one, hook, line, remedy):
    assert f"plugin wrong {one.version}, hook {hook}, " in error.who
    assert re.search(rf"wrong\.py:{line} Wrong\.\w+$", error.who), error.who
    assert re.search(remedy, error.fix), error.fix


def test_misspelt_hooks_are_found_before_anything_is_imported_too(plugin):
    selected = plugin("raise SystemExit\n@hookimpl\ndef filter_gruop(self, group):\n    return group")
    with pytest.raises(HookError, match=r"hook filter_gruop, .*wrong\.py:8 .*did you mean 'filter_group'"):
        resolve.resolve(selected, RunConfig())


def test_two_owners_of_one_part_are_both_named_with_their_definitions(plugin):
    body = "@hookimpl(name='same')\ndef advantage(self, batch):\n    return []"
    selected = plugin(body) + plugin(body, "other")
    with pytest.raises(OwnerError, match="two plugins offer the advantage 'same': wrong and other") as caught:
        resolve.resolve(selected, RunConfig())
    for one in selected:
        assert f"plugin {one.manifest.name} {one.version}, hook advantage, " in caught.value.who
        assert f"{one.manifest.name}.py:7 Wrong.advantage" in caught.value.who
    assert "rename" in caught.value.fix


@pytest.mark.parametrize(("hook", "arguments", "given", "role"), [
    ("filter_group", "self, group", ("group",), "rollout"), ("loss_terms", "self, inputs", (1,), "trainer"),
    ("columns", "self", (), "rollout"), ("train_step", "self, proceed, access", (lambda: {}, None), "trainer"),
])  # fmt: skip
def test_a_path_without_return_is_an_error_when_it_is_taken(hook, arguments, given, role, plugin):
    """pluggy's new-style wrappers turn the result into None."""
    selected = plugin(f"@hookimpl\ndef {hook}({arguments}):\n    if self is None:\n        return {{}}")
    with pytest.raises(HookError, match="without `return`") as caught:
        getattr(bound(selected, role), hook)(*given)
    _complete(caught.value, selected[0], hook, 7, "return")


def test_an_exception_carries_plugin_version_definition_and_hook(plugin):
    selected = plugin("@hookimpl\ndef filter_group(self, group):\n    return {}[group]")
    with pytest.raises(KeyError) as caught:
        bound(selected).filter_group("x")
    note, = caught.value.__notes__
    assert re.fullmatch(rf"in plugin wrong {selected[0].version}, .*wrong\.py:\d Wrong\.filter_group \(file\), "
                        "hook filter_group", note)


@pytest.mark.parametrize("given", [([1], 0, "more"), ([1],)])
def test_a_caller_cannot_pass_what_the_hook_does_not_have(given, plugin):
    """pluggy ignores an argument that the specification lacks; here the callable has the hook's own signature."""
    hooks = bound(plugin("@hookimpl\ndef select_from_buffer(self, groups):\n    return groups"))
    assert hooks.select_from_buffer([1], 0) == [1]
    with pytest.raises(TypeError, match=r"select_from_buffer\(\)"):
        hooks.select_from_buffer(*given)


def test_each_of_two_implementations_gets_what_the_one_before_returned(plugin):
    """pluggy gives all of them the same object and collects the results."""
    body = "@hookimpl\ndef filter_group(self, group):\n    return [*group, '{0}']"
    given = []
    assert bound(plugin(body.format("a")) + plugin(body.format("b"), "other")).filter_group(given) == ["a", "b"]
    assert given == []


def test_one_name_in_two_distributions_is_told_with_both(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "twin")
    install(tmp_path, "twin", distribution="other-twin", version="2.0")
    with pytest.raises(OwnerError, match=r"'twin' is in 2 distributions: miles-twin 1.0, other-twin 2.0.*uninstall"):
        select.select([("twin", "--plugin")], [])


@pytest.mark.parametrize("send", [pickle.dumps, copy.deepcopy, copy.copy])
@pytest.mark.parametrize("empty", [True, False])
def test_bound_hooks_are_never_sent_anywhere(send, empty, plugin):
    """An empty manager of pluggy pickles, and one in use does not: here neither does, and what is selected does."""
    selected = [] if empty else plugin(GOOD)
    with pytest.raises(HookError, match=r"\[hooks-not-picklable\]"):
        send(bound(selected))
    assert pickle.loads(pickle.dumps(selected)) == selected


def test_pluggy_is_silent_where_we_are_not():
    """The reason for this file; where a release of pluggy begins to speak, its row says more than it needs to."""
    spec, impl = pluggy.HookspecMarker("x"), pluggy.HookimplMarker("x")

    class Specs:
        @spec(firstresult=True)
        def loss(self, value):
            """One result."""

    class One:
        @impl
        def loss(self, value, cfg=None):
            return 1

        @impl
        def lsos(self, value):
            return 1

    class Two:
        @impl
        def loss(self, value: str) -> bytes:
            return 2

    class Forgot:
        def loss(self, value):
            return 3

    manager = pluggy.PluginManager("x")
    manager.add_hookspecs(Specs)
    for kind in (One, Two, Forgot):
        manager.register(kind())
    assert manager.hook.loss(value=0) == 2, "the last owner wins, and nothing was said of the rest"


@pytest.mark.parametrize("fits", [
    "def filter_group(self, group: Group) -> Group | Drop:\n    return group",
    "def filter_group(self, group: 'Group') -> 'Group':\n    return group",
    "def filter_group(self, group: object) -> Kept:\n    return group",
    "def shape_rewards(self, groups: list) -> list[Group]:\n    return groups",
    "def reduction(self, samples: list[Sample]):\n    raise NotImplementedError",
    "def columns(self):\n    yield from ()",
    "def export_weights(self, stream):\n    yield from stream",
    "def metrics(self, rollout_id: int, values: dict) -> None:\n    print(values)",
])  # fmt: skip
def test_what_is_right_is_left_alone(fits, plugin):
    bound(plugin("@hookimpl\n" + fits, head="from __future__ import annotations\n" + HEAD))


def test_every_error_of_an_author_is_one_of_ours():
    assert issubclass(HookError, MilesError) and hookimpl is hookspecs.hookimpl
