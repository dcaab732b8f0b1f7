"""Conversations of several turns: ids that are only appended to, and columns that say who wrote which.

The engine of these tests draws what it is told; tokenizer, template, tools and sandbox are the real ones. The recipe's
test lets a real model draw.
"""

import asyncio
import copy
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_tools.conversation import Conversations, check
from miles_tools.plugin import Tools, ToolsOptions
from miles_tools.sandbox import Limits, Sandbox
from miles_tools.template import Template
from miles_tools.toolbox import Toolbox, load
from miles_tools.transcript import Transcript

from miles_core import rng
from miles_core.columns import Columns
from miles_core.config.tables import Checkpoint, Rollout, RunConfig
from miles_core.errors import ConfigError, DataError
from miles_core.stages.rollout import Generation, Response, SamplingParams
from miles_core.types import Prompt, Status

MODEL = Path(__file__).parents[3] / "examples" / "arithmetic" / "tiny-qwen3"
ASK = ({"role": "user", "content": "12*34="},)
CONTEXT = 1024


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def sandbox():
    made = Sandbox(Limits(), workers=1)
    yield made
    made.close()


@pytest.fixture(scope="module")
def talks(tokenizer, sandbox):
    """(options) -> conversations with the tools calc and python."""
    toolbox = Toolbox(load(["calc", "python"]), sandbox)

    def make(context=CONTEXT, **options):
        options = ToolsOptions(**{"tool_format": "tag", **options})
        return Conversations(Template(tokenizer, {}, toolbox.schemas), toolbox, options, context)

    return make


class Scripted:
    """An engine that draws these turns, one after the other, and remembers what it was asked."""

    def __init__(self, turns):
        self.turns, self.requests = list(turns), []
        self.version = min((versions[0] for _, _, versions, _ in self.turns if versions), default=7)

    async def generate(self, request):
        ids, log_probs, versions, reason = self.turns[len(self.requests)]
        self.requests.append(request)
        self.version = max(self.version, *versions, 0)  # weights came while it drew
        if len(ids) > request.sampling.max_new_tokens:
            ids, reason = ids[: request.sampling.max_new_tokens], "length"
        size = len(ids)
        return Response(np.array(ids, np.int32), np.array(log_probs[:size], np.float32),
                        np.array(versions[:size], np.int32), reason, figures={"spec_accept_rate": 0.5})


def drawn(tokenizer, text, reason="stop", version=7):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids, [-0.25] * len(ids), [version] * len(ids), reason


def talk(talks, tokenizer, turns, *, most=512, least=0, begun=(), skip=False, read=lambda sample, response: sample,
         stop=(), **options):
    """(sample, engine) of one conversation."""
    engine = Scripted(turn if isinstance(turn, tuple) else drawn(tokenizer, turn) for turn in turns)
    generation = Generation(
        engine=engine, samples=1, begun=begun,
        sampling=SamplingParams(max_new_tokens=most, min_new_tokens=least, skip_special_tokens=skip, stop=stop),
        key=lambda index, turn: rng.key(0, "train", 5, index, turn), timeout=10.0, on_response=read,
        decode=lambda ids, skip: tokenizer.decode(list(ids), skip_special_tokens=skip))  # fmt: skip
    prompt = Prompt(5, 5, "", (0,), messages=ASK)
    sample, = asyncio.run(talks(**options).group(prompt, generation))
    return sample, engine


def test_a_tools_answer_is_what_the_template_would_write(talks, tokenizer):
    sample, engine = talk(talks, tokenizer, ["<calc>12*34</calc><|im_end|>", "\\boxed{408}<|im_end|>"])
    messages = [*ASK, {"role": "assistant", "content": "<calc>12*34</calc>"}, {"role": "tool", "content": "408"},
                {"role": "assistant", "content": "\\boxed{408}"}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(sample.tokens) == whole.removesuffix("\n")
    assert sample.tokens.tolist() == tokenizer(whole, add_special_tokens=False)["input_ids"][:-1]
    first = tokenizer("<calc>12*34</calc><|im_end|>", add_special_tokens=False)["input_ids"]
    suffix = tokenizer("\n<|im_start|>tool\n408<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    assert sample.columns["loss_mask"].tolist()[: len(first) + len(suffix["input_ids"]) + 1] == [
        *[1] * len(first), *[0] * len(suffix["input_ids"]), 1]
    assert (sample.status, sample.text) == (Status.COMPLETED, "\\boxed{408}<|im_end|>")
    assert sample.metadata["conversation"].startswith("<calc>") and "tool\n408" in sample.metadata["conversation"]
    figures = sample.metadata["figures"]
    assert figures.pop("tool_time") > 0
    assert figures == {"turns": 2, "tool_calls": 1, "tool_errors": 0, "tool_overruns": 0, "spec_accept_rate": 0.5}


@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x":1}'])
def test_calls_in_a_prompt_are_written_as_the_model_writes_them(tokenizer, arguments):
    """OpenAI's form has arguments as text, which Qwen2.5's template, as most, would put in quotes."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = "{{ messages[-1].tool_calls[0].function.arguments | tojson }}"
    call = {"type": "function", "function": {"name": "calc", "arguments": arguments}}
    text = Template(own, {}).text([*ASK, {"role": "assistant", "content": "", "tool_calls": [call]}], "row 0")
    assert text == '{"x": 1}'


def test_scorers_see_the_special_tokens_that_the_run_keeps(talks, tokenizer):
    """--rollout-skip-special-tokens, as of a single turn; calls are looked for in all of it."""
    sample, engine = talk(talks, tokenizer, ["<calc>12*34</calc><|im_end|>", "\\boxed{408}<|im_end|>"], skip=True)
    assert sample.text == "\\boxed{408}" and len(engine.requests) == 2
    assert sample.metadata["conversation"].endswith("<|im_end|>")


TOKEN = st.integers(0, 263)
TURN = st.tuples(st.lists(TOKEN, min_size=1, max_size=12), st.booleans(), st.booleans(), st.integers(0, 2))


@settings(max_examples=60, deadline=None)
@given(st.lists(TURN, min_size=1, max_size=4), st.integers(1, 120), st.randoms(use_true_random=False))
def test_ids_are_only_appended_to_and_columns_belong_to_their_tokens(talks, tokenizer, plans, most, random):
    turns, version = [], 1
    for noise, calls, closed, newer in plans:
        text = "<calc>1+1</calc>" if calls else ""
        ids = [*noise, *tokenizer(text, add_special_tokens=False)["input_ids"], *([258] if closed else [])]
        version += newer
        turns.append((ids, [-random.random() - 0.01 for _ in ids], [version] * len(ids), "stop"))
    turns.append(drawn(tokenizer, "done<|im_end|>", version=version))
    sample, engine = talk(talks, tokenizer, turns, most=most)

    Columns().check(sample)
    requests, at = engine.requests, sample.length - sample.response_length
    assert requests[0].input_ids == tuple(sample.tokens[:at].tolist())
    mask = np.zeros(sample.response_length, np.uint8)
    log_probs, versions = np.zeros(len(mask), np.float32), np.zeros(len(mask), np.int32)
    for request, later, (ids, given_log_probs, given_versions, _) in itertools.zip_longest(
            requests, requests[1:], turns[: len(requests)]):
        ids = ids[: request.sampling.max_new_tokens]
        if later is not None:
            assert later.input_ids[: len(request.input_ids) + len(ids)] == (*request.input_ids, *ids)
        begin = len(request.input_ids) - at
        span = slice(begin, begin + len(ids))
        assert sample.tokens[at:][span].tolist() == ids
        mask[span], log_probs[span], versions[span] = 1, given_log_probs[: len(ids)], given_versions[: len(ids)]
        versions[span.stop:] = versions[span.stop - 1] if span.stop else 0  # a suffix has its turn's
    np.testing.assert_array_equal(sample.columns["loss_mask"], mask)
    np.testing.assert_array_equal(sample.columns["rollout_log_probs"], log_probs)
    np.testing.assert_array_equal(sample.columns["versions"], versions)
    assert sample.response_length <= most and sample.length <= CONTEXT
    assert [request.key for request in requests] == [rng.key(0, "train", 5, 0, turn) for turn in range(len(requests))]
    assert mask[-1:].all(), "nothing follows the last drawn token"


def test_prompt_and_response_stay_within_the_context(talks, tokenizer):
    size = len(tokenizer.apply_chat_template(list(ASK), add_generation_prompt=True, return_dict=False))
    sample, _ = talk(talks, tokenizer, ["x" * 99], context=size + 10)
    assert (sample.length, sample.status) == (size + 10, Status.TRUNCATED)
    with pytest.raises(DataError, match=r"with its tools and leaves no room"):
        talk(talks, tokenizer, ["x"], context=size)


def test_a_suffix_that_leaves_no_room_to_answer_is_not_appended(talks, tokenizer):
    call = "<calc>1+1</calc><|im_end|>"
    size = len(drawn(tokenizer, call)[0])
    sample, engine = talk(talks, tokenizer, [call], most=size + 5)
    assert (sample.status, sample.response_length, len(engine.requests)) == (Status.TRUNCATED, size, 1)


def test_a_turn_need_not_have_more_tokens_than_there_is_room_for(talks, tokenizer):
    """An engine refuses such a request: what tools wrote takes room and is not drawn."""
    _, engine = talk(talks, tokenizer, ["<calc>1</calc><|im_end|>", "1<|im_end|>"], most=60, least=55)
    first, second = ((one.sampling.min_new_tokens, one.sampling.max_new_tokens) for one in engine.requests)
    assert first == (55, 60) and second[0] == second[1] < 55


def test_turns_are_bounded(talks, tokenizer):
    sample, engine = talk(talks, tokenizer, ["<calc>1+1</calc><|im_end|>"] * 3, generate_max_turns=3)
    assert (sample.status, len(engine.requests)) == (Status.TRUNCATED, 3)
    assert sample.metadata["figures"]["turns"] == 3 and sample.metadata["figures"]["tool_calls"] == 2


STUCK = """
import time
def stuck(text: str):
    \"\"\"Waits.

    Args:
        text: ignored.
    \"\"\"
    time.sleep(60)
"""


@pytest.mark.parametrize("turns", [["<stuck>x</stuck><|im_end|>"] * 9, ["<stuck>x</stuck>" * 9 + "<|im_end|>"]])
def test_a_tool_that_always_hangs_is_not_waited_for_in_every_turn(tokenizer, tmp_path, turns):
    (tmp_path / "tools.py").write_text(STUCK)
    sandbox = Sandbox(Limits(wall=0.2), workers=1)
    toolbox = Toolbox(load([str(tmp_path / "tools.py")]), sandbox)

    def talks():
        return Conversations(Template(tokenizer, {}), toolbox, ToolsOptions(tool_format="tag"), CONTEXT)

    try:
        sample, _ = talk(talks, tokenizer, turns)
    finally:
        sandbox.close()
    assert (sample.status, sample.metadata["figures"]["tool_overruns"]) == (Status.TRUNCATED, 3)
    assert sample.metadata["figures"]["tool_calls"] == 3


def test_an_ending_tool_ends_the_conversation_unrun(talks, tokenizer):
    sample, engine = talk(talks, tokenizer, ["<calc>1+1</calc><|im_end|>"], ending_tools=["calc"])
    assert (sample.status, len(engine.requests), sample.metadata["figures"]["tool_time"]) == (Status.COMPLETED, 1, 0)


@pytest.mark.parametrize(("turn", "words"), [
    ("<tool_call>\n{\"name\": \"calc\", \"arguments\": {\"expression\": \"6*7\"}}\n</tool_call>", "tool\n42<"),
    ("<tool_call>{\"name\": \"calc\", \"arguments\": \"{\\\"expression\\\": \\\"6*7\\\"}\"}</tool_call>", "tool\n42<"),
    ("<tool_call>{'name': 'calc'}</tool_call>", "error: the call is not JSON: Expecting property name"),
    ("<tool_call>{\"name\": \"calc\"", "error: the call is not closed: write </tool_call> after it"),
    ("<tool_call>[1]</tool_call>", "error: the call should be {\"name\": ..., \"arguments\": {...}}"),
    ("<tool_call>" + "[" * 1000 + "</tool_call>", "error: the call is not JSON"),
    ("<tool_call>{\"name\": \"cal\", \"arguments\": {}}</tool_call>", "no tool 'cal'; there are: calc, python"),
    ("<tool_call>{\"name\": \"calc\", \"arguments\": {\"x\": 1}}</tool_call>", "unexpected keyword argument 'x'"),
    ("<tool_call>{\"name\": \"calc\", \"arguments\": {\"expression\": \"1/0\"}}</tool_call>", "ZeroDivisionError"),
    ("<tool_call>{\"name\": \"calc\", \"arguments\": {\"expression\": \"().x\"}}</tool_call>", "is not arithmetic"),
    ("<tool_call>{\"name\": \"python\", \"arguments\": {\"code\": \"print(6*7)\"}}</tool_call>", "tool\n42<"),
])  # fmt: skip
def test_a_call_is_answered_whatever_it_says(talks, tokenizer, turn, words):
    sample, _ = talk(talks, tokenizer, [f"{turn}<|im_end|>", "ok<|im_end|>"], tool_format="hermes", most=4000,
                     context=8000)
    assert words in sample.metadata["conversation"] and sample.status is Status.COMPLETED
    assert sample.metadata["figures"]["tool_errors"] == (words != "tool\n42<")


def test_calls_in_reasoning_are_not_made_and_several_are_answered_in_order(talks, tokenizer):
    first = "<think><calc>9*9</calc></think>a <calc>1+1</calc> b <calc>2+2</calc><|im_end|>"
    sample, _ = talk(talks, tokenizer, [first, "ok<|im_end|>"])
    said = sample.metadata["conversation"]
    assert "81" not in said and said.index("tool\n2<") < said.index("tool\n4<")
    assert sample.metadata["figures"]["tool_calls"] == 2


def test_a_fenced_block_is_a_program(talks, tokenizer):
    sample, _ = talk(talks, tokenizer, ["See:\n```python\nprint(6 * 7)\n```<|im_end|>", "ok<|im_end|>"],
                     tool_format="fenced")
    assert "tool\n42<" in sample.metadata["conversation"]


def test_a_long_answer_is_cut_with_a_mark_and_cannot_end_its_turn(talks, tokenizer):
    code = "print('<|im_' + 'end|>' + 'x' * 99)"
    sample, engine = talk(talks, tokenizer, [f"```python\n{code}\n```<|im_end|>", "ok<|im_end|>"],
                          tool_format="fenced", tool_response_tokens=40)
    assert "\n< |im_end|>" + "x" * 29 + "\n[cut: 40 of 110 tokens]<|im_end|>" in sample.metadata["conversation"]
    before, after = (list(request.input_ids) for request in engine.requests)
    assert after[len(before):].count(258) == 2, "the model's own turn and the tool's end; the forged one does not"


HOSTILE = """
import os, time
def bomb(text: str):
    \"\"\"A fork bomb.

    Args:
        text: ignored.
    \"\"\"
    while True:
        os.fork()
"""


def test_a_hostile_tool_is_answered_and_the_conversation_goes_on(tokenizer, tmp_path):
    (tmp_path / "tools.py").write_text(HOSTILE)
    sandbox = Sandbox(Limits(wall=2.0, processes=4), workers=1)
    toolbox = Toolbox(load([str(tmp_path / "tools.py")]), sandbox)

    def talks():
        return Conversations(Template(tokenizer, {}), toolbox, ToolsOptions(tool_format="tag"), CONTEXT)

    try:
        sample, _ = talk(talks, tokenizer, ["<bomb>x</bomb><|im_end|>"] * 2 + ["well<|im_end|>"])
    finally:
        sandbox.close()
    assert sample.status is Status.COMPLETED and sample.metadata["figures"]["tool_errors"] == 2
    assert sample.metadata["conversation"].count("error: it started more than 4 processes") == 2


def test_a_turn_that_a_stop_string_ended_is_closed_by_the_suffix(talks, tokenizer):
    sample, _ = talk(talks, tokenizer, ["<calc>1+1</calc>", "ok<|im_end|>"])
    assert "<calc>1+1</calc><|im_end|>\n<|im_start|>tool" in sample.metadata["conversation"]
    assert sample.columns["loss_mask"][len("<calc>1+1</calc>")] == 0


@pytest.mark.parametrize("stop", ["</calc>", "<|im_end|>"])
def test_a_stop_text_that_is_a_special_token_ends_no_turn(sandbox, tokenizer, stop):
    """It closes the call, and the turn's end follows as behind any stop text; the end itself may be such a text."""
    own, call = copy.deepcopy(tokenizer), "<calc>1+1</calc>"
    own.add_special_tokens({"additional_special_tokens": [*own.all_special_tokens, "</calc>"]})
    toolbox = Toolbox(load(["calc"]), sandbox)

    def talks():
        return Conversations(Template(own, {}), toolbox, ToolsOptions(tool_format="tag"), CONTEXT)

    sample, _ = talk(talks, own, [call + ("<|im_end|>" if stop == "<|im_end|>" else ""), "ok<|im_end|>"], stop=(stop,))
    assert sample.metadata["figures"]["tool_errors"] == 0
    assert call + "<|im_end|>\n<|im_start|>tool\n2<|im_end|>" in sample.metadata["conversation"]


def test_an_end_that_the_tokenizer_s_settings_do_not_name_stands_there_once(tokenizer):
    """As Phi's <|end|> and Llama's <|eom_id|>: special, but only added to the vocabulary."""
    from transformers import PreTrainedTokenizerFast

    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>",
                                    chat_template=tokenizer.chat_template)
    template, end = Template(plain, {}), plain.convert_tokens_to_ids("<|im_end|>")
    assert end not in plain.all_special_ids
    suffix = template.suffix([{"role": "tool", "content": "2"}], end)
    assert suffix and suffix[0] != end and template.without_end([5, end]) == [5]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("cut", range(4))
def test_a_conversation_that_was_called_back_goes_on_where_it_was(talks, tokenizer, cut, masked):
    """Also where what was drawn before is not trained on: the mask does not say any more who wrote a token."""
    turns = ["<calc>12*34</calc><|im_end|>", "\\boxed{408}<|im_end|>"]
    whole, _ = talk(talks, tokenizer, turns)
    first, second = (drawn(tokenizer, turn) for turn in turns)
    place = (0, 5, 0, 3)[cut]
    cut_turn = first if cut < 2 else second
    head = tuple(part[:place] for part in cut_turn[:3])
    tail = (cut_turn[0][place:], cut_turn[1][place:], [8] * len(cut_turn[0][place:]), "stop")
    begun, _ = talk(talks, tokenizer, [*([first] if cut >= 2 else []), (*head, "abort")])
    assert begun.status is Status.ABORTED
    begun.metadata = json.loads(json.dumps(begun.metadata | {"mark": "of a plugin"}))
    Columns().check(begun)
    if masked:
        begun.columns["loss_mask"] = np.zeros_like(begun.columns["loss_mask"])
        whole.columns["loss_mask"][:begun.response_length] = 0
    rest = [tail, *([drawn(tokenizer, turns[1], version=8)] if cut < 2 else [])]
    sample, engine = talk(talks, tokenizer, rest, begun=[begun])
    assert sample.status is Status.COMPLETED
    for name in ("tokens", "loss_mask", "rollout_log_probs"):
        np.testing.assert_array_equal(sample.columns[name], whole.columns[name], name)
    assert set(sample.columns["versions"].tolist()) == {7, 8} or place == 0
    assert engine.requests[0].resumed == tuple(head[0]), "what a stop string may have begun in"
    assert sample.metadata["figures"]["turns"] == 2 and sample.metadata["figures"]["tool_calls"] == 1
    assert sample.metadata["mark"] == "of a plugin" and "begun" not in sample.metadata
    assert engine.requests[0].key == rng.key(0, "train", 5, 0, 1 + (cut >= 2)), "no draw comes twice"
    again, engine = talk(talks, tokenizer, [], begun=[sample])
    assert again is sample and not engine.requests


@pytest.mark.parametrize(("count", "reason", "reads"), [(5, "abort", 1), (0, "abort", 0), (5, "stop", 1)])
def test_plugins_read_what_a_conversation_ends_with(talks, tokenizer, count, reason, reads):
    """One that was called back while a tool ran ends with the tool's answer, of which no answer of the engine tells."""
    ids, log_probs, versions, _ = drawn(tokenizer, "x" * count)
    seen = []
    sample, engine = talk(talks, tokenizer, ["<calc>12*34</calc><|im_end|>", (ids, log_probs, versions, reason)],
                          read=lambda sample, response: seen.append((sample.length, response)) or sample)
    assert len(engine.requests) == 2 and len(seen) == reads
    for length, response in seen:
        assert length == len(engine.requests[-1].input_ids) + len(response.output_ids) == sample.length


def test_a_resumed_conversation_without_room_is_truncated_as_it_is(talks, tokenizer):
    ids, log_probs, versions, _ = drawn(tokenizer, "x" * 8)
    begun, _ = talk(talks, tokenizer, [(ids, log_probs, versions, "abort")])
    sample, engine = talk(talks, tokenizer, [], begun=[begun], most=8)
    assert (sample.status, sample.response_length, engine.requests) == (Status.TRUNCATED, 8, [])


def test_a_transcript_refuses_a_suffix_before_anything_was_drawn():
    from miles_core.errors import EngineError

    with pytest.raises(EngineError, match="the engine drew nothing"):
        Transcript.begin([1, 2]).append_suffix([3])


def config(**rollout):
    return RunConfig(checkpoint=Checkpoint(hf_checkpoint=str(MODEL)),
                     rollout=replace(Rollout(apply_chat_template=True, generate="tools"), **rollout))


@pytest.mark.parametrize(("options", "rollout", "words"), [
    ({"tools": []}, {}, "generator tools"),
    ({"tools": ["clac"]}, {}, "no such built-in tool (got clac). Fix: use one of calc, python"),
    ({"tools": ["nowhere.py"]}, {}, "the file of tools cannot be read"),
    ({"tools": ["calc", "calc"]}, {}, "two tools are called 'calc'"),
    ({"tools": ["calc"], "ending_tools": ["submit"]}, {}, "unknown tool"),
    ({"tools": ["calc"]}, {"apply_chat_template": False}, "add --apply-chat-template"),
    ({"tools": ["calc"], "sandbox_workers": 0}, {}, "sandbox_workers should be positive"),
])  # fmt: skip
def test_bad_options_are_refused_before_anything_is_sampled(options, rollout, words):
    with pytest.raises((ConfigError, DataError)) as caught:
        Tools(ToolsOptions(**options), config(**rollout))
    assert words in str(caught.value)


@pytest.mark.parametrize(("source", "words"), [
    ("def f(:", "the file of tools does not run (got SyntaxError"),
    ("x = 1", "no such function (got no public function at all)"),
    ("def f(a):\n    'F.'", "no description can be made of tool 'f'"),
    ("def f(a: int):\n    'F.\\n\\n    Args:\\n        a: A.\\n    '\n    return a", None),
])  # fmt: skip
def test_tools_of_a_file_are_described_by_their_hints_and_docstrings(tmp_path, source, words):
    path = tmp_path / "tools.py"
    path.write_text(source)
    if words is None:
        tool = load([f"{path}:f"])["f"]
        assert tool.schema["function"]["parameters"]["properties"] == {"a": {"type": "integer", "description": "A."}}
        return
    with pytest.raises(ConfigError) as caught:
        load([str(path)])
    assert words in str(caught.value)


def test_a_template_that_rewrites_history_is_refused_at_start(tmp_path):
    path = tmp_path / "rewriting.jinja"
    path.write_text("{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1].lstrip('\n')"
                    " }}<|im_end|>\n{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}")
    with pytest.raises(DataError, match="it rewrites the reasoning of earlier turns") as caught:
        Tools(ToolsOptions(tools=["calc"]), config(chat_template_path=str(path)))
    assert "--tools.allow-rewriting-template" in str(caught.value)
    check(ToolsOptions(tools=["calc"], allow_rewriting_template=True), config(chat_template_path=str(path)))


THINKING = """
{%- set ns = namespace(asked=0) %}
{%- for m in messages if m.role == "user" %}{% set ns.asked = messages.index(m) %}{% endfor %}
{%- for m in messages %}
{%- set said = m.content.split("</think>")[-1].lstrip("\\n") %}
{%- set thought = m.content.split("</think>")[0].split("<think>")[-1].strip("\\n") if "</think>" in m.content else "" %}
{%- if m.role == "assistant" and loop.index0 > ns.asked and (thought or loop.last) %}
{{- "<|im_start|>assistant\\n<think>\\n" + thought + "\\n</think>\\n\\n" + said + "<|im_end|>\\n" }}
{%- elif m.role == "assistant" %}{{- "<|im_start|>assistant\\n" + said + "<|im_end|>\\n" }}
{%- elif m.role == "tool" %}{{- "<|im_start|>user\\n<answer>" + m.content + "</answer><|im_end|>\\n" }}
{%- else %}{{- "<|im_start|>" + m.role + "\\n" + m.content + "<|im_end|>\\n" }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}
{%- if enable_thinking is defined and not enable_thinking %}{{- "<think>\\n\\n</think>\\n\\n" }}{% endif %}{% endif %}
"""
"""How Qwen3's template treats reasoning: kept after the last question, dropped before it; empty where it is off."""


@pytest.mark.parametrize(("rollout", "options", "words"), [
    ({}, {}, None),  # a tool's answer is no question, so reasoning stays
    ({}, {"tool_role": "user"}, "it rewrites the reasoning of earlier turns"),
    ({"apply_chat_template_kwargs": {"enable_thinking": False}}, {}, "it rewrites"),  # the empty block is dropped later
])  # fmt: skip
def test_a_template_of_the_kind_of_qwen3_only_appends_between_tools(tmp_path, rollout, options, words):
    path = tmp_path / "thinking.jinja"
    path.write_text(THINKING)
    made = ToolsOptions(tools=["calc"], **options)
    if words is None:
        check(made, config(chat_template_path=str(path), **rollout))
        return
    with pytest.raises(DataError, match=words):
        check(made, config(chat_template_path=str(path), **rollout))


def test_a_template_without_a_tools_role_is_refused_at_start(tmp_path):
    path = tmp_path / "plain.jinja"
    path.write_text("{% for m in messages if m.role != 'tool' %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ")
    with pytest.raises(DataError, match="it leaves out messages of the role 'tool'"):
        check(ToolsOptions(tools=["calc"]), config(chat_template_path=str(path)))
