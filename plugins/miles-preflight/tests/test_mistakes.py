"""What one mistake in rows, template or files of the smallest run says, and near it what is none."""

import json
import shutil
from pathlib import Path

import pytest
from measure import ACCEPTED, BASE, REFUSED, ROOT, outcome

TINY = ROOT / "examples/arithmetic/tiny-qwen3"
CONFIG = json.loads((TINY / "config.json").read_text())
SET = "examples/arithmetic/eval.jsonl"
USER = {"role": "user", "content": "1+1="}

def told(case, words):
    """Refused with these words, and a fix; accepted without words."""
    found = outcome({"id": "one", **case})
    if words is None:
        assert found.verdict == ACCEPTED, found
    else:
        assert found.verdict == REFUSED and words in found.sentence and "Fix:" in found.sentence, found


ROWS = [
    ({"label": None}, "no row has a ground truth under 'label'"),
    ({"label": ""}, "no row has a ground truth under 'label'"),
    ({"label": {"ground_truth": "2", "style": "rule"}}, "'label' is an object"),
    ({"metadata": "easy"}, "'metadata' should be an object (got str)"),
    ({"prompt": json.dumps([USER])}, "holds chat messages as text"),
    ({"prompt": str([USER])}, "holds chat messages as text"),
    ({"prompt": [{"role": "user"}]}, "has no text (got role)"),
    ({"prompt": [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}]}, "has no text (got image)"),
    ({"prompt": [USER, {"role": "assistant", "content": "2"}]}, "ends with an answer"),
    ({"prompt": [USER | {"content": [{"type": "text", "text": "1+1="}]}]}, None),
    ({"label": 2}, None),
]


@pytest.mark.parametrize(("change", "words"), ROWS, ids=str)
def test_rows_can_be_prompts(change, words):
    row = {"prompt": [USER], "label": "2", **change}
    case = {"flags": ["--prompt-data", "{here}/rows.jsonl"], "files": {"rows.jsonl": json.dumps(row) + "\n"}}
    told(case, words)


def test_a_key_of_metadata_is_in_some_row():
    told({"flags": ["--metadata-key", "extra_info"]}, "no row has the key 'extra_info'")


WEIGHTS = "model.safetensors"
FILES = [
    ({WEIGHTS: b""}, {}, "it is not whole (got 0 bytes)"),
    ({WEIGHTS: (TINY / WEIGHTS).read_bytes()[:-8]}, {}, "it is cut short"),
    ({WEIGHTS: b"version https://git-lfs.github.com/spec/v1\noid"}, {}, "a pointer of Git LFS"),
    ({"tokenizer.json": b"version https://git-lfs.github.com/spec/v1\noid"}, {}, "a pointer of Git LFS"),
    ({}, {}, None), ({}, {"eos_token_id": [258, 999]}, "beyond the model's vocabulary, and never drawn (got 999"),
    ({WEIGHTS: None}, {"vocab_size": 200, "eos_token_id": 1}, "never drawn (got 258, and"),
    ({"generation_config.json": None}, {"eos_token_id": 7}, "a special token of the tokenizer, which is an"),
    ({WEIGHTS: None}, {}, "the folder of the model holds no weights"),
]


@pytest.mark.parametrize(("files", "constants", "words"), FILES, ids=[str(number) for number in range(len(FILES))])
def test_the_checkpoints_files_are_of_one_model(files, constants, words, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    (model / "config.json").write_text(json.dumps(CONFIG | constants))
    for name, content in files.items():
        (model / name).unlink(missing_ok=True)
        if content is not None:
            (model / name).write_bytes(content.read_bytes() if isinstance(content, Path) else content)
    case = {"flags": ["--hf-checkpoint", str(model)]}
    told(case, words)


@pytest.mark.parametrize(("change", "key"), [
    ({"rms_norm_eps": 1e-5}, "rms_norm_eps"), ({"hidden_act": "gelu"}, "hidden_act"), ({"dtype": "bfloat16"}, None),
])
def test_the_reference_is_computed_as_the_policy(tmp_path, change, key):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    told({"flags": ["--use-kl-loss", "--ref-load", str(tmp_path)]}, key and f"with the policy's {key}")


def test_a_checkpoints_tracker_names_what_is_there():
    parts = ("metadata.json", ".metadata", "common.pt", "miles.json", "__0_0.distcp")
    files = {"saved/latest_checkpointed_iteration.txt": "40\n"} | {f"saved/iter_0000040/{one}": "{}" for one in parts}
    case = {"flags": ["--load", "{here}/saved"], "files": files}
    told(case, "past the run's last rollout, so nothing would be trained (got 40 of 20)")
    for more in (["--num-rollout", "50"], ["--save", "{here}/saved"]):
        assert outcome({"id": "one", **case, "flags": [*case["flags"], *more]}).verdict == ACCEPTED
    told({**case, "files": files | {"saved/latest_checkpointed_iteration.txt": "7"}}, "names iteration 7")


@pytest.mark.parametrize(("line", "words"), [
    ("n_samples = 0", "a whole number from 1 on"), ('n_samples = "4"', "a whole number from 1 on"),
    ("top_k = 0", "a whole number from 1 on"), ('temperature = "0.6"', "is a number"), ("label_key = 1", "is a text"),
    ("temperature = inf", "is a number"), ("temperature = -0.5", "is a number"), ("top_p = nan", "is a number"),
    ("top_k = -1", None), ("temperature = 0", None), ("max_response_len = 16", None),
])
def test_values_of_an_eval_data_set_are_of_their_kind(tmp_path, line, words):
    text = f"\ufeff[eval]\neval_interval = 5\n[[eval.datasets]]\nname = 'sums'\npath = '{SET}'\n{line}\n"
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    case = {"run_file": f"{tmp_path}/run.toml", "flags": [word for group in BASE for word in group]}
    if words:
        told(case, words)
    else:
        assert outcome({"id": "one", **case}).verdict == ACCEPTED


ROLES = "{%- for message in messages %}{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}" \
        "{{- raise_exception('roles must alternate') }}{%- endif %}{{- message.content }}{%- endfor %}"
PARTS = "{%- for message in messages %}{%- if message.content is string %}{{ message.content }}{%- else %}" \
        "{%- for one in message.content or [] %}{{ one.text }}{%- endfor %}{%- endif %}{%- endfor %}"
ANSWER = {"role": "assistant", "content": "2"}
TEMPLATES = [
    (ROLES, [USER], None), (ROLES, [USER, ANSWER, USER], None),
    (ROLES, [USER, USER], "the chat template rejected the messages (got roles must alternate)"),
    (PARTS, [USER | {"content": [{"type": "text", "text": "1+1="}]}], None),
    ("{{- 'a' + messages[0].content }}", [USER | {"content": [{"type": "text", "text": "1"}]}], None),
    ("{{- 'a' + 1 }}", [USER], "can only concatenate"),
    ("{% if %}", [USER], "the chat template rejected the messages (got Expected an expression"),
    ("{% generation %}{{ messages | tojson(indent=2) }}{% endgeneration %}{{ strftime_now('%Y') }}", [USER], None),
    ("{% for one in messages %}{{ one.content }}{% break %}{% endfor %}{{ eos_token + tone }}", [USER], None),
]


@pytest.mark.parametrize(("template", "messages", "words"), TEMPLATES, ids=str)
def test_the_template_takes_the_rows(template, messages, words):
    rows = [{"prompt": [USER], "label": "2"}] * (40 if words is None or "Expected" in words else 0)
    rows.insert(0, {"prompt": messages, "label": "2"})
    flags = ["--prompt-data", "{here}/rows.jsonl", "--chat-template-path", "{here}/chat.jinja",
             "--apply-chat-template-kwargs", '{"tone": "calm"}']
    case = {"flags": flags, "files": {"chat.jinja": template, "rows.jsonl": "\n".join(map(json.dumps, rows))}}
    told(case, words)


def test_an_iteration_that_is_not_whole_is_named():
    files = {"a/latest_checkpointed_iteration.txt": "3", "a/iter_0000003/__0_0.distcp": "x"}
    told({"flags": ["--load", "{here}/a"], "files": files}, "iteration 3 is incomplete (got no metadata.json")


def test_an_iteration_of_another_trainer_is_not_called_incomplete():
    files = {"a/latest_checkpointed_iteration.txt": "3", "a/iter_0000003/fsdp.json": "{}",
             "a/iter_0000003/tensors/__0_0.distcp": "x"}
    told({"flags": ["--load", "{here}/a"], "files": files}, "iteration 3 is another trainer's (got no metadata.json")


@pytest.mark.parametrize("parts", [["metadata.json"], ["metadata.json", ".metadata", "common.pt", "miles.json"]])
def test_an_iteration_without_a_shard_is_not_whole(parts):
    files = {"a/latest_checkpointed_iteration.txt": "3", **{f"a/iter_0000003/{name}": "{}" for name in parts}}
    told({"flags": ["--load", "{here}/a"], "files": files}, "iteration 3 is incomplete (got no ")


@pytest.mark.parametrize(("name", "words"), [
    ("data.jsonl", "the prompt file does not exist"), ("none/data.jsonl", None), ("prompts", None),
])
def test_a_file_of_this_folder_is_here(name, words):
    told({"flags": ["--prompt-data", name]}, words)
