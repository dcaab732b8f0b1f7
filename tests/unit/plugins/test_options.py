"""Options of plugins: names of one plugin are nobody else's, and a further flag of two owners is an error."""

from __future__ import annotations

import os

import pytest

from miles_core.errors import ManifestError, OwnerError
from miles_core.plugins import bind
from miles_core.plugins.manifest import FILE
from miles_core.plugins.plan import prepare
from tests.unit.plugins.installed import BODY, install

RUN = ["--hf-checkpoint", "x", "--prompt-data", "y", "--rollout-batch-size", "2", "--num-rollout", "1",
       "--rm-type", "one-reward", "--plugin", "one", "two"]  # fmt: skip


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_an_option_of_two_plugins_is_one_of_each(site):
    for name in ("one", "two"):
        install(site, name)
    plan = prepare(None, [*RUN, "--one.width", "5", "--two.width", "7"])
    assert [plan.config.options[name]["width"] for name in ("one", "two")] == [5, 7]


def test_a_further_flag_of_two_plugins_names_both(site):
    for name in ("one", "two"):
        install(site, name, body=BODY.replace('"How wide."', '"How wide.", flags=("--wide",)'))
    with pytest.raises(OwnerError, match=r"--wide .* one\.width and by two\.width.*rename.*\[flag-owned-twice\]"):
        prepare(None, [*RUN, "--wide", "5"])


EDITS = {"default": ('option(3, ', 'option(5, '), "name": ("width:", "breadth:"),
         "type": ("width: int", "width: float"), "flag": ('"How wide."', '"How wide.", flags=("--wide",)')}


@pytest.mark.parametrize("edit", EDITS)
def test_options_that_are_not_those_of_the_manifest_are_refused_before_the_plugin_is_made(site, edit):
    source = install(site, f"one-{edit}") / "plugin.py"
    source.write_text(source.read_text().replace(*EDITS[edit]))
    plan = prepare(None, [*RUN[:-4], f"one-{edit}-reward", "--plugin", f"one-{edit}", f"--one-{edit}.width", "3"])
    with pytest.raises(ManifestError, match="option width: int = 3 in the manifest") as caught:
        bind.bind(plan.selected, plan.config, "rollout")
    assert "manifest --write" in caught.value.fix and f"one-{edit}" in str(caught.value)


def test_an_edited_checkout_is_read_itself(site):
    folder = install(site, "three", editable=True)
    run = [*RUN[:-4], "three-reward", "--plugin", "three"]
    (folder / "plugin.py").write_text((folder / "plugin.py").read_text().replace("option(3, ", "option(5, "))
    os.utime(folder / FILE, (1, 1))
    plan = prepare(None, run)
    assert dict(plan.to_json()["options"])["three.width"] == 5
    assert bind.bind(plan.selected, plan.config, "rollout").instances["three"].options.width == 5
    os.utime(folder / "plugin.py", (0, 0))  # as if the manifest were the newer one: bound, it is looked at all the same
    plan = prepare(None, run)
    with pytest.raises(ManifestError, match="option width: int = 3 in the manifest, int = 5 in the code"):
        bind.bind(plan.selected, plan.config, "rollout")
