"""Tasks of an environment as rows: which, in what form, and what tells one set of them from another."""

import pytest
from miles_verifiers.environments import Environments
from miles_verifiers.rows import TaskRows

from miles_core.errors import ConfigError, DataError

KEYS = (("input",), ("label",))
TABLES = {
    "words": {"taskset": {"id": "words_env", "words": ["apple", "bee", "dog"]}},
    "other": {"taskset": {"id": "words_env", "words": ["apple", "bee", "cow"]}},
    "endless": {"taskset": {"id": "misbehaving"}, "id": "single-agent"},
}


def rows(path, template=True):
    name = path.partition(".verifiers")[0]
    return TaskRows(path, Environments(TABLES).load(name), TABLES.get(name, {}), KEYS, template)


def test_each_task_is_a_row_that_says_which_task_it_is():
    read = rows("words.verifiers")
    assert [row["input"] for row in read] == [
        [{"role": "user", "content": f"How many letters has {word}?"}] for word in ("apple", "bee", "dog")]
    assert [read.tasks[row["verifiers"]["row"]].data.word for row in read] == ["apple", "bee", "dog"]
    assert {row["verifiers"]["env"] for row in read} == {"words"} and read[0]["label"] is None


def test_without_a_chat_template_a_row_has_the_text_alone():
    assert rows("words.verifiers", template=False)[1]["input"] == "How many letters has bee?"


@pytest.mark.parametrize(("cut", "words"), [("@[1:]", ["bee", "dog"]), ("@[0:1]", ["apple"]), ("@[-1:]", ["dog"]),
                                            ("@[:-1]", ["apple", "bee"])])
def test_a_slice_takes_tasks_by_their_position(cut, words):
    read = rows(f"words.verifiers{cut}")
    assert [task.data.word for task in read.tasks] == words
    assert read.where(0) == f"words.verifiers, task {read.tasks[0].data.idx}"


def test_other_tasks_are_another_dataset():
    assert rows("words.verifiers").data == rows("words.verifiers").data != rows("other.verifiers").data
    assert rows("words.verifiers").data != rows("words.verifiers@[0:2]").data


def test_a_taskset_without_an_end_needs_a_slice_that_has_one():
    assert [len(task.data.word) for task in rows("endless.verifiers@[2:5]").tasks] == [2, 3, 4]
    with pytest.raises(DataError) as caught:
        rows("endless.verifiers@[2:]")
    assert caught.value.code == "verifiers-taskset-endless"


@pytest.mark.parametrize(("table", "code"), [
    (None, "verifiers-env-unloadable"),  # a taskset by the name, which is not installed
    ({"taskset": {"id": "words_env", "wrods": []}}, "verifiers-env-unloadable"),
    ({"taskset": "words_env"}, "verifiers-env-unloadable"),
    ({"taskset": {"id": "words_env"}, "id": "misbehaving"}, "verifiers-roles"),
])
def test_an_environment_that_cannot_be_meant_is_refused(table, code):
    with pytest.raises(ConfigError) as caught:
        Environments({"mine": table} if table else {}).load("mine")
    assert caught.value.code == code and "mine" in caught.value.who


def test_a_role_with_a_client_of_its_own_is_not_the_policy():
    critic = {"client": {"type": "eval", "base_url": "http://127.0.0.1:1/v1", "api_key_var": "NONE"}}
    table = {"taskset": {"id": "words_env"}, "id": "misbehaving", "critic": critic}
    assert Environments({"pair": table}).load("pair").config.env_id == "misbehaving+words_env"
