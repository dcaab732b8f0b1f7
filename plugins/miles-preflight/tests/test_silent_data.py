"""Data, templates, tokenizers and models that a run would take without a word: what is refused, and the damage."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from measure import REFUSED, ROOT, outcome
from miles_grpo.advantage import normalized
from miles_math.plugin import Math, MathOptions
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from miles_core.build import load_tokenizer
from miles_core.config.tables import Checkpoint, RunConfig
from miles_core.stages.prompts import Rendering, Rows

TINY = ROOT / "examples/arithmetic/tiny-qwen3"
CONFIG = json.loads((TINY / "config.json").read_text())
USER = {"role": "user", "content": "1+1="}
ROW = {"prompt": [USER], "label": "2"}


@pytest.fixture(scope="module")
def tokenizer():
    """The tiny model's."""
    return load_tokenizer(RunConfig(checkpoint=Checkpoint(hf_checkpoint=str(TINY))))


def prompt(tokenizer, row):
    """What a run makes of a row."""
    return Rendering(Rows("x", "prompt", "label", "metadata", 1024, template={}), str, tokenizer)(0, 0, row)


def told(row=None, files=None, flags=(), config=None, copied=("tokenizer.json", "tokenizer_config.json")):
    """The plan's sentence to the smallest run with this row, these files, and a model with this config.json."""
    files = {"rows.jsonl": json.dumps(row or ROW), **(files or {})}
    files = {name: text if isinstance(text, str) else json.dumps(text) for name, text in files.items()}
    flags = [*flags, "--prompt-data", "{here}/rows.jsonl"]
    if config is not None:
        flags += ["--hf-checkpoint", "{here}/model", "--plan-without-weights"]
        files["model/config.json"] = json.dumps(CONFIG | config)
    copies = {f"model/{name}": f"examples/arithmetic/tiny-qwen3/{name}" for name in copied}
    found = outcome({"id": "one", "flags": flags, "files": files, "copies": copies if config is not None else {}})
    assert found.verdict == REFUSED, found
    return found.sentence


def test_messages_as_text_are_the_users_words(tokenizer):
    row = {"prompt": json.dumps([USER]), "label": "2"}
    assert "chat messages as text" in told(row)
    assert '"role": "user"' in prompt(tokenizer, row).text


def test_a_rendered_text_would_be_rendered_again(tokenizer):
    once = prompt(tokenizer, ROW).text
    assert "through one again" in told({"prompt": once, "label": "2"})
    assert prompt(tokenizer, {"prompt": once, "label": "2"}).text.count("<|im_start|>user") == 2


def test_an_object_as_the_label_is_nobodys_answer(tokenizer):
    row = {"prompt": [USER], "label": {"target": "2"}}
    assert "'label' is an object" in told(row)
    math = Math(MathOptions(), RunConfig())
    try:
        rewards = [math.math(SimpleNamespace(text="\\boxed{2}", prompt=prompt(tokenizer, one), metadata={}, name="x"))
                   for one in (row, ROW)]
    finally:
        math.finish()
    assert rewards == [0.0, 1.0]


def test_a_label_that_every_row_lacks_scores_nothing():
    assert "no row has a ground truth" in told(ROW | {"label": ""}, flags=("--rm-type", "gpqa"))
    assert not any(normalized([0.0] * 8))


def test_an_answer_in_the_prompt_is_what_the_model_sees(tokenizer):
    row = {"prompt": [USER, {"role": "assistant", "content": "the answer is 2"}], "label": "2"}
    assert "ends with an answer" in told(row)
    assert "the answer is 2" in prompt(tokenizer, row).text


def rendered(template, messages):
    import jinja2

    return jinja2.Template(template).render(messages=messages, add_generation_prompt=True)


@pytest.mark.parametrize(("template", "messages", "words", "damage"), [
    ("{% for one in messages if one.role == 'user' %}{{ one.content }}{% endfor %}",
     [{"role": "system", "content": "Answer in Roman numerals."}, USER], "leaves out what the system says",
     lambda text: "Roman" not in text),
    ("{% for one in messages %}{{ one.content }}<|im_end|>{% endfor %}", [USER], "opens no answer",
     lambda text: text.endswith("<|im_end|>")),
], ids=["leaves-out", "opens-nothing"])
def test_a_template_that_drops_something(template, messages, words, damage):
    flags = ("--chat-template-path", "{here}/chat.jinja")
    assert words in told({"prompt": messages, "label": "2"}, {"chat.jinja": template}, flags)
    assert damage(rendered(template, messages))


def test_a_model_without_a_tokenizer_is_given_empty_prompts(tmp_path):
    assert "the model has no tokenizer" in told(config={}, copied=())
    shutil.copy(TINY / "config.json", tmp_path)
    assert load_tokenizer(RunConfig(checkpoint=Checkpoint(hf_checkpoint=str(tmp_path))))("1+1=")["input_ids"] == []


@pytest.mark.parametrize("said", [True, None])
def test_a_first_token_that_stands_there_twice(said, changed_tokenizer):
    processor = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
                                                          {"Sequence": {"id": "A", "type_id": 0}}],
                 "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                 "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [257], "tokens": ["<|im_start|>"]}}}
    folder = changed_tokenizer(processor, bos_token="<|im_start|>", add_bos_token=said)
    shutil.copy(TINY / "config.json", folder)
    flags = ["--hf-checkpoint", str(folder), "--plan-without-weights", "--prompt-data", "{here}/rows.jsonl"]
    case = {"id": "one", "flags": flags, "without": ["--apply-chat-template"],
            "files": {"rows.jsonl": json.dumps({"prompt": "<|im_start|>1+1=", "label": "2"})}}
    assert "the token that the tokenizer puts before every text" in outcome(case).sentence
    ids = load_tokenizer(RunConfig(checkpoint=Checkpoint(hf_checkpoint=str(folder))))("<|im_start|>1+1=")["input_ids"]
    assert ids[:2] == [257, 257]


@pytest.mark.parametrize("ends", [[258, 999], 7])
def test_an_end_that_is_never_drawn(ends, tokenizer):
    """The first is beyond the logits; the second is a letter, and the token that the template ends answers with is not
    among those that stop the engine."""
    assert "end" in told(config={"eos_token_id": ends})
    logits = torch.zeros(CONFIG["vocab_size"])
    assert logits.numel() <= 999 and tokenizer.decode([7]).isascii() and tokenizer.eos_token_id == 258 != 7


ROTARY = torch.arange(0, 32, 2) / 32


@pytest.mark.parametrize(("change", "damage"), [
    ({"rms_norm_eps": 1e-2}, lambda: not torch.equal(*(F.rms_norm(torch.ones(4) / 10, (4,), eps=eps)
                                                       for eps in (1e-6, 1e-2)))),
    ({"hidden_act": "gelu"}, lambda: not torch.equal(F.gelu(torch.ones(1)), F.silu(torch.ones(1)))),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
     lambda: not torch.equal(*(1 / base**ROTARY for base in (1e4, 1e6)))),
], ids=["epsilon", "activation", "theta"])
def test_a_reference_that_the_policys_constants_would_compute_otherwise(change, damage):
    """Its tensors have the policy's shapes, and go into the policy's place."""
    flags = ("--use-kl-loss", "--ref-load", "{here}/other")
    assert "the reference is another model" in told(files={"other/config.json": CONFIG | change}, flags=flags)
    assert damage()


LONG = torch.arange(8.0)
"""Scores of a query against eight keys."""


def frequencies(**rope):
    """Of the rotary embedding, as transformers computes it."""
    config = Qwen3Config(head_dim=32, max_position_embeddings=1024, rope_parameters={"rope_theta": 1e4, **rope})
    if rope.get("rope_type") in ROPE_INIT_FUNCTIONS:
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, None, seq_len=4096)[0]
    return 1 / config.rope_parameters["rope_theta"]**ROTARY


@pytest.mark.parametrize(("change", "key", "damage"), [
    ({"hidden_act": "gelu"}, "hidden_act", lambda: not torch.equal(F.gelu(torch.ones(1)), F.silu(torch.ones(1)))),
    ({"use_sliding_window": True}, "use_sliding_window",
     lambda: not torch.equal(LONG.softmax(0)[4:], LONG[4:].softmax(0))),
    ({"layer_types": ["sliding_attention"] * 4}, "layer_types",
     lambda: not torch.equal(LONG.softmax(0)[4:], LONG[4:].softmax(0))),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type",
     lambda: not torch.allclose(frequencies(rope_type="dynamic", factor=2.0), frequencies())),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.5}}, "factor of the rope",
     lambda: not torch.allclose(frequencies(rope_type="linear", factor=0.5), frequencies())),
    ({"rope_theta": 1e6}, "rope_theta", lambda: not torch.allclose(frequencies(rope_theta=1e6), frequencies())),
], ids=["activation", "window", "kinds-of-layers", "kind-of-rope", "factor", "theta"])
def test_what_the_trainer_would_compute_otherwise_than_the_engine(change, key, damage):
    assert f"{key} in config.json is not what the trainer would compute" in told(config=change)
    assert damage()


def test_a_reference_that_reads_other_tokens(tokenizer):
    ours = json.loads((TINY / "tokenizer.json").read_text())
    vocabulary = ours["model"]["vocab"]
    swapped = {token: 255 - number for token, number in vocabulary.items()}
    files = {"other/config.json": CONFIG, "other/tokenizer.json": ours | {"model": ours["model"] | {"vocab": swapped}}}
    assert "its tokens are not the policy's" in told(files=files, flags=("--use-kl-loss", "--ref-load", "{here}/other"))
    inverse = {number: token for token, number in swapped.items()}
    assert [inverse[one] for one in tokenizer("1+1=")["input_ids"]] != list("1+1=")


def test_one_answer_to_a_prompt_teaches_nothing():
    assert "compares the answers to one prompt" in told(flags=("--n-samples-per-prompt", "1"))
    assert normalized([1.0]) == [0.0]
