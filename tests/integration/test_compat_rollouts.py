"""Rollout functions, eval functions and what more of Miles's files carries over, through whole runs (plugin compat)."""

import json

import pytest
from miles_testing.forked import miles

from miles_core.record.events import read

FUNCTIONS = '''
import json

from megatron.core import mpu
from miles.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from miles.rollout.data_source import DataSource
from miles.rollout.inference_rollout.inference_rollout_common import InferenceRolloutFn
from miles.rollout.sglang_rollout import GenerateState, generate, generate_and_rm_group
from miles.utils.async_utils import run
from miles.utils.http_utils import post
from miles.utils.misc import load_function
from miles.utils.types import Sample


def note(name, **what):
    with open("called.jsonl", "a") as file:
        file.write(json.dumps({"function": name, **what}) + chr(10))


def rollout(args, rollout_id, data_buffer, evaluation=False):
    """One group too many is sampled; the one with the least reward goes back to the source."""
    import asyncio

    if evaluation:
        return RolloutFnEvalOutput({"own": {"rewards": [0.25] * 4, "truncated": [False] * 4}}, {"eval/mine": 5.0})
    groups = data_buffer.get_samples(args.rollout_batch_size + 1)

    async def sampled():
        state = GenerateState(args)
        return await asyncio.gather(*(generate_and_rm_group(state, group, state.sampling_params) for group in groups))

    groups = sorted(run(sampled()), key=lambda group: -sum(sample.reward for sample in group))
    note("rollout", rollout=rollout_id, uids=[group[0].group_index for group in groups], buffer=len(data_buffer.buffer))
    return RolloutFnTrainOutput(groups[:args.rollout_batch_size], {"mine": rollout_id})


def sums(args, rollout_id, data_buffer, evaluation=False):
    """Prompts that the function has itself, for samples that come without."""
    groups = data_buffer.get_samples(args.rollout_batch_size)
    note("sums", dataset=args.rollout_global_dataset, uids=[group[0].group_index for group in groups],
         prompts=[sample.prompt for group in groups for sample in group])
    for sample in (one for group in groups for one in group):
        sample.prompt = f"{sample.group_index}+1="

    async def sampled():
        state = GenerateState(args)
        return [await generate_and_rm_group(state, group, state.sampling_params) for group in groups]

    return RolloutFnTrainOutput(run(sampled()), {})


def offline(args, rollout_id, data_buffer, evaluation=False):
    """Answers that somebody wrote, and that nobody samples."""
    groups = data_buffer.get_samples(args.rollout_batch_size)
    for group in groups:
        for index, sample in enumerate(group):
            ids, answer = args.tokenizer(sample.prompt)["input_ids"], args.tokenizer(f"{index}")["input_ids"]
            sample.tokens, sample.response_length = [*ids, *answer], len(answer)
            sample.response, sample.reward, sample.status = f"{index}", float(index), Sample.Status.COMPLETED
    return RolloutFnTrainOutput(groups, {})


def recorded(args, rollout_id, data_buffer, evaluation=False):
    """The same, as another program drew them."""
    answered = offline(args, rollout_id, data_buffer)
    for sample in (one for group in answered.samples for one in group):
        sample.rollout_log_probs = [-1.0] * sample.response_length
    return answered


class Rollout(InferenceRolloutFn):
    async def _call_train(self, input):
        note("class", rollout=input.rollout_id, version=input.weight_version)
        return await super()._call_train(input)


async def even(args, sample, **kwargs):
    ids = sample.tokens[len(sample.tokens) - sample.response_length:]
    return sum(token % 2 == 0 for token in ids) / max(len(ids), 1)


async def two(args, sample, sampling_params):
    """Two agents: the second goes on with what the first said, and each has a reward of its own."""
    import copy

    args.rollout_max_context_len, args.mine = 64, 1
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    found, ids = [], args.tokenizer(sample.prompt)["input_ids"]
    for number in range(2):
        one = copy.deepcopy(sample)
        output = await post(url, {"input_ids": ids, "sampling_params": sampling_params, "return_logprob": True})
        one.tokens = list(ids)
        one.append_answer(output)
        one.update_from_meta_info(args, output["meta_info"])
        one.reward = float(number)
        ids = one.tokens
        found.append(one)
    return found


def hook(args, sample):
    note("hook", length=sample.response_length)
    sample.metadata["seen"] = True


def halves(args, samples):
    return {"tokens": [sample.tokens for sample in samples], "rewards": [sample.reward / 2 for sample in samples],
            "loss_masks": [[1] * sample.response_length for sample in samples]}


async def agent(base_url, prompt, request_kwargs, metadata, **kwargs):
    """Two turns with a client of its own token."""
    from openai import AsyncOpenAI

    messages = list(prompt)
    async with AsyncOpenAI(base_url=base_url + "/v1", api_key="EMPTY") as client:
        for _ in range(2):
            answer = await client.chat.completions.create(model="any", messages=messages,
                                                          **{**request_kwargs, "max_tokens": 4})
            messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "go on"}]
    return {"turns": 2, "note": "free text"}


def pick(samples, session_metadata):
    note("pick", turns=session_metadata["turns"], leaf=samples[0].metadata["leaf"]["node_id"])
    return samples


def postprocess(samples, session_metadata):
    for sample in samples:
        sample.reward = 0.5 * session_metadata["turns"]
    return samples


def provider(pre_process=True, post_process=True, vp_stage=None):
    from miles.backends.megatron_utils.model_provider import get_model_provider_func

    model = get_model_provider_func(None)(pre_process=pre_process, post_process=post_process)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embedding" not in name)
    note("provider", parameters=sum(1 for _ in model.parameters()))
    return model


def before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    note("train_step", ranks=mpu.get_data_parallel_world_size())
'''


@pytest.fixture
def run(run_file, tmp_path):
    """(*flags) -> the metrics of each rollout, those of evaluations, and the calls that were noted."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    path = run_file()

    def go(*flags, name="0"):
        outcome = miles(["run", path, "--no-live", "--run-dir", f"runs/{name}", "--num-rollout", "2", *flags], tmp_path)
        assert outcome.code == 0, outcome
        events = [*read(tmp_path / "runs" / name / "events.jsonl")]
        metrics = [one["metrics"] for one in events if one["event"] == "metrics"]
        called = tmp_path / "called.jsonl"
        calls = [json.loads(line) for line in called.read_text().splitlines()] if called.exists() else []
        return metrics, events, calls

    return go


def at(name):
    return f"./functions.py:{name}"


def test_a_rollout_function_of_ones_own_has_the_schedule(run, tmp_path):
    """It draws its prompts and has them scored; what it returns is trained on. The file imports Megatron at its top."""
    (tmp_path / "eval.jsonl").write_text(json.dumps({"prompt": "1+1=", "label": "2"}) + "\n")
    metrics, events, calls = run(
        "--rollout-function-path", at("rollout"), "--custom-rm-path", at("even"), "--eval-prompt-data", "own",
        "eval.jsonl", "--n-samples-per-eval-prompt", "4", "--eval-interval", "1", "--skip-eval-before-train",
        "--custom-megatron-before-train-step-hook-path", at("before_train_step"),
        "--custom-convert-samples-to-train-data-path", at("halves"))  # fmt: skip
    rollouts = [call for call in calls if call["function"] == "rollout"]
    assert [call["rollout"] for call in rollouts] == [0, 1]
    assert sorted(rollouts[0]["uids"] + rollouts[1]["uids"]) == list(range(10)), "every prompt once"
    assert len(metrics) >= 2 and {call["ranks"] for call in calls if call["function"] == "train_step"} == {1}
    assert metrics[0]["rollout/rewards"] == pytest.approx(metrics[0]["rollout/raw_reward"] / 2), "the conversion's"
    evaluations = json.dumps([one for one in events if "eval/own" in json.dumps(one)])
    assert '"eval/own": 0.25' in evaluations


def test_a_rollout_function_brings_prompts_of_its_own(run):
    """No dataset is read, whatever names one, and a resumed run numbers on."""
    flags = ("--rollout-function-path", at("sums"), "--custom-rm-path", at("even"), "--disable-rollout-global-dataset",
             "--prompt-data", "nowhere.jsonl", "--save", "saved", "--save-interval", "1")  # fmt: skip
    metrics, _, calls = run(*flags, "--num-rollout", "1")
    assert len(metrics) == 1 and metrics[0]["train/grad_norm"] > 0 and 0 < metrics[0]["rollout/raw_reward"] < 1
    assert calls == [{"function": "sums", "dataset": False, "uids": [0, 1, 2, 3], "prompts": [""] * 16}]
    _, _, calls = run(*flags, "--load", "saved", name="1")
    assert [call["uids"] for call in calls] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(("function", "loss"), [("offline", ()), ("offline", ("--loss-type", "sft_loss")),
                                                ("recorded", ())])
def test_a_rollout_function_that_samples_nothing_needs_no_engine(run, function, loss):
    """How far the log-probs are from the trainer's is told, on average and at most, where it brings any."""
    metrics, events, _ = run("--rollout-function-path", at(function), "--debug-train-only", *loss)
    assert [one["rollout/raw_reward"] for one in metrics] == [1.5] * 2 and metrics[-1]["train/grad_norm"] > 0
    assert not any(one["rollout/weight_version/lag"] for one in metrics)
    for one in metrics:
        told = {name.removeprefix("train/train_rollout_logprob_abs_diff") for name in one if "rollout_logprob" in name}
        assert told == ({"", "_fresh", "_max"} if function == "recorded" else set())
    assert not any("engine local" in event.get("text", "") for event in events)


def test_a_class_of_rollout_functions_builds_on_miles_own(run):
    metrics, _, calls = run("--rollout-function-path", at("Rollout"), "--custom-rm-path", at("even"))
    assert [call["rollout"] for call in calls if call["function"] == "class"] == [0, 1]
    assert [call["version"] for call in calls if call["function"] == "class"] == [1, 2] and len(metrics) == 2


def test_samples_of_one_execution_keep_their_rewards(run):
    """Each of two agents has its own; hooks see all of them, and a provider has changed the model."""
    metrics, _, calls = run(
        "--custom-generate-function-path", at("two"), "--rollout-sample-hook-path", at("hook"),
        "--custom-model-provider-path", at("provider"))  # fmt: skip
    assert metrics[0]["rollout/raw_reward"] == pytest.approx(0.5)
    assert len([call for call in calls if call["function"] == "hook"]) == 2 * 2 * 16
    assert any(call["function"] == "provider" for call in calls)


def test_an_agent_of_miles_talks_over_the_endpoint(run):
    """With any token, and its picker and postprocessor see what it returned."""
    metrics, _, calls = run(
        "--custom-agent-function-path", at("agent"), "--session-sample-picker-path", at("pick"),
        "--session-sample-postprocessor-path", at("postprocess"), "--use-session-server",
        "--rollout-max-response-len", "60")  # fmt: skip
    assert metrics[0]["rollout/raw_reward"] == 1.0
    assert {(call["turns"], call["leaf"]) for call in calls if call["function"] == "pick"} == {(2, 0)}
    assert len(calls) == 2 * 16


def test_a_resumed_run_goes_on_with_the_prompts_that_come_next(run):
    """As many as the function had drawn before, and not as many as it returned."""
    flags = ("--rollout-function-path", at("rollout"), "--custom-rm-path", at("even"), "--save", "saved",
             "--save-interval", "1")  # fmt: skip
    run(*flags, "--num-rollout", "1")
    _, _, calls = run(*flags, "--load", "saved", name="1")
    assert [(call["rollout"], sorted(call["uids"])) for call in calls if call["function"] == "rollout"] == [
        (0, [0, 1, 2, 3, 4]), (1, [5, 6, 7, 8, 9])]
