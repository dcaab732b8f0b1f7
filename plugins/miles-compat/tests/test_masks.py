"""Masks of conversations by each kind of --loss-mask-type."""

from pathlib import Path

import pytest
from miles_compat.masks import MultiTurnLossMaskGenerator

MODEL = Path(__file__).parents[3] / "examples" / "arithmetic" / "tiny-qwen3"
FORGETFUL = (  # as Qwen3.5: shows the reasoning of the last answer only
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{{ m.content if loop.last else "
    "m.content.split('</think>')[-1] }}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


@pytest.mark.parametrize(("kind", "texts"), [
    ("qwen3", ["1</think>2", "3</think>4"]), ("qwen3_5", ["2", "3</think>4"]), ("distill_qwen", ["3</think>4"])])
def test_each_kind_trains_on_what_sft_does(kind, texts):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = FORGETFUL
    masks = MultiTurnLossMaskGenerator(tokenizer, kind)
    messages = [{"role": role, "content": content} for role, content in (
        ("user", "1+1="), ("assistant", "1</think>2"), ("user", "2+2="), ("assistant", "3</think>4"))]
    ids, mask = masks.get_loss_mask(messages)
    assert masks.get_text_from_loss_mask(ids, mask) == [f"{text}<|im_end|>" for text in texts]
