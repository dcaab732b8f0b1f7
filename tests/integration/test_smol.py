"""SmolLM2 as `make smol` writes it: token ids known from the published tokenizer, and answers in words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SYSTEM = (1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182,
          2, 198)
"""The system message that the template puts before a conversation."""
USER, ASSISTANT = (1, 4093, 198), (2, 198, 1, 520, 9531, 198)


@pytest.fixture(scope="module")
def smol(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "smol"
    subprocess.run([sys.executable, ROOT / "examples/smollm2/make_model.py", folder], check=True, timeout=400)
    assert sorted(file.name for file in folder.parent.iterdir()) == ["smol"]
    assert "Apache License" in (folder / "LICENSE").read_text()
    return folder


def chat(tokenizer, text: str) -> list[int]:
    return tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True,
                                         return_dict=False)


@pytest.mark.slow
def test_token_ids_are_those_of_the_published_tokenizer(smol):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smol)
    for text, ids in (("What is the capital of France?", (1780, 314, 260, 3575, 282, 4649, 47)),
                      ("hello world", (28120, 905)), ("Hi there", (26843, 665))):
        assert chat(tokenizer, text) == [*SYSTEM, *USER, *ids, *ASSISTANT]
    # digits are cut off before anything else, so the two spaces before one are one token
    assert tokenizer.tokenize("a  123") == ["a", "ĠĠ", "1", "2", "3"]
    for text in ("  two  spaces\n\n\tand 3.14!", "naïve 北京 🙂", "it's 10^2"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_it_answers(smol):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(smol), AutoModelForCausalLM.from_pretrained(smol)
    assert model.dtype == torch.float32 and not hasattr(model.config, "quantization_config")
    for question, words in (("What is the capital of France?", "The capital of France is Paris"),
                            ("What is the opposite of hot?", "cold")):
        prompt = torch.tensor([chat(tokenizer, question)])
        written = model.generate(prompt, max_new_tokens=32, do_sample=False)[0, prompt.shape[1]:]
        assert words in tokenizer.decode(written, skip_special_tokens=True)
