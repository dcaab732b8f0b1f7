"""Bind: implementations are checked against their hooks, and called as plain functions in the order of the run."""

import pytest

from miles_core.config.tables import RunConfig
from miles_core.errors import HookError, ManifestError, OwnerError, PluginError, UnknownPluginError
from miles_core.plugins import bind, resolve, select
from miles_core.types import Drop

HEAD = "from miles_core import hookimpl\nfrom miles_core.types import Drop\n"


@pytest.fixture
def plugins(tmp_path):
    """(name=source of a class body, ...) -> the selected plugins, in that order."""

    def write(**bodies):
        paths = []
        for name, body in bodies.items():
            path = tmp_path / f"{name}.py"
            lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
            path.write_text(HEAD + f"class {name.title()}:\n" + lines)
            paths.append((str(path), "--plugin"))
        return select.select(paths, [])

    return write


def bound(selected, role="rollout"):
    return bind.bind(selected, RunConfig(options={one.manifest.name: {} for one in selected}), role)


ADD = "@hookimpl\ndef filter_group(self, group):\n    return group + ['{0}']"


def test_a_chain_runs_in_the_order_written_and_stops_at_a_drop(plugins):
    drop = "@hookimpl\ndef filter_group(self, group):\n    return Drop('no') if 'b' in group else group"
    hooks = bound(plugins(b=ADD.format("b"), a=ADD.format("a")))
    assert hooks.filter_group([]) == ["b", "a"]
    hooks = bound(plugins(b=ADD.format("b"), c=drop, d=ADD.format("d")))
    assert hooks.filter_group([]) == Drop("no")
    with pytest.raises(PluginError, match="empty.*None"):
        bound(plugins(empty="@hookimpl\ndef filter_group(self, group):\n    pass")).filter_group([])


def test_a_chain_of_lists_gives_what_was_in_them(plugins):
    names = "@hookimpl\ndef shape_rewards(self, groups):\n    return [str(group) for group in groups]"
    with pytest.raises(HookError) as caught:
        bound(plugins(names=names), "rollout").shape_rewards([1.0, 2.0])
    assert (caught.value.code, caught.value.got) == ("filter-returned-other-type", "str")
    assert "names" in str(caught.value.who)


def test_nobody_implements_means_none_and_names_are_a_dict(plugins):
    hooks = bound(plugins(a="@hookimpl('reward', name='x')\ndef f(self, sample):\n    return 1.0"))
    assert hooks.filter_group is None and hooks.generate_request is None and set(hooks.reward) == {"x"}
    with pytest.raises(HookError, match="frozen"):
        hooks.filter_group = print


def test_around_wraps_in_order_the_first_plugin_outermost(plugins):
    body = "@hookimpl\ndef microbatch(self, proceed, packed):\n    return '{0}(' + proceed(packed + '{0}') + ')'"
    hooks = bound(plugins(a=body.format("a"), b=body.format("b")), "trainer")
    assert hooks.microbatch(lambda packed: f"<{packed}>", "", "actor") == "a(b(<ab>))"


def test_what_has_nothing_to_change_proceeds_without_arguments_through_several_plugins(plugins):
    """One plugin's critic and another's weights wrap the same step."""
    body = "@hookimpl\ndef train_step(self, proceed, access):\n    return {{**proceed(), '{0}': access}}"
    hooks = bound(plugins(a=body.format("a"), b=body.format("b")), "trainer")
    assert hooks.train_step(lambda: {"step": 0}, 7) == {"step": 0, "a": 7, "b": 7}


def test_gathered_keys_have_one_owner(plugins):
    body = "@hookimpl\ndef loss_terms(self, inputs):\n    return {'kl': (1.0, inputs)}"
    with pytest.raises(OwnerError, match=r"a and b .*'kl' from loss_terms.*\[hook-keys-clash\]"):
        bound(plugins(a=body, b=body), "trainer").loss_terms(1.0)


def test_each_role_has_an_instance_of_its_own(plugins):
    selected = plugins(a="def __init__(self):\n    self.seen = []\n"
                         "@hookimpl\ndef filter_group(self, group):\n    return group\n"
                         "@hookimpl\ndef loss_terms(self, inputs):\n    return {}")
    rollout, trainer = bound(selected), bound(selected, "trainer")
    rollout.instances["a"].seen.append(1)
    assert trainer.instances["a"].seen == [] and trainer.filter_group is None and rollout.loss_terms is None
    bind.check_roles_apart([rollout, trainer])


def test_what_roles_may_share_is_told_by_whole_module_names():
    import logging
    import re

    kind = type("Memory", (), {"__module__": "research.memory"})
    assert bind._mutable(kind()) and bind._mutable(([],)) and bind._mutable({})
    harmless = (re.compile("x"), logging.getLogger("x"), (1, "a"), frozenset({2}), None)
    assert not any(map(bind._mutable, harmless))


WRONG = {
    "there is no marker": ("def filter_group(self, group):\n    return group\n@hookimpl\ndef finish(self):\n    pass",
                           HookError, "no @hookimpl"),
    "an unknown argument": ("@hookimpl\ndef filter_group(self, groop):\n    return groop", HookError, "groop"),
    "a default": ("@hookimpl\ndef filter_group(self, group=None):\n    return group",
                  HookError, "defaults or are keyword-only"),
    "keyword-only": ("@hookimpl\ndef filter_group(self, *, group):\n    return group", HookError, "keyword-only"),
    "tryfirst": ("@hookimpl(tryfirst=True)\ndef filter_group(self, group):\n    return group",
                 HookError, "order of the run file"),
    "a wrapper": ("@hookimpl(wrapper=True)\ndef filter_group(self, group):\n    yield",
                  HookError, "order of the run file"),
    "not async": ("@hookimpl(name='g')\ndef generate(self, prompt, generation):\n    return []",
                  HookError, "is async and this is not"),
    "async": ("@hookimpl\nasync def filter_group(self, group):\n    return group",
              HookError, "is not async and this is"),
    "a scorer of nothing": ("@hookimpl('reward', name='r')\ndef f(self):\n    return 1.0", HookError, "takes `sample`"),
    "a constructor that wants more": ("def __init__(self, magic):\n    pass\n@hookimpl\ndef finish(self):\n    pass",
                                      HookError, "magic"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_authors_mistake_is_refused_at_registration_with_plugin_and_remedy(case, plugins):
    body, error, message = WRONG[case]
    with pytest.raises(error, match=message) as caught:
        bound(plugins(wrong=body))
    assert "wrong" in str(caught.value).lower()


def test_a_misspelt_hook_is_refused_before_anything_is_imported(plugins):
    selected = plugins(a="@hookimpl\ndef filter_gruop(self, group):\n    return group")
    with pytest.raises(HookError, match="did you mean 'filter_group'"):
        resolve.resolve(selected, RunConfig())


def test_an_error_inside_a_hook_carries_plugin_and_hook(plugins):
    hooks = bound(plugins(a="@hookimpl\ndef loss_terms(self, inputs):\n    return {}[inputs]"), "trainer")
    with pytest.raises(KeyError) as caught:
        hooks.loss_terms("x")
    assert any("plugin a" in note and "hook loss_terms" in note for note in caught.value.__notes__)


def test_a_broken_import_names_plugin_and_cause(plugins, tmp_path):
    selected = plugins(a="import nowhere_to_be_found\n@hookimpl\ndef finish(self):\n    pass")
    with pytest.raises(PluginError, match="'a' cannot be imported.*nowhere_to_be_found"):
        bound(selected)


@pytest.mark.parametrize(("name", "message"), [("grpoo", "did you mean 'grpo'"), ("zzz", "unknown plugin 'zzz'"),
                                               ("./missing.py", "cannot be read")])
def test_a_plugin_that_is_not_there_says_what_is(name, message):
    with pytest.raises((UnknownPluginError, ManifestError), match=message):
        select.select([(name, "--plugin")], [])


@pytest.mark.parametrize("spelling", ["grpo", "miles-grpo", "miles-plugin-grpo", "miles-grpo:grpo"])
def test_every_spelling_names_the_same_plugin(spelling):
    [one] = select.select([(spelling, "--plugin")], [])
    assert one.manifest.name == "grpo" and one.source == "miles-grpo"


def test_a_plugin_named_twice_is_an_error_that_names_both():
    with pytest.raises(OwnerError, match=r"miles-grpo \(a\) and miles-grpo \(b\)"):
        select.select([("grpo", "a"), ("grpo", "b")], [])
