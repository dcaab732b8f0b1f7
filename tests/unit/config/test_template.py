"""What rendered prompts and the tokenizer's files show, as a plan looks at them."""

import json
from pathlib import Path

import pytest

from miles_core.errors import DataError
from miles_core.plugins.plan import prepare
from tests.misconfigurations.measure import ACCEPTED, REFUSED, argv, outcome

TINY = Path(__file__).parents[3] / "examples/arithmetic/tiny-qwen3"
USER = {"role": "user", "content": "1+1="}
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPENS = CHATML + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
DEAF = OPENS.replace("messages %", "messages if m.role != 'system' %")
THINKS = OPENS + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
HUMAN = "{% for m in messages %}{% if m.role == 'human' %}{{ m.content }}{% endif %}{% endfor %}"
SFT = ("--plugin", "sft", "--loss-type", "sft_loss", "--generate", "sft", "--n-samples-per-prompt", "1")
SHOWN = [USER, {"role": "assistant", "content": "2"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "1+1="}]}]
MODEL = json.loads((TINY / "tokenizer.json").read_text())["model"]
ADDED = {"id": 264, "content": "<new>", "special": True}


@pytest.fixture
def take(monkeypatch, tmp_path):
    """(messages or text, template, changes of the model's files, *flags): a plan of it."""
    def plan_of(prompt, template, changes, *flags):
        (tmp_path / "model").mkdir(exist_ok=True)
        for name in ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"):
            said = json.loads((TINY / name).read_text()) | changes.get(name, {})
            said["added_tokens"] = said.get("added_tokens", []) + changes.get("added", [])
            (tmp_path / "model" / name).write_text(json.dumps(said) if name != changes.get("cut") else '{"a": ')
        (tmp_path / "rows.jsonl").write_text(json.dumps(
            {"prompt": prompt, "label": "2"} if isinstance(prompt, str | list) else prompt))
        (tmp_path / "own.jinja").write_text(template)
        chat = ("--apply-chat-template", "--chat-template-path", "{here}/own.jinja") if template else ()
        model = ("--hf-checkpoint", "{here}/model", "--plan-without-weights")
        own = ["--prompt-data", "{here}/rows.jsonl", *model, *chat, *flags]
        gone = ["--rm-type", "--advantage-estimator", "--label-key"] if SFT[0] in flags else []
        monkeypatch.chdir(TINY.parents[2])
        prepare(None, argv({"flags": own, "without": gone + ["--apply-chat-template"] * (not template)}, tmp_path))

    return plan_of


def kwargs(**given):
    return ("--apply-chat-template-kwargs", json.dumps(given))


def ends(config, generation, tokenizer="<|im_end|>"):
    return {"config.json": {"eos_token_id": config}, "generation_config.json": {"eos_token_id": generation},
            "tokenizer_config.json": {"eos_token": tokenizer}}


BOS = {"tokenizer_config.json": {"bos_token": "<|endoftext|>", "add_bos_token": True}}


@pytest.mark.parametrize(("prompt", "template", "changes", "flags", "message"), [
    *(([USER | {"role": role}], OPENS, {}, (), f'know this role (got {role}). Fix: write "user"')
      for role in ("human", "User", "user ")),
    ([USER, {"role": "gpt", "content": "2"}], OPENS, {}, SFT, 'know this role (got gpt). Fix: write "assistant"'),
    (PARTS, OPENS, {}, (), "writes the parts of a message as Python prints them"),
    ([USER], "/models/chat.jinja", {}, (), "leaves out what the user says (got 1+1=)"),
    ([USER], HUMAN, {}, (), "leaves out what the user says"),
    ([USER], CHATML, {}, (), "the chat template opens no answer"),
    ([USER], OPENS, {}, kwargs(add_generation_prompt=False), "the chat template opens no answer"),
    ([USER], THINKS, {}, kwargs(enable_thinking="False"), "every text counts as true"),
    ([USER], THINKS, {}, kwargs(enable_thinkng=False), "has no such argument (got enable_thinkng)"),
    ([USER], THINKS, {}, kwargs(thinking=False), "Fix: write enable_thinking"),
    ([USER], OPENS + "<new>", {"added": [ADDED]}, (), "the prompt holds a token that the model does not have"),
    ("<new>1+1=", "", {"added": [ADDED]}, (), "<new> is 264, and config.json has a vocab_size of 264"),
    ("<|endoftext|>1+1=", "", BOS, (), "begins with the token that the tokenizer puts before every text"),
    ([USER], OPENS, ends(258, 258, "<|eot_id|>"), (), "none of the tokenizer's (got <|eot_id|>)"),
    ([USER], OPENS, {"cut": "tokenizer.json"}, (), "the tokenizer cannot be read: its file is not whole"),
    ([USER], OPENS, {"cut": "tokenizer_config.json"}, (), "the tokenizer cannot be read: its file is not whole"),
    ({"prompt": "x", "response": None}, "", {}, SFT, "'sft' needs the answer of every row, and here is none"),
    ({"prompt": "x", "response": 2}, "", {}, SFT, "here is none (got 2)"),
    ([USER], OPENS, {}, SFT, "here is none (got nothing under 'response')"),
    (SHOWN, OPENS, ends(256, 256), SFT, "learns to end with a token at which its exports do not stop"),
    ([{"role": "system", "content": "Add."}, USER], DEAF, {}, (), "leaves out what the system says (got Add.)"),
    ([USER], OPENS, {}, kwargs(tokenize=False), "no argument of a chat template, but of the call"),
    ([USER], OPENS, ends(40, [41]), (), "which is another model's (got eos_token_id 40, 41"),
    ([USER], OPENS, {"tokenizer_config.json": {"eos_token": 258}}, (), "eos_token should be text (got 258)"),
    ([USER], OPENS, {"tokenizer.json": {"model": MODEL | {"vocab": MODEL["vocab"] | {"zz": 300}}}}, (),
     "beyond the model's vocabulary: it is another model's (got 300"),
    ([USER], OPENS, {"tokenizer.json": {"model": {"type": "BPE", "vocab": {}}}}, (), "no vocabulary, or no merges"),
    ([USER], OPENS, {}, ("--rollout-stop", "<|im_start|>", "--rollout-skip-special-tokens"),
     "Fix: --rollout-stop-token-ids 257"),
], ids=str)
def test_what_they_show_is_refused(take, prompt, template, changes, flags, message):
    with pytest.raises(DataError) as caught:
        take(prompt, template, changes, *flags)
    assert message in str(caught.value), str(caught.value)


@pytest.mark.parametrize(("prompt", "template", "changes", "flags"), [
    ([USER | {"role": "human"}], HUMAN, {}, ()), ([{"role": "critic", "content": "Add."}, USER], OPENS, {}, ()),
    ([USER], THINKS, {}, kwargs(enable_thinking=False)), ([USER], OPENS, {}, kwargs(enable_thinking=False)),
    ([USER], "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}", {}, ()),
    ([USER], OPENS, {"added": [ADDED]}, ()), ("1+1=", "", BOS, ()), ("1+1=<|im_end|>", "", {}, ()),
    ([USER], OPENS, ends(256, 256), ()), (SHOWN, OPENS, ends(256, [256, 258]), SFT),
    (SHOWN, CHATML, {}, SFT),
    ([USER], OPENS, {}, ("--rollout-stop", "<|im_end|>", "--rollout-skip-special-tokens")),
    ([{"role": "system", "content": "Add."}, USER], OPENS, {}, ()), ([USER], OPENS, ends(40, [258]), ()),
    ([USER], OPENS, {"tokenizer.json": {"model": MODEL | {"vocab": MODEL["vocab"] | {"zz": 263}}}}, ()),
], ids=str)
def test_what_they_do_not_show_is_not(take, prompt, template, changes, flags):
    take(prompt, template, changes, *flags)


FORGETS = OPENS.replace("m.content", "(m.content if loop.last else m.content.split('</think>')[-1])")
MUTE = OPENS.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")


@pytest.mark.parametrize(("template", "flags", "words"), [
    (FORGETS, (), "it rewrites the reasoning of earlier turns"), (FORGETS, ("--tools.allow-rewriting-template",), None),
    (MUTE, (), "it leaves out messages of the role 'tool'"), (MUTE, ("--tools.tool-role", "user"), None),
    (OPENS, (), None), (FORGETS, None, None),
])
def test_a_conversation_that_is_appended_to_wants_a_template_that_only_appends(template, flags, words):
    tools = () if flags is None else ("--plugin", "tools", "--generate", "tools", "--tools.tools", "calc", *flags)
    found = outcome({"id": "one", "flags": [*tools, "--chat-template-path", "{here}/x.jinja"],
                     "files": {"x.jinja": template}})
    assert found.verdict == (REFUSED if words else ACCEPTED) and (words or "") in found.sentence, found


BASE = ends(256, 256, "<|endoftext|>")
TWO = [*SHOWN, {"role": "user", "content": "2+2="}, {"role": "assistant", "content": "<think>\nx\n</think>\n\n4"}]
THOUGHT = [USER, {"role": "assistant", "content": "<think>\nx\n</think>\n\n2"}, *TWO[2:]]
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
LLAMA = OPENS.replace("<|im_end|>", "</s>")
HEADED = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "calc", "arguments": '{"x": "1"}'}}]}
CALLS = OPENS.replace("{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
                      "{{ c.function | tojson }}</tool_call>{% endfor %}")
ENDS = "learns to end with a token at which its exports do not stop"


@pytest.mark.parametrize(("row", "template", "changes", "flags", "message"), [
    (SHOWN, OPENS, BASE, (), ENDS + " (got <|im_end|> is 258, and the end of a sequence 256)"),
    (SHOWN, OPENS, BASE, ("--rollout-stop-token-ids", "258"), None),
    (SHOWN, OPENS, BASE, ("--rollout-stop", "<|im_end|>"), None),
    (SHOWN, OPENS, ends(None, None, "<|endoftext|>"), (), ENDS),
    (SHOWN, OPENS, ends(256, [256, 258], "<|endoftext|>"), (), None),
    (SHOWN, PLAIN, BASE, (), None), (SHOWN, PLAIN, {}, ("--sft.no-sft-append-eos",), "nothing ends the demonstrations"),
    (SHOWN, PLAIN, {}, ("--sft.no-sft-append-eos", "--rollout-stop", "user:"), None),
    (SHOWN, PLAIN, {"tokenizer_config.json": {"eos_token": None}}, (), "nothing ends the demonstrations"),
    ({"prompt": "1+1=", "response": "2<|im_end|>"}, "", BASE, (), ENDS),
    ({"prompt": "1+1=", "response": "2"}, "", BASE, (), None),
    ({"prompt": "1+1=", "response": "2"}, "", ends(256, 256), (), ENDS),
    (SHOWN, LLAMA, {}, (), "no token of the tokenizer: it is another model's (got </s>)"),
    (SHOWN, LLAMA, {}, ("--rollout-stop", "</s>"), None),
    (SHOWN, LLAMA, {"added": [ADDED | {"id": 263, "content": "</s>"}]} | ends(263, 263, "</s>"), (), None),
    (SHOWN, CHATML + "<|im_start|>assistant\n", {}, (), "opens a further answer behind every conversation"),
    (SHOWN, PLAIN + "assistant: ", {}, (), "opens a further answer behind every conversation"),
    (SHOWN, OPENS + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}", {}, ("--sft.sft-last-turn-only",),
     None),
    (THOUGHT, FORGETS, {}, (), "does not show where the answer of message 1 is"),
    (THOUGHT, FORGETS, {}, ("--sft.sft-last-turn-only",), None), (THOUGHT, OPENS, {}, (), None),
    (SHOWN, CHATML + HEADED, {}, (), "alone it is rendered differently (got '<think>\\n', and in the whole '2"),
    (TWO[2:], CHATML + HEADED, {}, (), None),
    ([USER, CALL], OPENS, {}, (), "leaves out the calls of tools (got calc)"),
    ([USER, CALL], CALLS, {}, (), "are text, which the chat template quotes once more"),
    ([USER, CALL | {"tool_calls": [{"function": {"name": "calc", "arguments": {"x": "1"}}}]}], CALLS, {}, (), None),
    ([USER, SHOWN[1] | {"content": "2<|im_end|>"}], OPENS, {}, (), "ends with what the chat template writes behind it"),
], ids=str)
def test_demonstrations_show_where_answers_begin_and_end(take, row, template, changes, flags, message):
    given = (row, template, changes, *SFT, "--skip-actor-forward-only", *flags)
    if message is None:
        take(*given)
        return
    with pytest.raises(DataError) as caught:
        take(*given)
    assert message in str(caught.value), str(caught.value)


ASKS = "{% if tools %}{{ tools | tojson }} {% endif %}" + OPENS


@pytest.mark.parametrize(("form", "asks", "words"), [
    ("tag", '<tool_call>{"name": NAME}</tool_call>', "asks for calls in another form"), ("tag", "A call:", None),
    ("hermes", '<tool_call>{"name": NAME}</tool_call>', None), ("hermes", "A call:", None),
    ("hermes", "<tool_call><function=NAME></tool_call>", "writes calls in another form"),
    ("hermes", "{# [TOOL_CALLS] #}", "writes calls in another form"), ("fenced", "{# [TOOL_CALLS] #}", None),
])
def test_calls_are_read_in_the_form_that_the_template_asks_for(form, asks, words):
    template = ASKS.replace(" {% endif %}", f"{asks}{{% endif %}}", 1)
    found = outcome({"id": "one", "flags": ["--plugin", "tools", "--generate", "tools", "--tools.tools", "calc",
                                            "--tools.tool-format", form, "--chat-template-path", "{here}/x.jinja"],
                     "files": {"x.jinja": template}})
    assert found.verdict == (REFUSED if words else ACCEPTED) and (words or "") in found.sentence, found
