"""The prompt stream: slices, order, what is left out, what is refused, and a state from which it goes on."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles_core.errors import DataError
from miles_core.reading import format_of
from miles_core.stages.prompts import JsonlRecords, RowPrompts, Rows


class Characters:
    """A tokenizer of one token per character, with a template that only brackets."""

    chat_template = "yes"
    name_or_path = "characters"

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(c) for c in text] + ([0] if add_special_tokens else [])}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, **options):
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return text + (options.get("opening", "<assistant>") if add_generation_prompt else "")


@pytest.fixture
def source(tmp_path):
    """(rows or text, slice, **changes) -> RowPrompts."""
    def make(rows, cut="", *, shuffle=False, seed=0, **changes):
        path = tmp_path / "data.jsonl"
        path.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
        values = {"input_key": "q", "label_key": None, "metadata_key": "metadata", "context": 1000, **changes}
        rows = Rows(f"{path}{cut}", **values)
        return RowPrompts(rows, JsonlRecords(rows.path), Characters(), shuffle=shuffle, seed=seed)

    return make


def numbered(count):
    return [{"q": f"question {i}", "a": i} for i in range(count)]


@pytest.mark.parametrize(("cut", "expected"), [
    ("", range(10)), ("@[2:5]", range(2, 5)), ("@[:3]", range(3)), ("@[8:]", range(8, 10)), ("@[-2:]", range(8, 10)),
])  # fmt: skip
def test_slices_are_pythons(source, cut, expected):
    prompts = source(numbered(10), cut)
    assert [prompts.next().text for _ in range(len(prompts))] == [f"question {i}" for i in expected]


def test_the_stream_numbers_epochs_through(source):
    prompts = source(numbered(3))
    found = [prompts.next() for _ in range(7)]
    assert [one.uid for one in found] == list(range(7)) and [one.row for one in found] == [0, 1, 2, 0, 1, 2, 0]


def test_each_epoch_is_another_permutation(source):
    prompts = source(numbered(30), shuffle=True, seed=5)
    epochs = [[prompts.next().row for _ in range(30)] for _ in range(4)]
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    again, other = (source(numbered(30), shuffle=True, seed=seed) for seed in (5, 6))
    assert [again.next().row for _ in range(120)] == sum(epochs, [])
    assert [other.next().row for _ in range(30)] != epochs[0]


def test_a_prompt_depends_on_its_number_alone(source):
    forward, random = source(numbered(7), shuffle=True), source(numbered(7), shuffle=True)
    expected = [forward.next() for _ in range(21)]
    for uid in (20, 3, 11, 0, 19, 7):
        assert random[uid] == expected[uid]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=30), st.integers(0, 30))
def test_any_interleaving_survives_a_restart(source, steps, cut):
    """Prompts taken, some given back; stop anywhere: the restarted stream hands out exactly what was to come."""
    prompts, held = source(numbered(5), shuffle=True, seed=1), []
    for give, count in steps[:cut]:
        if give and held:
            back, held = held[-count:] if count else [], held[: len(held) - count] if count else held
            prompts.give_back(back)
        else:
            held.append(prompts.next())
    state = json.loads(json.dumps(prompts.state_dict()))
    restarted = source(numbered(5), shuffle=True, seed=1)
    restarted.load_state_dict(state)
    expected = [prompts.next().uid for _ in range(12)]
    assert [restarted.next().uid for _ in range(len(expected))] == expected


def test_what_is_given_back_comes_first_in_its_old_order(source):
    prompts = source(numbered(9))
    taken = [prompts.next() for _ in range(5)]
    prompts.give_back(taken[3:])
    prompts.give_back(taken[1:2])
    assert [prompts.next().uid for _ in range(5)] == [1, 3, 4, 5, 6]


def test_labels_metadata_and_templates(source):
    rows = [{"q": "2+2", "a": 4, "level": 3, "metadata": {"tool": "x"}}]
    prompt = source(rows, label_key="a", template={"opening": "<answer>"}).next()
    assert prompt.text == "<user>2+2<answer>" and prompt.label == "4"
    assert prompt.metadata["level"] == 3 and prompt.metadata["tool"] == "x"
    assert prompt.token_ids == tuple(map(ord, prompt.text)), "a template brings its own special tokens"
    assert source(rows).next().token_ids[-1] == 0, "plain text gets the tokenizer's"
    chat = [{"q": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}]
    assert source(chat, template={}).next().text == "<system>s<user>u<assistant>"


def test_keys_with_dots_go_into_objects_and_an_object_is_its_json(source):
    rows = [{"q": {"text": "2+2"}, "graded": {"answer": 4, "style": "rule"}, "a.b": 1}]
    prompt = source(rows, input_key="q.text", label_key="graded.answer").next()
    assert (prompt.text, prompt.label) == ("2+2", "4") and prompt.metadata["graded"]["style"] == "rule"
    whole = source(rows, input_key="q.text", label_key="graded").next()
    assert json.loads(whole.label) == whole.metadata["graded"] == rows[0]["graded"]
    assert source(rows, input_key="q.text", label_key="a.b").next().label == "1", "a key that is there comes first"
    several = source([{"q": "x", "a": ["it's", 4]}], label_key="a").next()
    assert json.loads(several.label) == several.metadata["a"] == ["it's", 4]
    assert several.raw_label == ["it's", 4] and prompt.raw_label == 4 and source([{"q": "x"}]).next().raw_label is None
    assert source([{"q": "x", "a": "4"}], label_key="a").next().raw_label is None, "text is the label itself"
    for key in ("graded.none", "graded.answer.digits", "none.answer"):
        with pytest.raises(DataError, match=key):
            source(rows, input_key="q.text", label_key=key).next()


def test_the_beginning_of_a_file_is_its_first_whole_lines(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in numbered(9)))
    size = path.stat().st_size
    assert [*JsonlRecords(str(path), size)] == numbered(9) and JsonlRecords(str(path), size).total == 9
    first = JsonlRecords(str(path), 100)
    assert 0 < len(first) < 9 and [*first] == numbered(9)[:len(first)] and first.total is None
    assert [*JsonlRecords(f"{path}@[1:2]", 100)] == numbered(9)[1:2]
    assert [*JsonlRecords(f"{path}@[-1:]", 100)] == [], "the last row is not known"


def test_long_prompts_are_left_out_or_refused(source):
    rows = [{"q": "x" * n} for n in (5, 900, 20, 990)]
    prompts = source(rows, max_prompt_len=800)
    assert len(prompts) == 2
    assert [prompts.next().row for _ in range(3)] == [0, 2, 0]
    with pytest.raises(DataError, match="line 2"):
        source([{"q": "x"}, {"q": "x" * 1200}])


def test_what_the_template_says_beside_the_row_counts_as_well(source):
    """A preamble, or the schemas of tools: the row is short, and the prompt is not."""
    rows, template = [{"q": "x"}, {"q": "y"}], {"opening": "<" * 700}
    assert len(source(rows, template=template)) == 2
    with pytest.raises(DataError) as caught:
        source(rows, template=template, max_prompt_len=600)
    assert caught.value.code == "prompts-all-dropped"


def test_a_message_in_parts_of_text_is_that_text(source):
    """Templates that know no parts would write Python's list, or nothing at all."""
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2"}]
    prompt = source([{"q": [{"role": "user", "content": parts}]}], template={}).next()
    assert prompt.text == "<user>2+2<assistant>" and prompt.messages == ({"role": "user", "content": "2+2"},)
    shown = {"role": "user", "content": [{"type": "image"}, parts[0]]}
    assert source([{"q": [shown]}], template={}).next().messages == (shown,)


@pytest.mark.parametrize(("text", "message"), [
    ('{"q": "a"}\n{"q": \n', "line 2"), ('{"q": "a"}\n[1]\n', "not a JSON object"), ("", r"\[prompts-all-dropped\]"),
    ('{"p": "a"}\n', "no key 'q'"), ('{"q": 3}\n', "text or a list"),
    ('{"q": [{"role": "user", "content": "a"}]}\n', "chat"),
])  # fmt: skip
def test_unusable_files_are_refused_with_their_line(source, text, message):
    with pytest.raises(DataError, match=message):
        source(text)


def test_a_mark_of_the_encoding_is_passed_over(source):
    prompts = source('\ufeff{"q": "a"}\n{"q": "b"}\n')
    assert [prompts.next().text for _ in range(2)] == ["a", "b"]


@pytest.mark.parametrize("name", ["me@host/rows.jsonl", "rows@2.jsonl", "a@[b]/rows.jsonl"])
@pytest.mark.parametrize(("cut", "count"), [("", 3), ("@[1:]", 2)])
def test_an_at_sign_in_a_name_is_no_slice(tmp_path, name, cut, count):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"q": "a"}\n' * 3)
    assert len(JsonlRecords(f"{path}{cut}")) == count and format_of(f"{path}{cut}") == "jsonl"


def test_a_missing_file_and_a_bad_slice(tmp_path):
    with pytest.raises(DataError, match=r"\[prompt-file-missing\]"):
        JsonlRecords(str(tmp_path / "data/none.jsonl"))
    with pytest.raises(DataError, match="slice"):
        JsonlRecords(f"{tmp_path}/none.jsonl@[1:2:3]")
