"""The first rows of prompt files and the chat template, as a plan looks at them."""

import json

import pytest
from miles_preflight import rows

from miles_core.errors import DataError

CHAT = [{"role": "user", "content": "1+1="}]
FIELDS = ("--input-key", "prompt", "--label-key", "label")


@pytest.fixture
def data(tmp_path):
    """(rows, as JSON unless bytes) -> the prompt file."""
    def write(*rows, name="data.jsonl", end="\n"):
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        (tmp_path / name).write_bytes(b"".join(line + end.encode() for line in lines))
        return tmp_path / name

    return write


ROW = {"prompt": "1+1=", "label": "2"}
MATH = ("--rm-type", "math")
TESTS = ("--label-key", "none", "--plugin", "tools", "--rm-type", "unit-tests")


def said(text):
    return [{"role": "user", "content": text}]


def refused(plan, message, *flags):
    with pytest.raises(DataError) as caught:
        plan(*flags)
    assert message in str(caught.value) and "Fix:" in str(caught.value), str(caught.value)


@pytest.mark.parametrize(("rows", "flags", "message"), [
    ([ROW, {"prompt": "x"}], (), "data.jsonl, line 2: the row has no key 'label' (got prompt)"),
    ([{"question": "x", "label": "2"}], (), "the row has no key 'prompt' (got question, label)"),
    ([ROW | {"prompt": CHAT}], (), "is a list of chat messages. Fix: add --apply-chat-template"),
    ([ROW | {"prompt": [{"from": "human", "value": "x"}]}], (), "text or a list of chat messages (got list)"),
    ([ROW | {"prompt": ""}], (), "'prompt' says nothing"), ([ROW | {"prompt": []}], (), "messages (got nothing)"),
    ([ROW | {"prompt": "<|im_start|>user\nx"}], ("--apply-chat-template",), "would pass through one again"),
    ([ROW | {"prompt": said("<|im_start|>user\nx")}], ("--apply-chat-template",), "would pass through one again"),
    ([ROW | {"prompt": said('[{"role": "user"}]')}], ("--apply-chat-template",), "holds chat messages as text"),
    ([ROW | {"prompt": '{"messages": [{"role": "user"}]}'}], (), "holds chat messages as text"),
    ([ROW | {"prompt": said(" ")}], ("--apply-chat-template",), "no message of 'prompt' says anything"),
    ([ROW | {"prompt": " "}], (), "'prompt' says nothing"),
    *(([ROW, {"prompt": "x", "label": label}], MATH, "line 2: 'math' needs the answer of every row, and here is none")
      for label in (None, " ", "nan", float("nan"), [])),
    ([{"prompt": "x", "tests": ["assert f()"]}, {"prompt": "x"}], TESTS, "(got nothing under 'tests')"),
    ([], (), "the file is empty"), ([b"", b"  "], (), "no prompt is left"),
    ([[ROW, ROW]], (), "line 1: the line is not a JSON object (got list)"),
    ([b"[", b'{"prompt": "x"}]'], (), "line 1: the line is not a JSON object"),
    ([ROW, b'{"prompt": "1+'], (), "line 2: the line is not a JSON object"),
    ([ROW, 5], (), "line 2: the line is not a JSON obj"),
    ([b'{"prompt": "caf\xe9"}'], (), "byte 0xe9"),
    ([b"PAR1\x15\x04"], (), "line 1: the line is not a JSON obj"),
])
def test_rows_that_end_a_run(plan, data, rows, flags, message):
    refused(plan, message, "--prompt-data", data(*rows), *FIELDS, *flags)


@pytest.mark.parametrize(("rows", "flags"), [
    ([ROW, ROW], ()), ([b"", ROW], ()), ([ROW | {"prompt": CHAT}], ("--apply-chat-template",)),
    ([ROW], ("--apply-chat-template",)), ([ROW | {"prompt": "<|im_start|>user\nx"}], ()),
    ([{"prompt": "x"}, ROW], ("--prompt-data", "{}@[1:2]")),
    ([ROW | {"prompt": [{"role": "system", "content": ""}, *CHAT]}], ("--apply-chat-template",)),
    ([ROW | {"prompt": "<image>?", "images": None}], ()), ([ROW, ROW], ()), ([ROW, ROW | {"label": 0}][1:], MATH),
    ([{"prompt": "x", "tests": ["assert f()"]}], TESTS),
    ([{"x": 1}], ("--debug-train-only", "--load-debug-rollout-data", "x/{rollout_id}")),
])
def test_rows_that_do_not(plan, data, rows, flags):
    path = data(*rows)
    plan("--prompt-data", path, *FIELDS, *(str(path) + flag[2:] if flag.startswith("{}") else flag for flag in flags))


def test_the_slice_is_one_and_leaves_rows(plan, data):
    path = data(ROW, ROW)
    refused(plan, "[slice-malformed]", "--prompt-data", f"{path}@0:1", *FIELDS)
    refused(plan, "no prompt is left (got [2:4])", "--prompt-data", f"{path}@[2:4]", *FIELDS)
    plan("--prompt-data", f"{path}@[-1:]", *FIELDS)


def test_only_the_first_rows_are_read(plan, data, monkeypatch):
    monkeypatch.setattr(rows, "LOOKED_AT", 100)
    plan("--prompt-data", data(*[ROW] * 9, {"x": 1}), *FIELDS)
    refused(plan, "no key 'prompt'", "--prompt-data", data({"x": 1}, *[ROW] * 9), *FIELDS)
    plan("--prompt-data", data(ROW | {"prompt": "x" * 200}), *FIELDS)
    refused(plan, "line 1: the line is not a JSON object", "--prompt-data", data([ROW] * 9), *FIELDS)


def test_an_object_is_the_label_of_a_function_alone(plan, data):
    """Scorers are given text: what in it is the ground truth is named with a dot."""
    row = {"prompt": "1+1=", "graded": {"target": "2", "style": "rule"}}
    flags = ("--prompt-data", data(row, row), "--input-key", "prompt")
    refused(plan, "line 1: 'graded' is an object", *flags, "--label-key", "graded")
    refused(plan, "line 1: the row has no key 'graded.answer' (got prompt, graded)", *flags, "--label-key",
            "graded.answer")
    plan(*flags, "--label-key", "graded.target")
    plan(*flags, "--label-key", "graded", "--rm-type", "custom", "--custom-rm-path", "json.loads")


def test_evaluation_data_are_looked_at_by_their_own_keys(plan, data):
    path = data({"q": "x", "a": "1"}, name="eval.jsonl")
    flags = ("--prompt-data", data(ROW), *FIELDS, "--eval-interval", 1, "--eval-prompt-data", "sums", path)
    refused(plan, "eval.jsonl, line 1: the row has no key 'prompt' (got q, a). Fix: name the right key with --eval-i",
            *flags)
    plan(*flags, "--eval-input-key", "q", "--eval-label-key", "a")


@pytest.mark.parametrize("name", ["org/dataset", "./none.jsonl", "/data/none.jsonl", "train.parquet"])
def test_what_can_only_be_missing_is_refused(plan, name):
    words = "there is no such folder" if name == "org/dataset" else "[prompt-file-missing]"
    refused(plan, words, "--prompt-data", name)


def test_epochs_over_too_few_rows_make_no_rollout(plan, data):
    path = data(*[ROW] * 3)
    changes = {"num_rollout = 3": "num_epoch = 2"}
    with pytest.raises(DataError, match="too few prompts"):
        plan("--prompt-data", path, *FIELDS, **changes)
    plan("--prompt-data", path, *FIELDS, "--num-epoch", 3, **changes)


@pytest.mark.parametrize(("files", "good"), [
    ({"tokenizer_config.json": "{}"}, False), ({"tokenizer_config.json": '{"chat_template": null}'}, False),
    ({"tokenizer.json": "{}"}, False),
    ({"tokenizer_config.json": '{"chat_template": "{{ messages[0].content }}"}'}, True),
    ({"tokenizer.json": "{}", "chat_template.jinja": "{{ messages[0].content }}"}, True),
])
def test_the_chat_template_is_there_where_it_is_applied(plan, data, tmp_path, files, good):
    for name, text in {"config.json": "{}", "vocab.json": "{}", "merges.txt": "a b", **files}.items():
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_text(text)
    flags = ("--prompt-data", data(ROW), *FIELDS, "--hf-checkpoint", tmp_path / "model")
    plan(*flags)
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    plan(*flags, "--apply-chat-template", "--chat-template-path", tmp_path / "own.jinja")
    if good:
        plan(*flags, "--apply-chat-template")
    else:
        refused(plan, "the tokenizer has no chat template", *flags, "--apply-chat-template")
