"""Write the list in docs/model-families.md of what the trainer `fsdp` takes and Megatron's does not.

    python docs/fsdp_families.py     with the transformers of constraints/cpu.txt; a test compares

It is what the installed transformers has a causal language model for: encoders that can be made to decode, models of
speech and the families that a plugin of this repository builds are left out. Nothing of it is tried here.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from miles_core.plugins.scan import KNOWN

PAGE = Path(__file__).parent / "model-families.md"
BEGIN, END = "<!-- fsdp alone: begin -->\n", "<!-- fsdp alone: end -->\n"
APART = {"git", "moshi", "fuyu", "emu3", "musicgen", "musicgen_melody", "gemma4_assistant", "gemma4_unified_assistant"}
"""Further model types whose tokens are not an answer of text, or that draft for another model."""


def alone() -> list[str]:
    """Model types, in order."""
    built = {offer.split(":")[1] for offers in KNOWN.values() for offer in offers if offer.startswith("model_spec:")}
    return sorted(kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
                  if kind not in built | APART and str(name).endswith(("ForCausalLM", "LMHeadModel"))
                  and not _encodes(kind))


def _encodes(kind: str) -> bool:
    """Whether the config has the switch of an encoder that decodes as well, or an encoder beside its decoder."""
    fields = getattr(CONFIG_MAPPING[kind], "__dataclass_fields__", {})
    return "is_decoder" in fields or "encoder_layers" in fields


def page(text: str) -> str:
    """The page with the list of the installed release."""
    before, _, rest = text.partition(BEGIN)
    names = ", ".join(f"`{kind}`" for kind in alone())
    words = (f"Of transformers {transformers.__version__} these have a causal language model and no family here; "
             f"`fsdp` takes them as they are, and none was tried: {names}.")
    lines = textwrap.fill(words, 128, break_long_words=False, break_on_hyphens=False)
    return before + BEGIN + lines + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
