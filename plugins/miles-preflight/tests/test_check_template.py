"""miles check-template: a sound template passes, a broken one is shown where it breaks, bad input has a sentence."""

from __future__ import annotations

import json

import pytest
from miles_preflight.commands.check_template import Check

from miles_core.errors import DataError

TURN = "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}"
STRIPS = (
    "{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role == 'assistant' and not loop.last and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}" + TURN + "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Strips the reasoning of all turns but the last, as Qwen3's own template does."""

PLAIN = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
BOS = "<|endoftext|>"
ADDS_BOS = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {BOS: {"id": BOS, "ids": [256], "tokens": [BOS]}},
}


@pytest.fixture
def messages(tmp_path):
    """(anything) -> a JSON file that holds it."""

    def write(content: object):
        path = tmp_path / "messages.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def template(tmp_path, text):
    path = tmp_path / "template.jinja"
    path.write_text(text)
    return path


def test_the_example_s_template_passes(invoke, tokenizer_dir):
    result = invoke("check-template", tokenizer_dir)
    assert result.exit_code == 0, result.output
    assert "the template passes" in result.output
    assert "append-only: message 4" in result.output and "answer 2: begins with its prompt" in result.output


def test_a_template_that_strips_reasoning_is_not_append_only(invoke, tokenizer_dir, tmp_path):
    result = invoke("check-template", tokenizer_dir, "--chat-template-path", template(tmp_path, STRIPS))
    assert result.exit_code == 1
    assert "append-only: message 3: differs at token" in result.output
    assert "'<'" in result.output and "'4'" in result.output, "both tokens at the difference are shown"
    assert "Runs with one turn do not need" in result.output
    assert "note: differs" in result.output, "the whole conversation differs from the model's own, which is a note"
    assert "1 of 10 checks failed" in result.output


def test_it_passes_where_the_conversation_has_no_reasoning(invoke, tokenizer_dir, tmp_path, messages):
    given = ("--chat-template-path", template(tmp_path, STRIPS), "--messages", messages(PLAIN))
    result = invoke("check-template", tokenizer_dir, *given)
    assert result.exit_code == 0, result.output


def test_a_template_whose_opening_is_no_beginning(invoke, tokenizer_dir, tmp_path):
    text = STRIPS.replace("assistant\\n", "assistant:").replace("and not loop.last", "and false")
    result = invoke("check-template", tokenizer_dir, "--chat-template-path", template(tmp_path, text))
    assert result.exit_code == 1
    assert "answer 1: begins with its prompt: differs at token" in result.output
    assert "prompt: as the model's own: differs at token" in result.output


def test_a_bos_that_the_tokenizer_adds_to_text_is_a_note(invoke, changed_tokenizer, tokenizer_dir):
    own = json.loads((tokenizer_dir / "tokenizer_config.json").read_text())["chat_template"]
    folder = changed_tokenizer(ADDS_BOS, bos_token=BOS, chat_template="{{- bos_token }}" + own)
    result = invoke("check-template", folder)
    assert result.exit_code == 0, result.output
    assert "prompt: one BOS at most" in result.output
    assert "prompt: a plain call adds nothing: differs at token 1" in result.output
    assert "--apply-chat-template" in result.output


def test_a_bos_that_the_template_writes_twice_fails(invoke, changed_tokenizer, tokenizer_dir):
    own = json.loads((tokenizer_dir / "tokenizer_config.json").read_text())["chat_template"]
    folder = changed_tokenizer(bos_token=BOS, chat_template="{{- bos_token + bos_token }}" + own)
    result = invoke("check-template", folder)
    assert result.exit_code == 1
    assert "prompt: one BOS at most: differs at token 1" in result.output


def test_arguments_reach_the_template(invoke, tokenizer_dir, tmp_path):
    keeps = STRIPS.replace("and not loop.last", "and false")
    path = template(tmp_path, "{%- if refuse %}{{ raise_exception('refused') }}{%- endif %}" + keeps)
    given = ("check-template", tokenizer_dir, "--chat-template-path", path)
    assert invoke(*given).exit_code == 0
    with pytest.raises(DataError, match="refused"):
        invoke(*given, "--apply-chat-template-kwargs", '{"refuse": true}')


def test_no_template_is_an_error_that_says_what_to_do(call, changed_tokenizer):
    code, _, err = call("check-template", changed_tokenizer(chat_template=None))
    assert code == 2
    assert "has no chat template" in err and "--chat-template-path" in err


def test_no_tokenizer_is_an_error(call, tmp_path):
    (tmp_path / "empty").mkdir()
    code, _, err = call("check-template", tmp_path / "empty")
    assert code == 2 and "tokenizer cannot be loaded" in err


@pytest.mark.parametrize("content, words", [
    ("{", "not JSON"),
    ({}, "should be a list of messages"),
    ([], "should be a list of messages"),
    ([{"role": "user"}], "message 1 has no role or no content"),
    (["hello"], "message 1 has no role or no content"),
    ([{"role": "user", "content": "hello"}], "an answer of the assistant"),
    ([{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}], "an answer of the assistant"),
])  # fmt: skip
def test_malformed_messages(call, tokenizer_dir, messages, content, words):
    code, _, err = call("check-template", tokenizer_dir, "--messages", messages(content))
    assert code == 2
    assert words in err and "Fix: " in err


@pytest.mark.parametrize("left, right, whole, at", [
    ([1, 2], [1, 2], True, None),
    ([1, 2], [1, 2, 3], True, 2),
    ([1, 2], [1, 2, 3], False, None),
    ([1, 2, 3], [1, 2], False, 2),
    ([1, 5, 3], [1, 2, 3], False, 1),
    ([], [1], False, None),
])  # fmt: skip
def test_the_first_difference(left, right, whole, at):
    assert Check("", left, right, ("", ""), whole=whole).differs == at
