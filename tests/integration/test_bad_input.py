"""What a user may get wrong with checkpoints, data, scorers and losses.

Each bad input ends the real command with one sentence and an exit code (2: known before the start, 1: in the middle),
shows no traceback, and leaves a place in which the good run works. Gaps in the expected words are " ... ".
"""

from __future__ import annotations

import json

import pytest

# ------------------------------------------------------------------------------------------------------ checkpoints


def change(path, **values) -> None:
    """Change keys of a JSON file; None takes one away."""
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_hf_checkpoint_that_is_not_there(place):
    place.refuses(2, "--hf-checkpoint nowhere: ... [model-config-unusable]", "--hf-checkpoint", "nowhere")


def test_truncated_weights(place):
    weights = place.model() / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    place.refuses(2, "model/model.safetensors: a tensor file cannot be read ... fetch", "--hf-checkpoint", "model")


def test_missing_weights(place):
    (place.model() / "model.safetensors").unlink()
    place.refuses(2, "model: the folder of the model holds no weights ... safetensors", "--hf-checkpoint", "model")


def test_weights_of_another_size(place):
    change(place.model() / "config.json", hidden_size=64)
    place.refuses(2, "model: the tensors do not fit ... misshapen ... embed_tokens", "--hf-checkpoint", "model")


def test_truncated_config(place):
    config = place.model() / "config.json"
    config.write_text(config.read_text()[:200])
    place.refuses(2, "--hf-checkpoint model: config.json cannot be read", "--hf-checkpoint", "model")


def test_config_that_is_no_object(place):
    (place.model() / "config.json").write_text("[]")
    place.refuses(2, "--hf-checkpoint model: config.json", "--hf-checkpoint", "model")


@pytest.mark.parametrize("kind", ["mamba2", "nobody_knows"])
def test_unknown_architecture(place, kind):
    change(place.model() / "config.json", model_type=kind)
    place.refuses(2, f"'{kind}' ... qwen3", "--hf-checkpoint", "model")


def test_missing_tokenizer(place):
    (place.model() / "tokenizer.json").unlink()
    words = "--hf-checkpoint model: ... tokenizer.json ... [tokenizer-unloadable]"
    place.refuses(2, words, "--hf-checkpoint", "model")


def test_truncated_tokenizer(place):
    tokenizer = place.model() / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text()[:500])
    words = "--hf-checkpoint model: ... tokenizer.json ... [tokenizer-unloadable]"
    place.refuses(2, words, "--hf-checkpoint", "model")


def test_tokenizer_without_a_chat_template(place):
    change(place.model() / "tokenizer_config.json", chat_template=None)
    place.refuses(2, "model: the tokenizer has no chat template ... --chat-template-path", "--hf-checkpoint", "model")


def test_load_of_one_iteration(place):
    place.saved()
    place.again = ["--load", "ckpt"]
    place.refuses(2, "iter_0000001: this is no checkpoint of a run ... give ckpt: the", "--load", "ckpt/iter_0000001")


@pytest.mark.full
def test_tracker_of_a_missing_iteration(place):
    (place.saved() / "latest_checkpointed_iteration.txt").write_text("7\n")
    place.refuses(2, "latest_checkpointed_iteration.txt: the tracker names iteration 7, which is not there "
                  "... iter_0000001", "--load", "ckpt")


@pytest.mark.full
def test_incomplete_iteration(place):
    (place.saved() / "iter_0000001/common.pt").unlink()
    place.refuses(2, "iteration 1 is incomplete (got no common.pt)", "--load", "ckpt")


def test_truncated_iteration(place):
    for file in (place.saved() / "iter_0000001").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:1000])
    place.refuses(2, "iter_0000001/ ... the checkpoint cannot be read", "--load", "ckpt")


def test_load_of_a_hugging_face_folder_that_is_not_the_runs_own(place):
    place.refuses(2, "this is no checkpoint of a run ... Hugging Face folder ... --hf-checkpoint", "--load",
                  str(place.tiny / "qwen3_moe"))


def test_load_of_another_model(place):
    place.saved()
    place.refuses(2, "iter_0000001: the checkpoint belongs to another architecture ... --hf-checkpoint", "--load",
                  "ckpt",
                  "--hf-checkpoint", str(place.tiny / "qwen3_moe"))


@pytest.mark.full
def test_unpublished_iteration_is_ignored(place):
    """A kill in the middle of a save leaves a folder that nobody reads and that the next save clears."""
    ckpt = place.saved()
    half = ckpt / ".tmp-iter_0000002"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    outcome = place.run("--save", "ckpt", "--load", "ckpt", "--num-rollout", "2")
    assert (outcome.code, outcome.err) == (0, "")
    assert "rollout 2/2" in outcome.out and "rollout 1/2" not in outcome.out
    names = sorted(path.name for path in ckpt.iterdir() if path.name != ".lock")
    assert names == ["iter_0000001", "iter_0000002", "latest_checkpointed_iteration.txt"]


def test_checkpoint_of_plugin_state_without_the_plugin(place):
    (place.path / "stateful.py").write_text(STATEFUL)
    place.saved("--plugin", "./stateful.py")
    place.refused(2, "state of plugin 'stateful' ... --plugin stateful ... --drop-plugin-state", "--load", "ckpt")
    place.clean("--load", "ckpt", "--drop-plugin-state", "stateful", "--num-rollout", "2")


STATEFUL = '''
from miles_core import hookimpl

class Stateful:
    @hookimpl
    def filter_group(self, group):
        return group

    def state_dict(self):
        return {"seen": 1}

    def load_state_dict(self, state):
        pass
'''

# ------------------------------------------------------------------------------------------------------------- data

ROW = {"prompt": "1+1=", "label": "2"}


@pytest.mark.parametrize(("lines", "words"), [
    ([ROW, '{"prompt": "1+', ROW],
     "data.jsonl, line 2: the line is not a JSON object (got Unterminated string ... column 12 ... one JSON object"),
    ([ROW, "", ["1+1=", "2"]], "data.jsonl, line 3: the line is not a JSON object (got list)"),
    ([], "data.jsonl: no prompt is left ... the file is empty"),
    ([ROW | {"prompt": 5}], "data.jsonl, line 1: 'prompt' should be text or a list of chat messages (got int)"),
    ([ROW | {"prompt": []}], "data.jsonl, line 1: 'prompt' should be text or a list of chat messages (got nothing)"),
    ([ROW | {"prompt": [{"role": "user"}]}], "data.jsonl, line 1: a message of 'prompt' has no text"),
    ([ROW | {"metadata": "hello"}], "data.jsonl, line 1: 'metadata' should be an object (got str)"),
], ids=["malformed", "no-object", "empty", "number", "no-messages", "no-content", "metadata"])  # fmt: skip
def test_bad_line(place, lines, words):
    place.refuses(2, words, *place.data(*lines))


def test_data_that_is_not_utf8(place):
    flags = place.data()
    (place.path / "data.jsonl").write_bytes(json.dumps(ROW).encode() + b'\n{"prompt": "caf\xe9", "label": "2"}\n')
    place.refuses(2, "data.jsonl, line 2: ... UTF-8", *flags)


@pytest.mark.parametrize(("flags", "words"), [
    (["--prompt-data", "nowhere.jsonl"], "--prompt-data), nowhere.jsonl: "),
    (["--prompt-data", "."], "--prompt-data"),
    (["--label-key", "answer"], "train.jsonl, line 1: the row has no key 'answer' (got prompt, label) ... --label-key"),
    (["--input-key", "question"],
     "train.jsonl, line 1: the row has no key 'question' (got prompt, label) ... --input-key"),
    (["--no-apply-chat-template"],
     "train.jsonl, line 1: 'prompt' is a list of chat messages ... --apply-chat-template"),
    (["--chat-template-path", "nowhere.jinja"], "--chat-template-path nowhere.jinja: the chat template cannot be read"),
    (["--eval-interval", "1", "--eval-prompt-data", "math", "nowhere.jsonl"],
     "--eval-prompt-data), nowhere.jsonl: "),
    (["--rollout-max-context-len", "4096"], "rollout_max_context_len ... at most 128"),
], ids=lambda value: value[0] if isinstance(value, list) else "")  # fmt: skip
def test_data_flags(place, flags, words):
    place.refuses(2, words, *flags)


# ---------------------------------------------------------------------------------------------------------- rewards

REWARD = """
import time
from miles_core import hookimpl


class Bad:
    @hookimpl("reward", name="bad")
    {define} bad(self, {argument}):
        {body}
"""


@pytest.mark.parametrize(("body", "argument", "words"), [
    ("return 1 / 0", "sample",
     "scorer 'bad' failed on train prompt 0 (row 0) (got ZeroDivisionError: ... [scorer-failed]"
     " ... in plugin bad ... (file), hook reward ... logs/traceback.txt"),
    ("return float('nan')", "sample",
     "scorer 'bad' ... train prompt 0 (row 0), sample 0 (got nan) ... [score-not-finite]"),
    *(pytest.param(*case, marks=pytest.mark.full) for case in (
        ("return None if sample.index >= 0 else 0.0", "sample",
         "scorer 'bad' ... train prompt 0 (row 0), sample 0 (got None) ... [score-not-finite]"),
        ("time.sleep(1000); return 0.0", "sample",
         "scorer 'bad' took longer than 0.5 s for train prompt 0 ... --rm-timeout"),
        ("return [1.0]", "samples", "scorer 'bad' ... (got [1.0]) ... [scores-count]"),
        ("return 1.0", "samples", "scorer 'bad' ... (got 1.0) ... [scores-count]"),
        ("raise SystemExit(3)", "sample",
         "scorer 'bad' failed on train prompt 0 ... SystemExit: 3 ... in plugin bad ... logs/traceback.txt"))),
], ids=["raises", "nan", "nothing", "hangs", "too-few", "no-list", "exits"])  # fmt: skip
@pytest.mark.parametrize("define", ["def", pytest.param("async def", marks=pytest.mark.full)])
def test_bad_reward(place, define, body, argument, words):
    if define == "async def":
        if body not in ("return 1 / 0", "time.sleep(1000); return 0.0"):
            pytest.skip("the same path")
        body = body.replace("time.sleep", "import asyncio; await asyncio.sleep")
    flags = place.plugin(REWARD.format(define=define, argument=argument, body=body))
    outcome = place.refuses(1, words, *flags, "--rm-type", "bad", "--rm-timeout", "0.5")
    assert outcome.seconds < 20, "the scorer still sleeps in its thread, and the process does not wait for it"


def test_sample_that_nobody_scores(place):
    place.rewrite('rm_type = ["digits"]', "")
    place.refuses(2, "rollout.rm_type (default): nobody scores the answers ... --rm-type")


# -------------------------------------------------------------------------------------------------------- numerics

LOSS = """
import torch
from miles_core import hookimpl


class Bad:
    @hookimpl("policy_loss", name="bad")
    def bad(self, inputs):
        return {loss}, {{}}
"""


@pytest.mark.parametrize(("loss", "words"), [
    ("torch.where(inputs.sample == 1, float('inf'), inputs.log_probs)",
     "policy loss 'bad': the loss of train prompt ... is not finite (got inf ... last checkpoint is good"),
    *(pytest.param(*case, marks=pytest.mark.full) for case in (
        ("(inputs.log_probs - inputs.log_probs.detach()).abs().sqrt()",
         "optimizer step of the actor: the gradient of ... is not finite ... last checkpoint is good"),
        ("inputs.log_probs.sum()", "policy loss 'bad': it should have one value for each token (got shape [])"),
        ("inputs.log_probs.detach()", "policy loss 'bad': the loss has no gradient"))),
], ids=["loss", "gradient", "shape", "detached"])  # fmt: skip
def test_bad_loss(place, loss, words):
    flags = ["--policy-loss", "bad", "--save", "ckpt", "--load", "ckpt"]
    place.saved()
    place.again = ["--load", "ckpt", "--num-rollout", "2"]
    place.refuses(1, words, *place.plugin(LOSS.format(loss=loss)), *flags)
