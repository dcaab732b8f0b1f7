"""What files of Miles and slime import is there, and does what their names say."""

import asyncio
import contextvars
import importlib
import json
import sys

import pytest
from miles_compat import modules
from miles_compat.agents import MATCHERS, build_chat_request_kwargs
from miles_compat.args import Args
from miles_compat.filters import call_dynamic_filter
from miles_compat.loading import SingletonMeta, run
from miles_compat.plugin import Compat, CompatOptions
from miles_compat.requests import (
    create_tool_call_parser,
    execute_tool_calls,
    tokenize_tool_responses,
    update_sample_with_tool_responses,
)
from miles_compat.sample import Sample, label_of
from miles_compat.scorers import _core, batched_async_rm, compute_score, grade_answer_verl
from miles_sglang.sync.disk import DiskSender
from miles_testing.tiny import tiny_checkpoint
from transformers import AutoTokenizer

from miles_core.config.tables import Perf, Rollout, RunConfig
from miles_core.errors import HookError


@pytest.fixture
def provided():
    """The modules, for the time of a test."""
    before, finders = set(sys.modules), list(sys.meta_path)
    modules.provide()
    yield
    sys.meta_path[:] = finders
    for name in {name for name in sys.modules if name.partition(".")[0] in ("miles", "slime")} - before:
        del sys.modules[name]


@pytest.mark.parametrize("package", ["miles", "slime"])
def test_every_name_can_be_imported(provided, package):
    for module in modules.NAMES:
        found = importlib.import_module(f"{package}.{module}")
        for name in modules.members(module):
            assert getattr(found, name) is not None, f"{module}.{name}"
    with pytest.raises(ImportError):
        importlib.import_module(f"{package}.ray.placement_group")
    with pytest.raises(AttributeError):
        importlib.import_module(f"{package}.utils.types").Nothing  # noqa: B018 - it raises


def test_a_function_of_miles_own_is_known_by_its_path():
    assert modules.ours("miles.rollout.generate_hub.multi_turn.generate")
    assert not modules.ours("mine.generate") and not modules.ours("miles.rollout.nothing.generate")


def test_a_sample_grows_by_the_engines_tokens_and_by_others():
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(tokens=[3, 4], log_probs=[-0.5, -0.25], text="ab")
    kept = sample.loss_mask
    sample.append_response_tokens(tokens=[5], trainable=False, text="c")
    assert (sample.tokens, sample.loss_mask, sample.rollout_log_probs) == ([1, 2, 3, 4, 5], [1, 1, 0], [-0.5, -0.25, 0])
    assert kept is sample.loss_mask and sample.response == "abc"
    with pytest.raises(ValueError):
        sample.append_response_tokens(tokens=[6])
    again = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    assert again.tokens == sample.tokens and again.status is Sample.Status.PENDING
    sample.validate()
    sample.strip_last_output_tokens(1, type("Tokenizer", (), {"decode": lambda self, ids: str(ids)})())
    assert sample.tokens == [1, 2, 3, 4] and sample.response_length == 2
    sample.reset_for_retry()
    assert sample.tokens == [] and sample.status is Sample.Status.ABORTED


def test_a_label_is_what_the_row_has():
    """For a scorer as for a function: a list, a number, or a text that only looks like one."""
    for label in ({"target": ["Paris"]}, ["a", "b"], 7, 0.5, True, "{1, 2}", '{"a": 1}', "7", "{", None):
        prompt = _core(Sample(label=label)).prompt
        assert label_of(prompt) == label and isinstance(prompt.label, str | None)
    assert _core(Sample(label=["a", "b"])).prompt.label == '["a", "b"]'


def test_scorers_of_the_run_answer_miles_functions():
    args = Args(RunConfig(rollout=Rollout(rm_type=["dapo"])))
    samples = [Sample(response=f"Answer: {number}", label="4") for number in (4, 5)]
    rewards = asyncio.run(batched_async_rm(args, samples))
    assert [reward["score"] for reward in rewards] == [1.0, -1.0]
    assert compute_score("Answer: 4", "4")["acc"] and compute_score(r"\boxed{4}", "4", strict_box_verify=True)["acc"]
    assert grade_answer_verl(r"so \boxed{\frac12}", "0.5") and not grade_answer_verl(None, "1")


def test_calls_of_tools_are_made_and_their_answers_are_not_trained_on():
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint())
    text = 'I look. <tool_call>{"name": "add", "arguments": {"x": 1, "y": 2}}</tool_call>'
    _, calls = create_tool_call_parser([], "qwen25").parse_non_stream(text)

    async def add(name, arguments):
        return f"{name}: {arguments['x'] + arguments['y']}"

    messages = asyncio.run(execute_tool_calls(calls, add))
    assert [(one["role"], one["name"], one["content"]) for one in messages] == [("tool", "add", "add: 3")]
    drawn = tokenizer.encode(text, add_special_tokens=False)
    sample = Sample(tokens=list(drawn), loss_mask=[1] * len(drawn), rollout_log_probs=[-1.0] * len(drawn))
    sample.response_length = len(drawn)
    update_sample_with_tool_responses(sample, messages, tokenizer)
    more = len(sample.tokens) - len(drawn)
    assert "add: 3" in sample.response and more > 0
    assert sample.loss_mask[-more:] == [0] * more and len(sample.loss_mask) == sample.response_length
    sample.validate()
    with pytest.raises(HookError):
        create_tool_call_parser([], "pythonic")


@pytest.mark.parametrize("end", ["<|im_end|>", ""])
def test_a_turn_ends_once_whoever_wrote_its_end(end):
    """The engine drew it, or the answer ended with a stop string and the template writes it."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint())
    sample = Sample(tokens=tokenizer.encode("Four?" + end, add_special_tokens=False))
    sample.response_length = len(sample.tokens)
    answer = [{"role": "tool", "name": "add", "content": "4"}]
    update_sample_with_tool_responses(sample, answer, tokenizer)
    assert tokenizer.decode(sample.tokens) == (
        "Four?<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n")
    after_an_end = "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenize_tool_responses(answer, tokenizer)) == after_an_end


def test_requests_of_agents_have_openais_names():
    params = {"temperature": 1.0, "max_new_tokens": 7, "top_k": -1, "stop": [], "no_stop_trim": True}
    assert build_chat_request_kwargs(params) == {"temperature": 1.0, "max_tokens": 7}


def test_messages_match_by_what_the_name_says():
    old = {"role": "assistant", "content": "a", "tool_calls": [
        {"id": "1", "function": {"name": "f", "arguments": '{"x": 1, "y": 2}'}}]}
    new = {"role": "assistant", "content": "a", "tool_calls": [
        {"id": "2", "function": {"name": "f", "arguments": '{"y": 2, "x": 1}'}}]}
    assert [MATCHERS[name](old, new) for name in ("strict", "loose_tool_call", "role_content_only")] == [
        False, True, True]
    assert not MATCHERS["role_content_only"](old, {**new, "content": "b"})


def test_plain_functions_wait_for_coroutines_and_singletons_are_one():
    async def answer():
        return 7

    class One(metaclass=SingletonMeta):
        pass

    assert run(answer()) == 7 and One() is One()
    assert call_dynamic_filter(None).keep and call_dynamic_filter(lambda: False).keep is False


def test_options_that_a_function_declares_have_their_defaults():
    def function():
        """Nothing."""

    function.add_arguments = lambda parser: parser.add_argument("--my-depth", type=int, default=3)
    args = Args(RunConfig(), {"my_other": 1})
    args.add_defaults(function)
    assert args.my_depth == 3 and args.my_other == 1


def test_whoever_names_a_function_is_told_of_weights_in_files(tmp_path, monkeypatch):
    """Once the trainer has begun, with the folder, before servers load it."""
    (tmp_path / "mine.py").write_text("CALLS = []\ndef written(args, folder, servers):\n"
                                      "    args.seen = (folder, servers)\n")
    monkeypatch.chdir(tmp_path)
    config = RunConfig(perf=Perf(weight_sync="disk"))
    plugin = Compat(CompatOptions(custom_update_weight_post_write_path="./mine.py:written"), config)
    context = contextvars.copy_context()
    context.run(plugin.megatron_init, config)
    order: list[str] = []

    class Noting(DiskSender):
        def _export(self, stream, folder):
            order.append(f"export {folder.name}, seen {hasattr(plugin.args, 'seen')}")

        def _load(self, folder):
            order.append(f"load {folder.name}, seen {plugin.args.seen[1]}")

    context.run(Noting(None, ("server",), tmp_path)._publish, iter(()), 3)
    assert order == ["export version-3, seen False", "load version-3, seen ['server']"]
    assert plugin.args.seen[0] == str(tmp_path / "version-3")
