"""What a plan says before anything is imported: who enables the plugin, what it refuses, when it has nothing to do."""

import pytest

from miles_core.errors import ConfigError, OwnerError
from miles_core.plugins.plan import prepare

TURNS = """from miles_core import hookimpl
class Turns:
    PROVIDES
    @hookimpl(name="turns")
    async def generate(self, prompt, generation):
        return []
"""

RUN = ["--hf-checkpoint", "nowhere", "--prompt-data", "data/p.jsonl", "--num-rollout", "1", "--rollout-batch-size", "4",
       "--n-samples-per-prompt", "2", "--plugin", "grpo"]
OVER = ["--over-sampling-batch-size", "8"]


def plan(*flags):
    return prepare(None, [*RUN, *flags])


def notes(*flags):
    return [note for note in plan(*flags).notes if "nothing to keep" in note]


@pytest.mark.parametrize("flags", [["--partial-rollout"], ["--plugin", "partial-rollout"],
                                   ["--mask-offpolicy-in-partial-rollout"]], ids=" ".join)
def test_the_flags_of_launch_scripts_enable_it(flags):
    found = plan(*flags, *OVER)
    assert "partial-rollout" in [one.manifest.name for one in found.selected]
    masks = found.config.options["partial-rollout"].get("mask_offpolicy_in_partial_rollout", False)
    assert masks == flags[0].startswith("--mask")


def test_without_the_flag_it_takes_no_part():
    assert "partial-rollout" not in [one.manifest.name for one in plan(*OVER).selected]


def test_a_generator_that_cannot_go_on_is_refused(tmp_path):
    plugin = tmp_path / "turns.py"
    flags = ["--plugin", str(plugin), "--generate", "turns", "--partial-rollout", *OVER]
    plugin.write_text(TURNS.replace("PROVIDES", ""))
    with pytest.raises(OwnerError, match=r"partial-rollout: .*'turns'.*\[generator-cannot-continue\]"):
        plan(*flags)
    plugin.write_text(TURNS.replace("PROVIDES", 'provides = ("resumes:turns",)'))
    assert plan(*flags).owner("generate").name == "turns"


@pytest.mark.parametrize("flags", [[], ["--max-lag", "2"], ["--pause-generation-mode", "abort"]], ids=" ".join)
def test_a_run_that_never_calls_a_group_back_is_told(flags):
    assert len(notes("--partial-rollout", *flags)) == 1


@pytest.mark.parametrize("flags", [OVER, ["--max-lag", "1", "--batch-order", "window"],
                                   ["--max-lag", "1", "--pause-generation-mode", "abort"]], ids=" ".join)
def test_a_run_that_does_is_not(flags):
    assert notes("--partial-rollout", *flags) == []


def test_an_order_that_nobody_knows_is_refused():
    with pytest.raises(ConfigError, match="stalest"):
        plan("--partial-rollout", "--partial-rollout.order", "newest", *OVER)
