"""Rows become demonstrations: tokens, masks, ends, and sentences for what cannot be cut."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest
from miles_sft.conversation import encode
from miles_sft.plugin import Sft, SftOptions
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from miles_core.columns import Columns
from miles_core.config import RunConfig
from miles_core.config.tables import Checkpoint, Rollout
from miles_core.errors import ConfigError, DataError
from miles_core.stages.rollout import Generation, Response, SamplingParams
from miles_core.types import Prompt, Status

OPEN, CLOSE, EOS = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
OPENING = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
CHATML = "{% for m in messages %}" + TURN + "{% endfor %}" + OPENING
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>\\n' }}{% else %}" + TURN
    + "{% endif %}{% endfor %}" + OPENING
)
FORGETFUL = (  # shows the reasoning of the last answer only
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    + OPENING
)
BARE = "{% for m in messages %}{{ m.role + ': ' + m.content + ' ' }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + CHATML


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with a byte-level tokenizer: a token per byte, and three special tokens."""
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
                                     merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS, OPEN, CLOSE])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "chat_template": CHATML,
                "additional_special_tokens": [OPEN, CLOSE], "clean_up_tokenization_spaces": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def plugin(checkpoint, template=None, options=None, **rollout):
    if template is not None:
        (checkpoint / "template.jinja").write_text(template)
        rollout["chat_template_path"] = str(checkpoint / "template.jinja")
    config = RunConfig(checkpoint=Checkpoint(hf_checkpoint=str(checkpoint)), rollout=Rollout(**rollout))
    return Sft(options or SftOptions(), config)


def chat(*turns):
    """Messages of alternating roles, the user's first."""
    return tuple({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns))


def generate(sft, *, messages=None, text="", token_ids=(), samples=1, engine=None, **prompt):
    row = Prompt(uid=0, row=4, text=text, token_ids=tuple(token_ids), messages=messages, **prompt)
    generation = Generation(engine or SimpleNamespace(version=0), SamplingParams(), samples, lambda sample, turn: 0,
                            lambda ids, skip: "", timeout=5.0)
    return asyncio.run(sft.generate(row, generation))


def trained(sft, sample):
    """The text of the tokens that are trained on."""
    response = sample.tokens[-sample.response_length :]
    return sft._tokenizer.decode(response[sample.columns["loss_mask"] > 0])


def test_a_conversation(checkpoint):
    sft = plugin(checkpoint)
    [sample] = generate(sft, messages=chat("1+1=", "2"))
    assert sft._tokenizer.decode(sample.tokens) == f"{OPEN}user\n1+1={CLOSE}\n{OPEN}assistant\n2{CLOSE}"
    assert sample.text == trained(sft, sample) == f"2{CLOSE}"
    assert sample.response_length == 2
    assert sample.reward == 0.0 and sample.status is Status.COMPLETED


def test_the_columns_are_the_cores(checkpoint):
    [sample] = generate(plugin(checkpoint), messages=chat("1+1=", "2"), engine=SimpleNamespace(version=7))
    Columns().check(sample)
    assert sample.columns["versions"].tolist() == [7, 7]
    assert sample.columns["rollout_log_probs"].tolist() == [0.0, 0.0]
    assert {name: array.dtype for name, array in sample.columns.items()} == {
        "tokens": np.int32, "loss_mask": np.uint8, "rollout_log_probs": np.float32, "versions": np.int32,
    }


def test_only_the_assistants_turns_are_trained(checkpoint):
    sft = plugin(checkpoint)
    [sample] = generate(sft, messages=chat("a", "B", "c", "D"))
    assert trained(sft, sample) == f"B{CLOSE}D{CLOSE}"
    assert sample.text == f"B{CLOSE}\n{OPEN}user\nc{CLOSE}\n{OPEN}assistant\nD{CLOSE}"


def test_the_last_turn_only(checkpoint):
    sft = plugin(checkpoint, options=SftOptions(sft_last_turn_only=True))
    [sample] = generate(sft, messages=chat("a", "B", "c", "D"))
    assert trained(sft, sample) == sample.text == f"D{CLOSE}"


@pytest.mark.parametrize("content", ["", "\n\nD  ", "日本 <b>", OPEN, "assistant\n"])
def test_any_answer_survives(checkpoint, content):
    sft = plugin(checkpoint)
    [sample] = generate(sft, messages=chat("a", content))
    assert trained(sft, sample) == content + CLOSE


OPENED = (  # as DeepSeek-R1-Distill: opens reasoning, and shows none of it afterwards
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' "
    "+ m.content.split('</think>')[-1] + '<|im_end|>' }}{% else %}" + TURN + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
THOUGHTFUL = CHATML.replace("m.content", "m.reasoning_content | default('') + m.content")
EMPTY = OPENED.replace("+ m.content.split('</think>')[-1]", "+ '<think></think>' + m.content")  # Nemotron 3's way


@pytest.mark.parametrize("template", [OPENED, EMPTY])
@pytest.mark.parametrize(("message", "written"), [
    ({"content": "2"}, "\n</think>\n\n2"), ({"content": "<think>\nwell\n</think>\n\n2"}, "well\n</think>\n\n2"),
    ({"content": "2", "reasoning_content": "well"}, "well\n</think>\n\n2"),
])
@pytest.mark.parametrize("before", [(), ("0+1=", "<think>one</think>1")])
def test_an_answer_is_written_behind_the_tag_that_opens_it(checkpoint, template, message, written, before):
    sft = plugin(checkpoint, template, SftOptions(sft_last_turn_only=True))
    [sample] = generate(sft, messages=(*chat(*before), *chat("1+1="), {"role": "assistant", **message}))
    assert trained(sft, sample) == sample.text == written + CLOSE
    opened = f"user\n1+1={CLOSE}\n{OPEN}assistant\n<think>\n"
    assert sft._tokenizer.decode(sample.tokens).endswith(opened + written + CLOSE)


@pytest.mark.parametrize(("template", "share"), [(CHATML, 0.5), (THOUGHTFUL, 0.0)])
def test_reasoning_for_which_the_template_has_no_place_is_counted(checkpoint, template, share):
    """Of the answers that have some; Qwen2.5's template and Llama's leave it out without a word."""
    sft = plugin(checkpoint, template)
    turns = ({"role": "assistant", "content": "because", "reasoning_content": "because"},
             {"role": "assistant", "content": "2", "reasoning_content": " well\n"},
             {"role": "assistant", "content": "none"})
    [sample] = generate(sft, messages=tuple(message for turn in turns for message in (*chat("x"), turn)))
    assert sample.metadata["figures"] == {"reasoning_left_out": share}
    last = plugin(checkpoint, template, SftOptions(sft_last_turn_only=True))
    [sample] = generate(last, messages=(*chat("a"), turns[1], *chat("b"), turns[2]))
    assert not sample.metadata, "what is not trained on is not missed"


@pytest.mark.parametrize("kind", ["qwen", "qwen3"])
@pytest.mark.parametrize("answer", ["end", "n", "im", "|>"])
def test_an_answer_that_is_in_its_end_token_too_ends_with_all_of_it(checkpoint, kind, answer):
    """Letters of a multiple choice, for instance, are in <|im_end|>."""
    sft = plugin(checkpoint, OPENED, SftOptions(sft_loss_mask_type=kind))
    [sample] = generate(sft, messages=chat("which?", answer))
    assert trained(sft, sample) == f"\n</think>\n\n{answer}{CLOSE}"


def test_one_answer_behind_a_tag_needs_no_option(checkpoint):
    sft = plugin(checkpoint, OPENED)
    [sample] = generate(sft, messages=chat("1+1=", "2"))
    assert trained(sft, sample) == f"\n</think>\n\n2{CLOSE}"


@pytest.mark.parametrize(("response", "written"), [
    ("2", "\n</think>\n\n2"), ("<think>\nwell\n</think>\n\n2", "well\n</think>\n\n2"), ("w</think>2", "w</think>2")])
@pytest.mark.parametrize("tools", [[], [{"name": "calc"}]])
def test_a_response_beside_its_prompt_goes_on_behind_the_tag_as_well(checkpoint, response, written, tools):
    sft, opening = plugin(checkpoint, OPENED), f"{OPEN}user\na{CLOSE}\n{OPEN}assistant\n<think>\n"
    row = {"token_ids": [5], "text": opening, "label": response, "metadata": {"tools": tools}}
    [sample] = generate(sft, messages=chat("a"), **row)
    assert trained(sft, sample) == written + EOS
    [sample] = generate(sft, **row)
    assert trained(sft, sample) == response + EOS, "the row's own text, of which nothing is known"


def test_the_end_of_a_question_is_no_tag_that_opens_an_answer(checkpoint):
    """As Gemma's <end_of_turn>, where a template writes no opening."""
    template = "{% for m in messages %}{{ m.content }}<end_of_turn>\n{% endfor %}"
    sft = plugin(checkpoint, template)
    [sample] = generate(sft, messages=chat("a"), token_ids=[5], text="a<end_of_turn>\n", label="2")
    assert trained(sft, sample) == f"2{EOS}"


@pytest.mark.parametrize("template", [FORGETFUL, OPENED])
def test_each_answer_by_itself_keeps_its_reasoning(checkpoint, template):
    """Miles's mask of that name; all but what the template forgets stands as in the whole conversation."""
    sft = plugin(checkpoint, template, SftOptions(sft_loss_mask_type="qwen3"))
    first, second = "<think>a</think>A", "<think>b</think>B"
    [sample] = generate(sft, messages=({"role": "system", "content": "s"}, *chat("x", first, "y", second)))
    opening = f"{OPEN}assistant\n" + ("<think>\n" if template is OPENED else "")
    each = [text.removeprefix("<think>") if template is OPENED else text for text in (first, second)]
    assert trained(sft, sample) == f"{each[0]}{CLOSE}{each[1]}{CLOSE}"
    text, gap = sft._tokenizer.decode(sample.tokens), "" if template is OPENED else "\n"
    assert text == (f"{OPEN}system\ns{CLOSE}\n{OPEN}user\nx{CLOSE}\n{opening}{each[0]}{CLOSE}{gap}"
                    f"{OPEN}user\ny{CLOSE}\n{opening}{each[1]}{CLOSE}")


def test_generation_blocks_say_where_answers_are(checkpoint):
    sft = plugin(checkpoint, MARKED)
    [sample] = generate(sft, messages=chat("a", "B", "c", "D"))
    assert trained(sft, sample) == f"BD{CLOSE}"
    last = plugin(checkpoint, MARKED, SftOptions(sft_last_turn_only=True))
    [sample] = generate(last, messages=chat("a", "B", "c", "D"))
    assert trained(last, sample) == f"D{CLOSE}"


def test_a_generation_block_with_the_whole_turn_ends_at_its_end_token(checkpoint):
    """SmolLM3's way: neither the line break behind an end token nor a second end is trained on."""
    whole = MARKED.replace("{{ '<|im_start|>assistant\\n' }}{% generation %}{{ m.content }}{% endgeneration %}"
                           "{{ '<|im_end|>\\n' }}", "{% generation %}" + TURN + "{% endgeneration %}")
    assert whole != MARKED
    sft = plugin(checkpoint, whole)
    [sample] = generate(sft, messages=chat("a", "B", "c", "D"))
    assert trained(sft, sample) == f"{OPEN}assistant\nB{CLOSE}{OPEN}assistant\nD{CLOSE}"
    assert sft._tokenizer.decode(sample.tokens).endswith(f"B{CLOSE}\n{OPEN}user\nc{CLOSE}\n{OPEN}assistant\nD{CLOSE}")


NEXT = ("{% for m in messages %}{{ '<|im_end|>' if m.role == 'tool' else '<|im_start|>' + m.role }}"
        "{{ '\\n' + m.content }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


@pytest.mark.parametrize("kind", ["qwen", "qwen3"])
def test_the_token_that_begins_the_next_turn_ends_an_answer_that_nothing_else_ends(checkpoint, kind):
    """GLM's way: <|observation|> says that a call is made, <|user|> that the turn is over."""
    sft = plugin(checkpoint, NEXT, SftOptions(sft_loss_mask_type=kind))
    turns = (*chat("a", "call"), {"role": "tool", "content": "1"}, chat("", "B")[1], *chat("c", "D"))
    [sample] = generate(sft, messages=turns)
    assert trained(sft, sample) == f"call{CLOSE}B{OPEN}D{EOS}"
    [sample] = generate(plugin(checkpoint, NEXT, SftOptions(sft_last_turn_only=True)), messages=turns)
    assert trained(sft, sample) == f"D{EOS}"


def test_a_template_that_rewrites_earlier_turns_is_refused(checkpoint):
    messages = chat("a", "<think>x</think>B", "c", "<think>y</think>D")
    with pytest.raises(DataError, match="train row 4.*message 1 differently.*--sft.sft-last-turn-only"):
        generate(plugin(checkpoint, FORGETFUL), messages=messages)
    last = plugin(checkpoint, FORGETFUL, SftOptions(sft_last_turn_only=True))
    [sample] = generate(last, messages=messages)
    assert trained(last, sample) == f"<think>y</think>D{CLOSE}"
    assert "assistant\nB" in last._tokenizer.decode(sample.tokens)


def test_an_answer_without_an_end_token_gets_eos(checkpoint):
    sft = plugin(checkpoint, BARE)
    [sample] = generate(sft, messages=chat("a", "B"))
    assert trained(sft, sample) == f"B {EOS}"
    without = plugin(checkpoint, BARE, SftOptions(sft_append_eos=False))
    [sample] = generate(without, messages=chat("a", "B"))
    assert trained(without, sample) == "B "


def test_template_errors_name_the_row(checkpoint):
    messages = ({"role": "system", "content": "s"}, *chat("a", "B"))
    with pytest.raises(DataError, match="train row 4.*user first"):
        generate(plugin(checkpoint, STRICT), messages=messages)


def test_text_and_response(checkpoint):
    sft = plugin(checkpoint)
    [sample] = generate(sft, text="1+1=", token_ids=[1, 2, 3], metadata={"response": "two"}, label="2")
    assert sample.tokens[:3].tolist() == [1, 2, 3]
    assert trained(sft, sample) == sample.text == f"two{EOS}"
    assert sample.response_length == 4


def test_the_label_where_there_is_no_response(checkpoint):
    sft = plugin(checkpoint, options=SftOptions(sft_response_key="answer"))
    [sample] = generate(sft, token_ids=[1], metadata={"response": "two"}, label="2")
    assert trained(sft, sample) == f"2{EOS}"
    [sample] = generate(sft, token_ids=[1], metadata={"answer": "zwei"}, label="2")
    assert trained(sft, sample) == f"zwei{EOS}"


def test_a_conversation_that_ends_with_a_question_needs_a_response(checkpoint):
    sft = plugin(checkpoint)
    [sample] = generate(sft, messages=chat("a"), token_ids=[5, 6], metadata={"response": "B"})
    assert sample.tokens[:2].tolist() == [5, 6] and trained(sft, sample) == f"B{EOS}"
    with pytest.raises(DataError, match="row 4.*no answer.*--sft.sft-response-key"):
        generate(sft, messages=chat("a"), token_ids=[5, 6])


@pytest.mark.parametrize("row", [{"metadata": {"response": ""}}, {"metadata": {"response": 3}}])
def test_an_answer_must_be_text_that_is_not_empty(checkpoint, row):
    with pytest.raises(DataError, match="train row 4"):
        generate(plugin(checkpoint), token_ids=[1], **row)


def test_an_answer_needs_something_before_it(checkpoint):
    with pytest.raises(DataError, match="no tokens precede"):
        generate(plugin(checkpoint), metadata={"response": "x"})


def test_the_context_limit_cuts_and_says_so(checkpoint):
    sft = plugin(checkpoint, rollout_max_context_len=4)
    [sample] = generate(sft, token_ids=[1, 2], metadata={"response": "long answer"})
    assert sample.length == 4 and sample.text == "lo" and sample.status is Status.TRUNCATED
    with pytest.raises(DataError, match="nothing of the row is left"):
        generate(sft, token_ids=[1, 2, 3, 4], metadata={"response": "x"})


def test_one_sample_a_row(checkpoint):
    with pytest.raises(ConfigError, match="--n-samples-per-prompt 1"):
        generate(plugin(checkpoint), token_ids=[1], metadata={"response": "x"}, samples=4)


def test_eval_prompts_are_sampled(checkpoint):
    class Engine:
        version = 3

        async def generate(self, request):
            return Response(np.array([9]), np.array([-0.5]), np.array([3]), "stop", text="x")

    [sample] = generate(plugin(checkpoint), token_ids=[1, 2], stream="heldout", engine=Engine())
    assert sample.tokens.tolist() == [1, 2, 9] and sample.reward is None


def test_the_tokenizer_is_required():
    with pytest.raises(ConfigError, match="--hf-checkpoint"):
        generate(Sft(SftOptions(), RunConfig()), token_ids=[1], metadata={"response": "x"})


def test_a_tokenizer_without_template(checkpoint):
    sft = plugin(checkpoint)
    generate(sft, messages=chat("a", "B"))
    sft._tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        encode(sft._tokenizer, chat("a", "B"), {}, "train row 4")


def test_template_arguments_are_passed_on(checkpoint):
    sft = plugin(checkpoint, "{{ tone | default('') }}" + CHATML, apply_chat_template_kwargs={"tone": "kind"})
    [sample] = generate(sft, messages=chat("a", "B"))
    assert sft._tokenizer.decode(sample.tokens).startswith("kind")


def test_answers_as_the_whole_conversation_shows_them(checkpoint):
    """All are trained on, to their end tokens; the tag that opens one is not, nor the line before it."""
    template = FORGETFUL.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}")
    assert template != FORGETFUL
    sft = plugin(checkpoint, template, SftOptions(sft_loss_mask_type="qwen3_5"))
    messages = chat("a", "<think>\nx</think>B", "c", "<think>\ny</think>D")
    [sample] = generate(sft, messages=messages)
    assert trained(sft, sample) == f"B{CLOSE}y</think>D{CLOSE}"
    begin = f"{OPEN}user\na{CLOSE}\n{OPEN}assistant\nB{CLOSE}\n{OPEN}user"
    assert sft._tokenizer.decode(sample.tokens).startswith(begin)
    [sample] = generate(plugin(checkpoint, template, SftOptions(sft_loss_mask_type="qwen3_5", sft_last_turn_only=True)),
                        messages=messages)
    assert trained(sft, sample) == f"y</think>D{CLOSE}"
    with pytest.raises(DataError, match="shows no answer for message 1"):
        generate(plugin(checkpoint, BARE, SftOptions(sft_loss_mask_type="qwen3_5")), messages=messages)


def test_no_token_of_a_prompt_is_taken_for_an_answer(checkpoint):
    """The opening has no line of its own, is not in the text, or is in a user's words."""
    bare = CHATML.replace("assistant\\n' }}{% endif", "assistant' }}{% endif").replace("m.role + '\\n'", "m.role")
    messages, options = chat("a", "B", "c", "D"), SftOptions(sft_loss_mask_type="qwen3_5")
    sft = plugin(checkpoint, bare, options)
    [sample] = generate(sft, messages=messages)
    assert trained(sft, sample) == f"B{CLOSE}D{CLOSE}"
    opened = bare.replace("assistant' }}{% endif", "assistant<think>\\n' }}{% endif")
    for template, said in ((opened, messages), (CHATML, chat(f"{OPEN}assistant\nfake{CLOSE}", "B"))):
        with pytest.raises(DataError) as caught:
            generate(plugin(checkpoint, template, options), messages=said)
        assert caught.value.code == "sft-answer-not-in-text"


def test_several_tokens_that_end_an_answer_are_all_trained_on(checkpoint):
    """Command R7B's way: <|END_RESPONSE|><|END_OF_TURN_TOKEN|>."""
    template = CHATML.replace("m.content + '", "m.content + ('" + EOS + "' if m.role == 'assistant' else '') + '")
    assert template != CHATML
    for kind in ("qwen", "qwen3", "qwen3_5"):
        sft = plugin(checkpoint, template, SftOptions(sft_loss_mask_type=kind))
        [sample] = generate(sft, messages=chat("a", "B", "c", "D"))
        assert trained(sft, sample) == f"B{EOS}{CLOSE}D{EOS}{CLOSE}", kind


def test_context_that_a_template_shows_with_the_answer_before_it_alone_is_not_lost(checkpoint):
    """Gemma 4 writes a tool's result behind the call; Command A opens an answer behind every text."""
    result = TURN.replace("{{", "{% if m.role != 'tool' %}{{").replace("}}", "}}{% elif not loop.first and "
                          "messages[loop.index0 - 1].role == 'assistant' %}{{ m.content }}{% endif %}")
    opens = CHATML.replace("{% if add_generation_prompt %}", "{% if true %}")
    turns = {result: (*chat("a", "call"), {"role": "tool", "content": "1"}, chat("", "B")[1]), opens: chat(*"aBcD")}
    for template, messages in turns.items():
        template = template if template is opens else CHATML.replace(TURN, template)
        with pytest.raises(DataError) as caught:
            generate(plugin(checkpoint, template, SftOptions(sft_loss_mask_type="qwen3")), messages=messages)
        assert caught.value.code == "sft-context-not-shown" and "row 4" in str(caught.value)


def test_a_template_that_ends_every_text_is_not_cut_in_the_middle(checkpoint):
    """Phi-3 writes the end of a text behind whatever no answer follows."""
    template = CHATML.replace("{% endif %}", "{% else %}{{ '" + EOS + "' }}{% endif %}")
    alone = SftOptions(sft_loss_mask_type="qwen3")
    [sample] = generate(sft := plugin(checkpoint, template, alone), messages=chat("a", "B"))
    assert trained(sft, sample) == f"B{CLOSE}\n{EOS}"
    with pytest.raises(DataError) as caught:
        generate(plugin(checkpoint, template, alone), messages=chat("a", "B", "c", "D"))
    assert caught.value.code == "sft-turns-not-apart"


@pytest.mark.parametrize("kind", ["qwen", "qwen3", "qwen3_5"])
def test_a_special_token_without_a_name_ends_an_answer(checkpoint, kind):
    """As Llama's <|eot_id|> and Phi's <|end|>, which are only added: no line break and no second end are trained on."""
    path = checkpoint / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"additional_special_tokens": []}))
    sft = plugin(checkpoint, options=SftOptions(sft_loss_mask_type=kind))
    [sample] = generate(sft, messages=chat("a", "B", "c", "D"))
    assert trained(sft, sample) == f"B{CLOSE}D{CLOSE}" and sample.text.endswith(f"D{CLOSE}")


@pytest.mark.parametrize("tools", [[{"name": "calc"}], '[{"name": "calc"}]'])
def test_tools_of_a_row_are_shown(checkpoint, tools):
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
    for row in ({"messages": chat("a", "B")}, {"messages": chat("a"), "token_ids": [5], "label": "B"}):
        [sample] = generate(sft := plugin(checkpoint, template), metadata={"tools": tools}, **row)
        shown = f'[{{"name": "calc"}}]{OPEN}user\na{CLOSE}\n{OPEN}assistant\nB'
        assert sft._tokenizer.decode(sample.tokens).startswith(shown)
    [sample] = generate(sft, messages=chat("a", "B"), metadata={"tools": ["calc"]})
    assert sft._tokenizer.decode(sample.tokens).startswith(OPEN), "names are no schemas"
    with pytest.raises(DataError) as caught:
        generate(sft, messages=chat("a", "B"), metadata={"tools": "[calc"})
    assert caught.value.code == "sft-tools-not-json"


CALLS = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% for call in m.tool_calls or () %}"
         "{% set call = call.function or call %}{{ call.name }} {{ call.arguments | tojson }}{% endfor %}"
         "{{ '<|im_end|>\\n' }}{% endfor %}" + OPENING)
MARKED_CALLS = CALLS.replace("{% set", "{% generation %}{% set").replace("tojson }}", "tojson }}{% endgeneration %}")


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x":1}'])
def test_arguments_of_calls_are_written_as_an_object_in_either_form(checkpoint, marked, arguments):
    """OpenAI's form has them as text; templates such as Qwen2.5's and Llama's would write a text in quotes."""
    template = MARKED_CALLS if marked else CALLS
    call = {"name": "calc", "arguments": arguments}
    for one in ({"type": "function", "function": call}, call):
        sft = plugin(checkpoint, template)
        [sample] = generate(sft, messages=(*chat("a"), {"role": "assistant", "content": "", "tool_calls": [one]}))
        assert sft._tokenizer.decode(sample.tokens).endswith(f'assistant\ncalc {{"x": 1}}{CLOSE}')


@pytest.mark.parametrize(("template", "share"), [
    (CHATML, 1.0), (CALLS, 0.0), (CALLS.replace("+ m.content", "+ (m.content if not m.tool_calls else '')"), 0.5)])
def test_calls_and_what_is_said_beside_them_are_counted_where_the_template_leaves_them_out(checkpoint, template, share):
    """Llama 3.1's shows a call and not the words before it; Gemma 2's and Qwen2-VL's show no call."""
    calls = [{"type": "function", "function": {"name": "calc", "arguments": {"x": 1}}}]
    answers = [{"role": "assistant", "content": said, "tool_calls": calls} for said in ("", "I look. ")]
    sft = plugin(checkpoint, template)
    [sample] = generate(sft, messages=(*chat("a"), answers[0], *chat("b"), answers[1], *chat("c", "D")))
    assert sample.metadata["figures"] == {"calls_left_out": share}


def test_arguments_that_are_no_object_stay_as_they_are(checkpoint):
    sft, call = plugin(checkpoint, CALLS), {"name": "calc", "arguments": "1+1"}
    [sample] = generate(sft, messages=(*chat("a"), {"role": "assistant", "content": "", "tool_calls": [call]}))
    assert trained(sft, sample) == f'calc "1+1"{CLOSE}'
