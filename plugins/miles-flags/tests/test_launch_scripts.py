"""Launch scripts of today's Miles and slime plan untouched, or are refused for a reason that the page counts."""

import subprocess
import sys
from pathlib import Path

import pytest

from miles_core.cli.run import SCRIPTS
from miles_core.errors import MilesError
from miles_core.plugins.plan import prepare

sys.path.insert(0, str(Path(__file__).parent / "launch_scripts"))
import carry_over

ROOT = Path(__file__).parents[3]
ALL = {f"{repository}/{path}": words for repository, path, words in carry_over.scripts()}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """The tokenizer of the arithmetic example."""
    folder = tmp_path_factory.mktemp("tokenizer")
    subprocess.run([sys.executable, ROOT / "examples/arithmetic/make_tokenizer.py", folder], check=True)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("script", ALL)
def test_a_launch_script_plans_untouched_or_is_refused_as_the_page_says(script, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, *words = ALL[script]
    argv = [*SCRIPTS[program], *carry_over.argv(words, tmp_path, tokenizer),
            "--engine", "sglang", "--plan-without-weights"]
    reason = carry_over.refused().get(script)
    if reason is None:
        assert prepare(None, argv).config.rollout.engine == "sglang"
        return
    with pytest.raises(MilesError) as caught:
        prepare(None, argv)
    assert reason["says"] in str(caught.value)


def test_every_refused_script_is_one_that_is_recorded():
    assert set(carry_over.refused()) <= set(ALL)


def test_the_page_counts_them():
    page = (ROOT / "docs" / "coming-from-miles.md").read_text(encoding="utf-8")
    assert page.count("<!-- launch scripts -->") == 1
    assert page == carry_over.page(page), "python plugins/miles-flags/tests/launch_scripts/carry_over.py docs/..."
