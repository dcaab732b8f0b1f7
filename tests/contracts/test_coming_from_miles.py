"""Words of older times: each gets an answer that names what to write, and the page shows these answers."""

import json

import pytest
from click.testing import CliRunner
from miles_compat.tables import answer, old_words, written
from source import ROOT

from miles_core.cli import cli

WORDS = {word: says for words in old_words().values() for word, says in words.items()}
SMALLEST = ["--hf-checkpoint", "later/tiny", "--prompt-data", "data/train.jsonl", "--label-key", "label", "--rm-type",
            "math", "--rollout-batch-size", "32", "--n-samples-per-prompt", "8", "--num-rollout", "10", "--plan"]


@pytest.mark.parametrize("word", WORDS)
def test_an_old_word_says_what_to_write(word):
    assert WORDS[word] in answer(word)


@pytest.mark.parametrize("script", [word for word in WORDS if word.endswith(".py")])
def test_a_script_is_taken(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["run", script, *SMALLEST, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["options"]["rollout.max_lag"] == (1 if script == "train_async.py" else 0)


def test_the_page_shows_the_answers():
    page = (ROOT / "docs" / "coming-from-miles.md").read_text(encoding="utf-8")
    assert page.count("<!-- table: ") == 1
    assert page == written(page), "run python -m miles_compat.tables docs/coming-from-miles.md"
