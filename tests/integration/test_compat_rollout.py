"""Functions that Miles calls while it samples and when it records, as its documentation has them (plugin compat)."""

import json

import pytest
from miles_testing.forked import miles

from miles_core.record.events import read
from miles_core.record.samples import read_samples, sample_file

LEGACY = '''
"""Written for Miles: its imports, its signatures, its names of a sample's fields."""
import json

import torch
from miles.rollout.filter_hub.base_types import DynamicFilterOutput
from miles.rollout.sglang_rollout import GenerateState
from miles.utils.http_utils import post
from miles.utils.types import Sample


def note(name, /, **what):
    with open("called.jsonl", "a") as file:
        file.write(json.dumps({"function": name, **what}) + chr(10))


class Source:
    def __init__(self, args):
        self.args, self.offset, self.index = args, 0, 0

    def get_samples(self, num_samples):
        groups = []
        for _ in range(num_samples):
            group = []
            for _ in range(self.args.n_samples_per_prompt):
                group.append(Sample(prompt=f"{self.offset}+1=", label=str(self.offset + 1), index=self.index,
                                    metadata={"offset": self.offset}))
                self.index += 1
            groups.append(group)
            self.offset += 1
        return groups

    def add_samples(self, samples):
        raise AssertionError("nobody calls this")


async def two_turns(args, sample: Sample, sampling_params: dict, evaluation=False) -> Sample:
    """Draws, adds an observation that is not trained on, and draws again."""
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response, mask, log_probs, text = [], [], [], ""
    for turn in range(2):
        params = {**sampling_params, "max_new_tokens": 3}
        output = await post(url, {"input_ids": ids + response, "sampling_params": params, "return_logprob": True})
        kind = output["meta_info"]["finish_reason"]["type"]
        if kind == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        drawn = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
        assert drawn == output["output_ids"] and len(drawn) == output["meta_info"]["completion_tokens"]
        response, mask, text = response + drawn, mask + [1] * len(drawn), text + output["text"]
        log_probs += [item[0] for item in output["meta_info"]["output_token_logprobs"]]
        if turn == 0:
            seen = state.tokenizer("!", add_special_tokens=False)["input_ids"]
            response, mask, log_probs = response + seen, mask + [0] * len(seen), log_probs + [0.0] * len(seen)
    sample.tokens, sample.response_length, sample.response = ids + response, len(response), text
    sample.loss_mask, sample.rollout_log_probs = mask, log_probs
    sample.metadata["engine_log_probs"] = log_probs
    sample.status = Sample.Status.TRUNCATED if kind == "length" else Sample.Status.COMPLETED
    return sample


async def one_turn(input):
    """Miles's newer form, and an execution that split into two samples."""
    from miles.rollout.base_types import GenerateFnOutput
    url = f"http://{input.args.sglang_router_ip}:{input.args.sglang_router_port}/generate"
    ids = input.state.tokenizer(input.sample.prompt, add_special_tokens=False)["input_ids"]
    output = await post(url, {"text": input.sample.prompt, "sampling_params": input.sampling_params})
    half = max(1, len(output["output_ids"]) // 2)
    parts = []
    for prompt, drawn in ((ids, output["output_ids"][:half]), (ids, output["output_ids"])):
        part = Sample(prompt=input.sample.prompt, label=input.sample.label, tokens=prompt + drawn)
        part.response_length, part.response, part.status = len(drawn), output["text"], Sample.Status.COMPLETED
        parts.append(part)
    return GenerateFnOutput(samples=parts)


async def reward(args, sample, **kwargs):
    assert isinstance(sample.tokens, list) and sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
    drawn = [t for t, m in zip(sample.tokens[-sample.response_length:], sample.loss_mask) if m]
    sample.metadata["rewarded"] = True
    return sum(t % 2 == 0 for t in drawn) / len(drawn)


async def rewards(args, samples, **kwargs):
    note("rewards", samples=len(samples))
    return [float(place // 2 % 2) for place, _ in enumerate(samples)]


def keep(args, samples, **kwargs):
    assert all(sample.metadata["rewarded"] for sample in samples)
    offset = samples[0].metadata["offset"]
    return DynamicFilterOutput(keep=offset % 5 != 3, reason="fifth")


def mark(args, data):
    for group in data:
        group[0].remove_sample = True


def process(args, all_samples, data_source):
    note("process", groups=[group[0].metadata["offset"] for group in all_samples], drawn=data_source.offset)


def postprocess(args, rollout_id, rollout_data):
    masks = [float(mask.sum()) for mask in rollout_data["loss_masks"]]
    note("postprocess", rollout=rollout_id, masked=masks.count(0.0), samples=len(masks))
    rollout_data["advantages"] = [0 * value for value in rollout_data["advantages"]]


def log(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    note("log", rollout=rollout_id, samples=len(samples), labels=sorted({s.label for s in samples}),
         reward=rollout_extra_metrics["rollout/raw_reward"], seconds=rollout_time)
    return True


def eval_log(rollout_id, args, data, extra_metrics):
    (name, found), = data.items()
    note("eval_log", rollout=rollout_id, name=name, rewards=len(found["rewards"]), metric=extra_metrics[f"eval/{name}"])
    return False


def post_save(args, rollout_id, checkpoint_dir, hf_checkpoint_dir):
    import os
    note("post_save", rollout=rollout_id, there=os.path.isdir(checkpoint_dir), hf=hf_checkpoint_dir)


def foreign(args, samples, **kwargs):
    return [0.0] * len(samples)


async def retokenised(args, sample, sampling_params):
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    await post(url, {"input_ids": ids, "sampling_params": sampling_params})
    sample.tokens, sample.response_length, sample.status = ids + [1, 2, 1], 3, Sample.Status.COMPLETED
    return sample


async def strange(args, sample, sampling_params):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    await post(url, {"text": "1", "sampling_params": {**sampling_params, "temprature": 1.0}})
    return sample


async def pending(args, sample, sampling_params):
    return sample


class Empty:
    def __init__(self, args):
        pass

    def get_samples(self, num_samples):
        return []


class NoSource:
    def __init__(self, args):
        pass
'''


@pytest.fixture
def run(run_file, tmp_path):
    """(*flags) -> what became of a run with the functions in legacy.py."""
    (tmp_path / "legacy.py").write_text(LEGACY)
    path = run_file()
    words = ["run", path, "--no-live", "--run-dir", "runs/a", "--rm-type", "custom"]
    return lambda *flags: miles([*words, *flags], tmp_path)


def at(name):
    return f"./legacy.py:{name}"


def calls_in(folder, name):
    found = [json.loads(line) for line in (folder / "called.jsonl").read_text().splitlines()]
    return [{key: value for key, value in call.items() if key != "function"} for call in found
            if call["function"] == name]


SOURCE = ("--prompt-source", "custom", "--data-source-path", at("Source"))
GENERATE = ("--generate", "custom", "--custom-generate-function-path")
REWARD = ("--custom-rm-path", at("reward"))


def test_a_rollout_of_miless_functions(run, tmp_path, tiny):
    """Ten functions in one run: each is called with what Miles calls it with, and what it does shows."""
    outcome = run(
        *SOURCE, *GENERATE, at("two_turns"), *REWARD, "--dynamic-sampling-filter-path", at("keep"),
        "--rollout-sample-filter-path", at("mark"), "--rollout-all-samples-process-path", at("process"),
        "--rollout-data-postprocess-path", at("postprocess"), "--custom-rollout-log-function-path", at("log"),
        "--custom-eval-rollout-log-function-path", at("eval_log"), "--custom-megatron-post-save-hook-path",
        at("post_save"), "--eval-prompt-data", "sums", f"{tiny}/eval.jsonl", "--eval-interval", "3",
        "--skip-eval-before-train", "--save", "ckpt", "--save-interval", "1", "--weight-decay", "0")  # fmt: skip
    assert outcome.code == 0, outcome.err
    events = list(read(tmp_path / "runs" / "a" / "events.jsonl"))
    metrics = [one["metrics"] for one in events if one["event"] == "metrics"]

    samples = [one for i in range(3) for one in read_samples(sample_file(tmp_path / "runs" / "a", "rollout", i))]
    assert len({one["prompt_uid"] for one in samples}) == 12 and {one["label"] for one in samples} >= {"1", "2", "3"}
    for one in samples:
        assert one["prompt"] == f"{one['prompt_uid']}+1=", "the data source's"
        masked = [place for place, mask in enumerate(one["loss_mask"]) if not mask]
        assert one["index"] == 0 and len(masked) == len(one["token_ids"]) or len(masked) == 1
        assert all((value == 0) == (token == "!" and place in masked) or value != 0 for place, (value, token) in
                   enumerate(zip(one["log_probs"], one["pieces"])))
        assert len(set(one["versions"])) == 1
    assert all(0 <= one["reward"] <= 1 for one in samples) and len({one["reward"] for one in samples}) > 2
    assert metrics[0]["rollout/dynamic_filter/drop_fifth"] == 1 and not {3, 8, 13} & {s["prompt_uid"] for s in samples}

    seen = [call["groups"] for call in calls_in(tmp_path, "process")]
    assert sorted(sum(seen, [])) == sorted(range(15)), "also those that the filter dropped"
    assert [call["samples"] for call in calls_in(tmp_path, "postprocess")] == [16] * 3
    assert {call["masked"] for call in calls_in(tmp_path, "postprocess")} == {4}, "the first of each group"
    assert [call["rollout"] for call in calls_in(tmp_path, "postprocess")] == [0, 1, 2]
    assert all(one["train/pg_loss"] == 0 and one["train/grad_norm"] == 0 for one in metrics), "advantages of 0"

    logged = calls_in(tmp_path, "log")
    assert [(call["rollout"], call["samples"]) for call in logged] == [(0, 16), (1, 16), (2, 16)]
    assert [call["reward"] for call in logged] == [one["rollout/raw_reward"] for one in metrics]
    assert calls_in(tmp_path, "eval_log")[0] | {"metric": None} == {"rollout": 3, "name": "sums", "rewards": 8,
                                                                    "metric": None}
    assert calls_in(tmp_path, "post_save") == [{"rollout": i, "there": True, "hf": None} for i in range(3)]


def test_a_run_goes_on_where_its_data_source_was(run, tmp_path):
    flags = (*SOURCE, *GENERATE, at("two_turns"), *REWARD, "--save", "ckpt")
    whole = run(*flags, "--save-interval", "2", "--num-rollout", "3")
    assert whole.code == 0, whole.err
    expected = [one["prompt_uid"] for one in read_samples(sample_file(tmp_path / "runs" / "a", "rollout", 2))]
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("2")
    again = run(*flags, "--load", "ckpt", "--num-rollout", "3", "--run-dir", "runs/b")
    assert again.code == 0, again.err
    found = list(read_samples(sample_file(tmp_path / "runs" / "b", "rollout", 2)))
    assert [one["prompt_uid"] for one in found] == expected and found[0]["label"] == str(found[0]["prompt_uid"] + 1)


def test_the_newer_form_groups_and_filters_that_miles_ships(run, tmp_path):
    """An execution that split in two counts as one rollout; the scorer takes the group; the filter is Miles's own."""
    outcome = run(*GENERATE, at("one_turn"), "--custom-rm-path", at("rewards"), "--no-apply-chat-template",
                  "--input-key", "label", "--dynamic-sampling-filter-path",
                  "miles.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std", "--num-rollout", "1")
    assert outcome.code == 0, outcome.err
    assert {call["samples"] for call in calls_in(tmp_path, "rewards")} == {8}, "two of each of four executions"
    samples = list(read_samples(sample_file(tmp_path / "runs" / "a", "rollout", 0)))
    assert [one["index"] for one in samples] == [*range(8)] * 4
    assert [one["reward"] for one in samples] == [0.0, 0.0, 1.0, 1.0] * 8


@pytest.mark.parametrize(("code", "flags", "words"), [
    (2, [*REWARD, "--data-source-path", at("Source")], "add --prompt-source custom"),
    (2, [*REWARD, "--generate", "custom"], "--generate custom needs a function ... generate(args, sample"),
    (2, [*REWARD, *GENERATE, at("keep")], "a plain function, and it is awaited ... async generate(args, sample"),
    (2, [*REWARD, "--dynamic-sampling-filter-path", at("log")], "log(rollout_id, args, ... keep(args, samples)"),
    (2, [*REWARD, "--dynamic-sampling-filter-path", "miles.ray.placement_group.create"],
     "No module named 'miles.ray' ... a function may import ... miles.utils.types"),
    (2, [*REWARD, "--custom-megatron-post-save-hook-path", at("post_save")], "nothing is saved ... add --save FOLDER"),
    (2, [*REWARD, "--rollout-all-samples-process-path", at("process"), "--max-lag", "1"], "got max_lag 1"),
    (2, [*REWARD, "--prompt-source", "custom", "--data-source-path", at("NoSource")], "has no get_samples"),
    (1, [*REWARD, "--prompt-source", "custom", "--data-source-path", at("Empty")],
     "get_samples(1) should return one group ... got [] ... begins again"),
    (1, [*REWARD, *GENERATE, at("retokenised")],
     "trains on tokens that the engine did not draw ... append output_ids as they come"),
    (1, [*REWARD, *GENERATE, at("strange")], "not known here (got temprature) ... leave it out"),
    (1, [*REWARD, *GENERATE, at("pending")], "was left pending ... set sample.status"),
])  # fmt: skip
def test_what_does_not_fit_is_said(run, quiet, code, flags, words):
    outcome = run(*flags)
    assert outcome.code == code, outcome
    position = 0
    for part in words.split(" ... "):
        position = outcome.err.find(part, position)
        assert position >= 0, f"{part!r} is not in {outcome.err}"
    quiet(outcome)
