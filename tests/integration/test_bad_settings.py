"""What a user may get wrong in run files, flags and plugins. See test_bad_input.py for what each refusal has to be."""

from __future__ import annotations

import os

import pytest

from miles_core.record.events import read


@pytest.mark.parametrize(("flags", "words"), [
    (["--num-steps-per-rollout", "3"], "4 x 4 = 16 ... num_steps_per_rollout 3 ... [rollout-not-divisible]"),
    (["--global-batch-size", "5"], "4 x 4 = 16 ... global_batch_size 5 ... [rollout-not-divisible]"),
    (["--global-batch-size", "32"], "4 x 4 = 16 ... global_batch_size 32 ... [rollout-not-divisible]"),
    (["--global-batch-size", "4", "--num-steps-per-rollout", "2"], "16 ... 8 ... [rollout-and-train-sizes-differ]"),
    (["--no-use-dynamic-batch-size", "--micro-batch-size", "3"],
     "global_batch_size 16 does not divide by micro_batch_size 3"),
    (["--no-use-dynamic-batch-size", "--micro-batch-size", "0"], "perf.micro_batch_size (--micro-batch-size)"),
    (["--max-tokens-per-gpu", "none"], "use_dynamic_batch_size needs max_tokens_per_gpu"),
    (["--max-tokens-per-gpu", "0"], "perf.max_tokens_per_gpu (--max-tokens-per-gpu): ... (got 0)"),
    (["--over-sampling-batch-size", "2"],
     "over_sampling_batch_size is below rollout_batch_size (got 2) ... at least 4"),
    (["--rollout-batch-size", "0"], "rollout_batch_size should be at least 1 (got 0)"),
    (["--rollout-max-response-len", "0"], "rollout.rollout_max_response_len ... (got 0)"),
    (["--num-rollout", "-1"], "num_rollout should be at least 0 (got -1)"),
    (["--tensor-model-parallel-size", "2"], "1 rank does not divide by tensor_model_parallel_size 2 ... multiple of 2"),
    (["--lr", "-1"], "optimizer.lr (--lr): ... (got -1.0)"),
], ids=lambda value: "".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_sizes(place, flags, words):
    place.refuses(2, words, *flags)


def test_the_run_directory_of_a_refused_plan_takes_the_run_that_was_meant(place):
    place.refused(2, "rollout.max_lag (--max-lag)", "--max-lag", "-1")
    place.clean()


@pytest.mark.parametrize(("flags", "words"), [
    (["--rolout-batch-size", "4"], "--rolout-batch-size ... did you mean --rollout-batch-size?"),
    (["--num-rollout"], "--num-rollout ... (got none) ... [flag-takes-one-value]"),
    (["--num-rollout", "many"], "--num-rollout: rollout.num_rollout should be int | None (got 'many')"),
    (["-num-rollout", "3"], "-num-rollout"),
    (["--plugin", "grpoo"], "--plugin: ... 'grpoo' ... did you mean 'grpo'? [plugin-unknown]"),
    (["--plugin", "./nowhere.py"], "nowhere.py: the plugin file cannot be read ... check the path"),
    (["--rm-type", "digit"],
     "rollout.rm_type (--rm-type): ... the reward 'digit' ... did you mean 'digits'? [part-not-enabled]"),
    (["--advantage-estimator", "grop"], "the advantage 'grop' ... did you mean 'grpo'? [part-not-enabled]"),
    (["--engine", "sglang"], "SGLang is not installed in this Python"),
    (["--engine", "lmdeploy"], "the engine 'lmdeploy' (got offered: local, sglang) ... [part-not-enabled]"),
    (["--tensorboard.dir", "x"], "--tensorboard.dir belongs to plugin 'tensorboard', which is not enabled"),
], ids=lambda value: "".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_flags(place, flags, words):
    place.refuses(2, words, *flags)


@pytest.mark.parametrize(("old", "new", "words"), [
    ("rollout_batch_size =", "rolout_batch_size =",
     "bad.toml:13: [rollout] has no key 'rolout_batch_size' ... did you mean 'rollout_batch_size'?"),
    ("rollout_batch_size = 4", 'rollout_batch_size = "four"',
     "bad.toml:13: rollout.rollout_batch_size should be int ... (got 'four')"),
    ("[rollout]", "[rolout]", "bad.toml:8: ... [rolout] ... did you mean [rollout]? [table-unknown]"),
    ("[checkpoint]", "[checkpoint", "bad.toml: ... line 4 ... [run-file-not-toml]"),
    ("hf_checkpoint =", "model_name =", "bad.toml:5: [checkpoint] has no key 'model_name' ... it belongs in [model]"),
    ("prompt_data =", "# prompt_data =", "rollout.prompt_data ... --prompt-data ... [setting-required]"),
    ("plugins = [", "plugins = 5 # [", "bad.toml: plugins should be a list of names (got 5)"),
    ("[perf]", "[tensorboard]",
     "bad.toml:19: the table [tensorboard] belongs to a plugin that is not enabled ... --plugin tensorboard"),
    ('rm_type = ["digits"]', 'rm_type = "digits"',
     'bad.toml:16: rollout.rm_type should be list[str] ... write ["digits"]'),
], ids=["key", "type", "table", "toml", "home", "needed", "plugins", "absent", "list"])  # fmt: skip
def test_run_file(place, old, new, words):
    place.rewrite(old, new)
    place.refuses(2, words)


def test_run_file_that_cannot_be_read(place):
    place.file = "nowhere.toml"
    place.refuses(2, "nowhere.toml: ... [run-file-missing]")
    place.file = "."
    place.refuses(2, "(got Is a directory) ... .toml ... [run-file-unreadable]")
    (place.path / "latin.toml").write_bytes(b"# caf\xe9\n")
    place.file = "latin.toml"
    place.refuses(2, "latin.toml: ... [run-file-not-toml]")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_run_file_without_permission(place):
    place.rewrite("lr", "lr")
    (place.path / "bad.toml").chmod(0)
    place.refuses(2, "bad.toml: the run file cannot be read (got Permission denied)")


# ---------------------------------------------------------------------------------------------------------- plugins

FILTER = """
{top}
from miles_core import hookimpl


class Bad:
    def __init__(self):
        {init}

    @hookimpl
    def filter_group(self, {argument}):
        {body}
        return group
"""


@pytest.mark.parametrize(("part", "text", "words"), [
    ("top", "def broken(:", "bad.py: ... (got line 2: invalid syntax) ... [plugin-file-not-python]"),
    ("top", "import nowhere_to_be_found",
     "bad.py: plugin 'bad' cannot be imported (got ModuleNotFoundError: No module named"),
    ("top", "1 / 0", "bad.py: plugin 'bad' cannot be imported (got ZeroDivisionError"),
    ("top", "raise SystemExit(3)", "bad.py: plugin 'bad' cannot be imported (got SystemExit: 3)"),
    ("init", "1 / 0", "bad.py:Bad: plugin 'bad' ... (got ZeroDivisionError ... [plugin-constructor-failed]"),
    ("argument", "groups",
     "filter_group: it takes 'groups', which filter_group does not have ... filter_group has: group"),
], ids=["syntax", "import", "raises", "exits", "constructor", "argument"])  # fmt: skip
def test_plugin_that_does_not_load(place, part, text, words):
    parts = {"top": "", "init": "pass", "argument": "group", "body": "pass"} | {part: text}
    place.refuses(2, words, *place.plugin(FILTER.format(**parts)))


def test_plugin_without_a_hook(place):
    flags = place.plugin("class Bad:\n    pass\n")
    place.refuses(2, "bad.py: a plugin file needs exactly one class ... hookimpl", *flags)


@pytest.mark.parametrize(("body", "words"), [
    ("1 / 0", "plugin bad ... (file), hook filter_group: ZeroDivisionError: division by zero"),
    *(pytest.param(*case, marks=pytest.mark.full) for case in (
        ("exit(3)", "plugin bad ... (file), hook filter_group: RuntimeError: SystemExit: 3"),
        ("raise StopIteration", "StopIteration"),
        ("if group: return",
         "plugin bad ... filter_group ... a Group ... (got NoneType) ... [filter-returned-other-type]"),
        ("return True",
         "plugin bad ... filter_group ... a Group ... (got bool) ... [filter-returned-other-type]"))),
], ids=["raises", "exits", "stops", "forgets", "boolean"])  # fmt: skip
def test_plugin_that_fails_in_the_run(place, body, words):
    """The terminal gets plugin, version and hook; the traceback, with the plugin's own line, is in the run's logs."""
    source = FILTER.format(top="", init="pass", argument="group", body=body)
    place.refuses(1, words, *place.plugin(source))
    ends = [event["status"] for event in read(place.path / "runs/a/events.jsonl") if event["event"] == "run_end"]
    assert "failed" in ends and "interrupted" not in ends
    if "return" not in body:
        assert "bad.py" in (place.path / "runs/a/logs/traceback.txt").read_text()


@pytest.mark.full
def test_trainer_plugin_that_fails_in_a_worker_process(place):
    """The same from another process, with an error that cannot be pickled; its traceback is in the logs."""
    error = "class Odd(Exception):\n    def __init__(self, one, two):\n        super().__init__(f'{one} and {two}')\n"
    source = FILTER.replace("filter_group(self, {argument})", "microbatch(self, proceed, packed)")
    source = source.format(top=error, init="pass", body="raise Odd(1, 2)").replace("group", "proceed(packed)")
    flags = place.plugin(source)
    place.refuses(1, "plugin bad ... hook microbatch: ... Odd: 1 and 2", *flags, "--trainer-host", "process")
    trace = (place.path / "runs/a/logs/traceback.txt").read_text()
    assert "in process trainer" in trace and "bad.py" in trace
