"""A teacher whose token ids are not the student's is refused before anything is built."""

import json

import pytest
from miles_opd.vocabulary import check_vocabulary

from miles_core.errors import ConfigError


@pytest.fixture
def model(tmp_path):
    """(name, size, words, merges, end) -> a folder with a config.json and, if there are words, a tokenizer.json."""

    def make(name, size=8, words=("a", "b", "ab"), merges=("a b",), end="<end>", **constants):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"vocab_size": size, **constants}))
        if words:
            data = {"model": {"vocab": {word: i for i, word in enumerate(words)}, "merges": list(merges)},
                    "added_tokens": [{"id": len(words), "content": end, "special": True}]}
            (folder / "tokenizer.json").write_text(json.dumps(data))
        return str(folder)

    return make


def test_the_same_tokenizer_may_be_written_in_another_way(model):
    """Newer files write merges as pairs; output layers may be padded where nobody looks at single tokens."""
    check_vocabulary(model("student"), model("teacher", size=16, merges=[["a", "b"]]))


@pytest.mark.parametrize("what, changes", [
    ("vocabulary", {"words": ("b", "a", "ab")}), ("merges", {"merges": ()}), ("added tokens", {"end": "<stop>"}),
    ("8 and 9 tokens", {"words": (), "size": 9}),
])
def test_another_tokenizer_is_named_with_a_remedy(model, what, changes):
    with pytest.raises(ConfigError, match=f"do not share a vocabulary.*{what}.*same tokenizer"):
        check_vocabulary(model("student"), model("teacher", **changes))


def test_top_k_needs_models_that_can_score_each_others_tokens(model):
    student = model("student")
    with pytest.raises(ConfigError, match="8 and 16 rows"):
        check_vocabulary(student, model("padded", size=16), top_k=2)
    with pytest.raises(ConfigError, match=r"more tokens than the vocabulary has.*9 of 8"):
        check_vocabulary(student, None, top_k=9)
    check_vocabulary(student, model("nested", size=0, text_config={"vocab_size": 8}), top_k=8)


def test_a_checkpoint_of_the_students_architecture_has_nothing_to_compare(model, tmp_path):
    (tmp_path / "iter_0000001").mkdir()
    check_vocabulary(model("student"), str(tmp_path), top_k=3)
