"""What a run enables: names in every spelling, presets, --no-plugin; and what each mistake is answered with."""

from __future__ import annotations

import sys

import pytest

from miles_core.config import load
from miles_core.errors import ConfigError, ManifestError, MilesError, OwnerError, UnknownPluginError
from miles_core.plugins import presets, select
from miles_core.plugins.plan import prepare
from tests.unit.plugins.installed import BODY, install

BASE = ["--hf-checkpoint", "x", "--prompt-data", "y", "--rollout-batch-size", "2", "--num-rollout", "1"]
DAPO = {"wide": {"plugins": ["two", "one"], "values": {"one.width": 9, "rollout.rollout_seed": 5}}}


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A site folder that Python sees."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def two(site):
    """The plugins one, which offers a preset, two, one that claims a flag of Miles, and one of a later Miles."""
    install(site, "one", stated={"presets": DAPO})
    install(site, "two", distribution="miles-plugin-two")
    install(site, "tracker", body=BODY.replace('"How wide.")', '"How wide.", flags=("--dumper-enable",))'))
    install(site, "ahead", core=">=9.9")


def enabled(*flags: str, run_file=None) -> list[str]:
    """What takes part, less grpo, which the default estimator brings."""
    plan = prepare(run_file, [*BASE, "--rm-type", "one-reward", *flags])
    return [one.manifest.name for one in plan.selected if not one.ours and one.manifest.name != "grpo"]


def test_a_plugin_whose_parts_no_option_names_is_announced(two):
    def unused(*flags):
        notes = prepare(None, [*BASE, "--plugin", "one", *flags]).notes
        return [note for note in notes if "rollout.rm_type" in note and "one-reward" in note and "plugin one" in note]

    assert len(unused("--rm-type", "math")) == 1
    assert not unused("--rm-type", "math", "one-reward") and not unused("--rm-type", "one-reward")
    assert not any("gspo" in note for note in prepare(None, [*BASE, "--advantage-estimator", "gspo", "--rm-type",
                                                             "math"]).notes)


@pytest.mark.parametrize("words", ["one", "miles-one", "miles-plugin-one", "miles-one:one"])
def test_a_plugin_is_named_in_any_spelling(two, words):
    assert enabled("--plugin", words)[0] == "one"


def test_a_plugin_of_every_run_may_be_named_and_then_stands_where_it_is_named(two):
    plan = prepare(None, [*BASE, "--rm-type", "one-reward", "--plugin", "one", "--plugin", "report"])
    names = [one.manifest.name for one in plan.selected]
    assert names.count("report") == 1 and names.index("report") > names.index("one")


def test_a_preset_enables_its_plugins_in_its_order_and_the_plan_says_whose_values_they_are(two):
    plan = prepare(None, [*BASE, "--rm-type", "one-reward", "--preset", "wide"])
    assert [one.manifest.name for one in plan.selected if not one.ours][:2] == ["two", "one"]
    text = plan.to_text()
    assert "one.width = 9  (preset wide of plugin one)" in text and "(preset wide of plugin one)" in text
    assert plan.config.rollout.rollout_seed == 5


def test_run_file_and_flags_overrule_a_preset(two, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('presets = ["wide"]\n[rollout]\nrollout_seed = 6\n')
    plan = prepare(path, [*BASE, "--rm-type", "one-reward", "--one.width", "4"])
    assert plan.config.rollout.rollout_seed == 6 and plan.config.options["one"]["width"] == 4


def test_no_plugin_takes_one_out_of_a_preset_with_its_values(two):
    assert enabled("--preset", "wide", "--no-plugin", "miles-two") == ["one"]
    plan = prepare(None, [*BASE, "--preset", "wide", "--no-plugin", "one", "--rm-type", "two-reward"])
    assert "one" not in plan.config.options and plan.config.rollout.rollout_seed == 5


def test_the_preset_of_an_official_plugin_is_printed_written_out():
    text = prepare(None, [*BASE, "--rm-type", "math", "--label-key", "label", "--preset", "dapo"]).to_text()
    for words in ("grpo          miles-grpo", "dapo-filter   miles-dapo-filter", "algorithm.eps_clip_high = 0.28"):
        line = next(line for line in text.splitlines() if words in line)
        assert line.endswith("(preset dapo of plugin dapo-filter)"), line


def test_a_preset_and_parts_of_official_plugins_that_are_not_installed_say_what_pip_has_to_do(monkeypatch):
    rooms = [one for one in select.installed() if one.name in select.DEFAULTS]
    for module in (select, load):
        monkeypatch.setattr(module, "installed", lambda: rooms)
    monkeypatch.setattr(presets, "readable", list)
    for flags, words in (
        (["--preset", "dapo"], "unknown preset 'dapo'.*pip install miles-dapo-filter"),
        (["--plugin", "gspo"], "plugin 'gspo' is not installed.*pip install miles-gspo"),
        (["--advantage-estimator", "gspo"], "plugin 'gspo' is not installed.*pip install miles-gspo"),
        (["--rm-type", "math"], "'math', 'grpo' are not installed.*pip install miles-math miles-grpo;"),
        (["--use-tis"], "plugin 'tis' is not installed.*pip install miles-tis"),
        (["--advantage-estimator", "mine", "--tis.tis-clip", "3"],
         r"plugin 'tis', which is not enabled.*--plugin tis \(pip install miles-tis\)"),
    ):  # fmt: skip
        with pytest.raises(MilesError, match=words):
            prepare(None, [*BASE, *flags])


def test_a_plugin_of_a_preset_that_is_named_too_stands_where_it_is_named(two):
    assert enabled("--preset", "wide", "--plugin", "two")[:2] == ["one", "two"]


@pytest.mark.parametrize(("flags", "kind", "message"), [
    (["--preset", "wode"], ConfigError, "unknown preset 'wode'.*there are .*wide.*did you mean 'wide'"),
    (["--plugin", "one", "--no-plugin", "two"], UnknownPluginError, "'two' is not enabled.*enabled: one"),
    (["--plugin", "one", "--no-plugin", "megatron"], OwnerError, r"'megatron'.*\[core-part-not-removable\]"),
    (["--plugin", "oen"], UnknownPluginError, r"unknown plugin 'oen'\. Fix: did you mean 'one'"),
    (["--plugin", "one", "--plugin", "one"], OwnerError, "two plugins are called 'one'"),
    (["--plugin", "one", "--two.width", "3"], ConfigError, "belongs to plugin 'two', which is not enabled.*add"),
    (["--plugin", "one,two"], UnknownPluginError, "unknown plugin 'one,two'.*leave spaces between names"),
    (["--plugin", "wrong:tis"], UnknownPluginError, "unknown plugin 'wrong:tis'.*did you mean 'tis'"),
    (["--plugin", "one", "--plugin"], ConfigError, "--plugin needs a name.*write --plugin NAME"),
    (["--plugins", "one"], ConfigError, "unknown flag --plugins.*did you mean --plugin"),
    (["--rm-type", "two-reward"], OwnerError, "rm_type.*add --plugin two"),
    (["--plugin", "one", "--dumper-enable"], ConfigError, "--dumper-enable belongs to.* 'tracker'.*--plugin tracker"),
    (["--plugin", "ahead"], ManifestError, "miles-ahead 1.0: .*miles-core>=9.9.*0.1.0"),
])  # fmt: skip
def test_each_mistake_is_answered(two, flags, kind, message):
    with pytest.raises(kind, match=message):
        enabled(*flags)


def test_two_plugins_that_offer_one_preset_are_both_named(two, site):
    install(site, "three", stated={"presets": DAPO})
    with pytest.raises(OwnerError, match="preset 'wide': .*three.*one|preset 'wide': .*one.*three"):
        enabled("--preset", "wide")


def test_a_preset_that_cannot_be_read_names_its_plugin(site):
    install(site, "one", stated={"presets": {"odd": {"plugin": "x"}}})
    with pytest.raises(ConfigError, match=r"preset 'odd' of plugin 'one'.*\[preset-unreadable\]"):
        enabled("--preset", "odd")


def test_a_name_in_two_distributions_is_told_apart_by_its_distribution(site):
    install(site, "one")
    install(site, "one", distribution="other-one", version="2.0")
    with pytest.raises(OwnerError, match="in 2 distributions: .*miles-one 1.0.*other-one 2.0"):
        enabled("--plugin", "one")
    assert enabled("--plugin", "other-one:one") == ["one"]


def test_what_is_installed_and_not_named_never_runs(site, tmp_path):
    trace = tmp_path / "trace"
    install(site, "one")
    install(site, "hostile", code=f"open({str(trace)!r}, 'w').close()\n")
    install(site, "broken", manifest=False)
    assert enabled("--plugin", "one") == ["one"]
    assert not trace.exists() and "miles_hostile" not in sys.modules
    with pytest.raises(ManifestError, match="'broken' has no manifest"):
        enabled("--plugin", "broken")
