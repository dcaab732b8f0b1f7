"""Build the tokenizer of the arithmetic example: a token for each byte, and eight longer ones.

    python make_tokenizer.py FOLDER

writes ``tokenizer.json`` and ``tokenizer_config.json``, which ``AutoTokenizer`` reads. The chat
template and its special tokens are Qwen's. The roles and ``\\boxed{`` are one token each, so a
prompt takes 14 tokens and an answer 5 or 6. As every byte has a token, any text can be
encoded and comes back unchanged.
"""

import argparse
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
WORDS = ["system", "user", "assistant", "tool", "\\boxed{"]

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END,
    "pad_token": PAD,
    "additional_special_tokens": [START, END],
    "chat_template": CHAT_TEMPLATE,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 1024,
}


def build() -> Tokenizer:
    """A byte-level tokenizer without merges, followed by the special tokens and the words."""
    spellings = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={spelling: index for index, spelling in enumerate(spellings)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, START, END])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    return tokenizer


def main() -> None:
    """Write the two files into the folder given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    build().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")


if __name__ == "__main__":
    main()
