"""What the plugin reads from answers, what it refuses, what its routers do alone, and whole runs."""

from __future__ import annotations

import copy
import json

import mixture
import numpy as np
import pytest
import torch
from miles_megatron import cpu
from miles_r3.answers import routes_of
from miles_r3.plugin import Sizes
from miles_testing.forked import miles

from miles_core.errors import ConfigError, EngineError, TrainError, UnknownKeyError
from miles_core.plugins.bind import bind
from miles_core.plugins.plan import prepare
from miles_core.record.events import read
from miles_core.stages.rollout import Request, Response, SamplingParams, to_sample
from miles_core.types import Prompt

cpu.install()

from miles_r3 import passes  # noqa: E402 - after install()

SIZES = Sizes(layers=4, topk=2, experts=32)
BASE = ("--prompt-data", "x", "--rm-type", "math", "--num-rollout", "1", "--rollout-batch-size", "2")


def answer(routes, stream="train", again=None):
    """A sample of a prompt of three tokens and four drawn ones, and the answer that it came from."""
    prompt = Prompt(0, 0, "", (1, 2, 3), stream=stream)
    extra = {} if routes is None else {"routed_experts": routes}
    if again is not None:
        extra["computed_again"] = np.array(again, np.int8)
    response = Response(np.arange(4, dtype=np.int32), np.full(4, -1.0, np.float32), np.ones(4, np.int32), "stop", "",
                        extra)
    return to_sample(prompt, 0, Request("a", prompt.token_ids, SamplingParams(), 1), response), response


def drawn(rows=6, layers=4, topk=2):
    return np.arange(rows * layers * topk, dtype=np.int32).reshape(rows, layers, topk) % 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return mixture.checkpoint(tmp_path_factory.mktemp("moe"))


def made(folder, *flags, role="rollout"):
    """The plugin of a plan."""
    plan = prepare(None, ["--hf-checkpoint", str(folder), *BASE, "--no-bf16", *map(str, flags)])
    return bind(plan.selected, plan.config, role).instances["r3"]


def test_routes_come_from_the_answer_into_the_column(folder):
    plugin = made(folder, "--plugin", "r3")
    sample, response = answer(drawn())
    request = plugin.generate_request(Request("a", (1, 2, 3), SamplingParams(), 1), sample.prompt)
    assert request.want == {"routed_experts"}
    column = plugin.generate_response(sample, response).columns["routed_experts"]
    assert column.dtype == np.uint8 and np.array_equal(column, drawn())


def test_an_evaluation_does_without(folder):
    plugin = made(folder, "--plugin", "r3")
    sample, response = answer(None, stream="eval/aime")
    request = Request("a", (1, 2, 3), SamplingParams(), 1)
    assert plugin.generate_request(request, sample.prompt) is request
    assert "routed_experts" not in plugin.generate_response(sample, response).columns


@pytest.mark.parametrize(("routes", "message"), [
    (None, "returns no routed experts.*enable-return-routed-experts"),
    (drawn(rows=5), r"\[6, 4, 2\].*got \[5, 4, 2\]"),
    (drawn(layers=3), r"\[6, 4, 2\].*got \[6, 3, 2\].*another model"),
    (drawn(topk=4), r"got \[6, 4, 4\]"),
    (drawn() + 1, "below 32.*got 1 to 32"),
    (drawn() - 2, "below 32.*got -2 to 29"),
    (drawn().ravel(), "got \\[48\\]"),
], ids=["none", "rows", "layers", "topk", "beyond", "negative", "flat"])  # fmt: skip
def test_an_answer_that_does_not_fit_the_model_is_an_error(folder, routes, message):
    plugin = made(folder, "--plugin", "r3")
    with pytest.raises(EngineError, match=f"(?s){message}"):
        plugin.generate_response(*answer(routes))


@pytest.mark.parametrize(("flags", "left_out"), [((), [3]), (("--r3.drop-computed-again",), [2, 3])])
def test_what_a_server_computed_again_by_newer_weights_is_left_out(folder, flags, left_out):
    plugin = made(folder, "--plugin", "r3", *flags)
    column = plugin.generate_response(*answer(drawn(), again=[0, 0, 1, 2, 0, 0])).columns["routed_experts"]
    assert np.flatnonzero((column == 255).all((1, 2))).tolist() == left_out
    assert np.array_equal(np.delete(column, left_out, 0), np.delete(drawn(), left_out, 0))


def test_an_answer_tells_no_routes_of_what_a_conversation_drew_from_older_weights():
    """Earlier turns were computed again by the weights of the last one."""
    sample, response = answer(drawn())
    sample.columns["versions"] = np.array([0, 0, 1, 1], np.int32)
    column = routes_of(sample, response, SIZES)
    assert np.flatnonzero((column == 255).all((1, 2))).tolist() == [2, 3]
    assert np.array_equal(np.delete(column, [2, 3], 0), np.delete(drawn(), [2, 3], 0))


@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_routes_are_those_of_the_answer_and_not_of_its_buffer(dtype):
    routes = drawn().astype(dtype)
    routes_of(*answer(routes, again=[2] * 6), SIZES)
    assert np.array_equal(routes, drawn())


@pytest.mark.parametrize(("experts", "dtype", "none"), [(255, "uint8", 255), (256, "int16", -1), (None, "int16", -1)])
def test_routes_are_bytes_where_a_number_is_left_for_none(experts, dtype, none):
    """Bytes that come as such are not copied."""
    sizes = Sizes(layers=4, topk=2, experts=experts)
    for sent in (np.int32, np.int16):
        routes = drawn().astype(sent)
        routes[2] = -1
        column = routes_of(*answer(routes), sizes)
        assert column.dtype == dtype == sizes.dtype and (column[2] == none).all()
    routes = drawn().astype(np.uint8)
    assert np.shares_memory(routes_of(*answer(routes), sizes), routes) == (dtype == "uint8")


def test_no_expert_is_the_same_from_both_kinds_of_routes():
    routes = torch.tensor([[-1, 3], [254, 0]], dtype=torch.int16)
    assert passes.numbers(routes.to(torch.uint8)).tolist() == passes.numbers(routes).tolist() == [[-1, 3], [254, 0]]


@pytest.mark.parametrize(("flags", "message"), [
    (("--moe-router-fusion",), "fused router.*moe_router_fusion"),
    (("--r3.compare-every", -1), "counts rollouts.*-1"),
    (("--use-routing-replay", "--use-rollout-logprobs"), "log-prob pass, which this run does not have"),
    (("--use-routing-replay", "--skip-actor-forward-only"), "log-prob pass, which this run does not have"),
    (("--use-routing-replay", "--r3.compare-every", 2), "compare_every is about the engine"),
])
def test_what_cannot_be_replayed_is_refused(folder, flags, message):
    with pytest.raises(ConfigError, match=message):
        made(folder, "--plugin", "r3", *flags)


def test_a_dense_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match="mixtures of experts, and this model has none.*qwen3"):
        made(tmp_path, "--plugin", "r3", "--plan-without-weights")


@pytest.mark.parametrize(("flags", "records"), [
    (("--plugin", "r3"), False), (("--use-rollout-routing-replay",), False), (("--use-routing-replay",), True),
    (("--use-routing-replay", "--use-rollout-routing-replay"), False),
])
def test_the_flags_of_miles_enable_it(folder, flags, records):
    plan = prepare(None, ["--hf-checkpoint", str(folder), *BASE, *flags])
    assert "r3" in [one.manifest.name for one in plan.selected]
    assert plan.config.surface("server")["enable_return_routed_experts"]
    assert plan.config.surface("megatron")["moe_enable_routing_replay"]
    plugin = made(folder, *flags)
    assert plugin.records == records
    request = plugin.generate_request(Request("a", (1,), SamplingParams(), 1), Prompt(0, 0, "", (1,)))
    assert bool(request.want) != records


def test_indices_of_sparse_attention_are_still_refused(folder):
    with pytest.raises(UnknownKeyError, match="no indices of sparse attention"):
        prepare(None, ["--hf-checkpoint", str(folder), *BASE, "--use-indexer-replay"])


# ------------------------------------------------------------------------------------------------- a router alone


def routed(how, routes, gradient=True):
    """(probs, map, logits, counts) of Megatron's routing of six rows over eight experts in groups, with replay."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
    from miles_r3.passes import Counts, Forward, Routers
    from miles_r3.replay import Replay

    routers = Routers(1, 2)
    replay = Replay(0, routers)
    torch.manual_seed(0)
    logits = torch.randn(6, 8, requires_grad=gradient)
    if routes is not None:
        place = torch.tensor([0, 1, 2, 3, 4, -1])
        routers.under_way = Forward(torch.tensor(routes, dtype=torch.int16)[:, None], place, gradient, Counts())
    probs, chosen = topk_routing_with_score_function(logits, 2, router_replay=replay, **how)
    if routers.under_way is None:
        return probs, chosen, logits, None
    routers.under_way.settle()
    return probs, chosen, logits, routers.under_way.counts.totals


HOW = {
    "softmax after": {}, "softmax before": {"use_pre_softmax": True}, "sigmoid": {"score_function": "sigmoid"},
    "bias": {"score_function": "sigmoid", "expert_bias": torch.linspace(-1, 1, 8)},
    "groups": {"score_function": "sigmoid", "expert_bias": torch.linspace(-1, 1, 8), "num_groups": 4, "group_topk": 2,
               "scaling_factor": 2.5},
    "groups of softmax": {"use_pre_softmax": True, "num_groups": 2, "group_topk": 1},
}  # fmt: skip
GIVEN = [[0, 7], [7, 0], [3, 4], [-1, -1], [6, 1], [2, 2]]
"""The fourth is missing, and the last row is padding."""


@pytest.mark.parametrize("how", HOW)
def test_a_router_takes_the_given_experts_and_keeps_its_gradient(how):
    """Probabilities are those that the live scores of these experts have, whatever the score function; a row without
    routes is what Megatron makes of it."""
    options = HOW[how]
    probs, chosen, logits, counts = routed(options, GIVEN)
    free_probs, free, _, _ = routed(options, None)
    expected = torch.zeros(6, 8, dtype=torch.bool)
    for row, experts in enumerate(GIVEN):
        expected[row, experts] = True
    expected[3] = free[3]
    assert torch.equal(chosen, expected)
    assert torch.equal(probs[3], free_probs[3])
    scores = torch.sigmoid(logits) if "score_function" in options else torch.softmax(logits, -1)
    weights = torch.where(expected, scores, torch.zeros(()))
    if not options.get("use_pre_softmax"):
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * options.get("scaling_factor", 1.0)
    assert torch.allclose(probs[:5], weights[:5], atol=1e-6)
    wanted = torch.autograd.grad((weights[:5] * torch.arange(8)).sum(), logits, retain_graph=True)[0]
    got = torch.autograd.grad((probs[:5] * torch.arange(8)).sum(), logits)[0]
    assert torch.allclose(got, wanted, atol=1e-6) and got[:3].abs().amax(1).min() > 1e-3
    differ = int((free[[0, 1, 2, 4]] != expected[[0, 1, 2, 4]]).any(-1).sum())
    assert counts.tolist() == [5, 4, differ, 0] and differ > 0


def test_routes_that_no_router_chose_are_an_error():
    """An expert twice, or beyond: the rows choose freely, and the pass ends with an error."""
    from miles_r3.passes import Counts

    _, chosen, _, counts = routed({}, [[0, 0], [0, 9], [1, 2], [1, 2], [1, 2], [1, 2]])
    assert counts[3] == 2 and chosen[1].sum() == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.get_world_size", lambda: 1)
        with pytest.raises(TrainError, match="2 of 5 routed token-layers"):
            Counts(counts).metrics("train/r3")


def test_a_recompute_whose_routes_were_not_kept_is_an_error():
    """A checkpointing that the plugin does not see would silently mix two routings."""
    from miles_r3.passes import Routers
    from miles_r3.replay import Replay

    routers = Routers(3, 2)
    routers.in_step = True

    def free(scores, topk, **_):
        return torch.topk(scores, topk, dim=1)

    with pytest.raises(TrainError, match="recomputed, but its routing was not recorded"):
        Replay(2, routers).get_replay_topk(torch.randn(3, 4), 2, default_compute_topk=free)
    routers.in_step = False
    assert Replay(2, routers).get_replay_topk(torch.randn(3, 4), 2, default_compute_topk=free)[1].shape == (3, 2)


# ------------------------------------------------------------------------------------------------------ trainers


@pytest.mark.full
def test_routes_of_another_model_end_the_run(folder, one):
    """Columns that no engine of this run filled, such as saved rollouts of another one."""
    batch = mixture.rollout(folder)
    plan = prepare(None, ["--hf-checkpoint", str(folder), "--prompt-data", "x", "--num-rollout", "1", "--no-bf16",
                          "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--advantage-estimator", "grpo",
                          "--trainer-host", "process", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "512",
                          "--use-rollout-routing-replay"])
    other, twice = copy.deepcopy(batch), copy.deepcopy(batch)
    for sample in other.samples:
        sample.columns["routed_experts"] = sample.columns["routed_experts"][:, :3]
    twice.samples[3].columns["routed_experts"][2, 0] = 5
    with pytest.raises(TrainError, match="3 layers of 2 experts"):
        one.train(plan, [other])
    with pytest.raises(TrainError, match="1 of .* name an expert twice"):
        one.train(plan, [twice])
    assert one.train(plan, [batch])["steps"][0]["train/r3/replayed"] == 1


# ---------------------------------------------------------------------------------------------------------- runs

RUN_FILE = """
plugins = ["grpo", "./even.py"]
[checkpoint]
hf_checkpoint = "{folder}"
[rollout]
prompt_data = "train.jsonl"
input_key = "prompt"
label_key = "label"
apply_chat_template = true
num_rollout = 4
rollout_batch_size = 4
n_samples_per_prompt = 4
rollout_max_response_len = 24
rollout_ignore_eos = true
engine_dtype = "bfloat16"
rm_type = ["even"]
[perf]
bf16 = false
use_dynamic_batch_size = true
max_tokens_per_gpu = 128
[optimizer]
lr = 1e-3
[r3]
compare_every = 1
"""
EVEN = '''
"""The share of even token ids in an answer."""
from miles_core import hookimpl


class Even:
    """Scores the parity of token ids."""

    @hookimpl("reward", name="even")
    def even(self, sample):
        return float((sample.tokens[-sample.response_length:] % 2 == 0).mean())
'''


@pytest.fixture
def run(folder, tmp_path):
    """(*flags) -> metrics of each rollout."""
    mixture.tokenizer(folder)
    (tmp_path / "even.py").write_text(EVEN)
    rows = [{"prompt": [{"role": "user", "content": f"{10 + i}+{i}="}], "label": str(10 + 2 * i)} for i in range(32)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.toml").write_text(RUN_FILE.format(folder=folder))

    def start(*flags: str) -> list[dict]:
        outcome = miles(["run", "run.toml", "--no-live", "--run-dir", "run", *flags], tmp_path, timeout=240)
        assert outcome.code == 0, outcome.err
        return [event["metrics"] for event in read(tmp_path / "run/events.jsonl") if event["event"] == "metrics"]

    return start


@pytest.mark.integration
def test_a_run_replays_what_its_engine_routed(run):
    steps = run("--use-rollout-routing-replay", "--num-rollout", "2")
    assert len(steps) == 2
    for step in steps:
        assert "rollout/r3/replayed" not in step, "one step per rollout: no pass comes before it"
        assert step["train/r3/replayed"] == 1 and step["train/r3/routes_differ"] > 0.02
        assert step["rollout/r3/log_prob_diff_free"] > 5 * step["rollout/r3/log_prob_diff"]


SPANS = {
    "called back": ("--partial-rollout", "--batch-order", "window", "--over-sampling-batch-size", "8",
                    "--engine-max-batch", "6", "--rollout-max-response-len", "40", "--num-rollout", "3"),
    "retracted": ("--max-lag", "1", "--pause-generation-mode", "retract", "--engine-max-batch", "2",
                  "--rollout-max-response-len", "80", "--num-rollout", "2"),
}


@pytest.mark.full
@pytest.mark.integration
@pytest.mark.parametrize("how", SPANS)
def test_an_answer_of_several_versions_keeps_the_routes_of_each(run, how, tmp_path):
    """Tokens that were drawn before a sync keep the routes that they were drawn with, though all before them is
    computed again. Every row is replayed, and answers of the weights of now agree as they do without any of it."""
    steps = run("--use-rollout-routing-replay", *SPANS[how])
    files = sorted((tmp_path / "run/samples").glob("rollout_*.jsonl"))
    versions = [set(json.loads(line)["versions"]) for path in files for line in path.read_text().splitlines()]
    assert max(map(len, versions)) > 1, "no answer went on after a sync"
    assert all(step["train/r3/replayed"] == 1 for step in steps)
    assert steps[0]["rollout/r3/log_prob_diff_free"] > 5 * steps[0]["rollout/r3/log_prob_diff"]


@pytest.mark.full
@pytest.mark.integration
def test_a_run_replays_its_own_log_prob_pass(run):
    steps = run("--use-routing-replay", "--num-rollout", "2", "--r3.compare-every", "0", "--num-steps-per-rollout", "2")
    assert all(step["train/r3/replayed"] == 1 and step["train/r3/routes_differ"] > 0 for step in steps)
    assert not any("rollout/r3/replayed" in step for step in steps)
