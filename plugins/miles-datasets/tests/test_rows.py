"""Rows of every format are those of JSONL: the same prompts in the same order, and what cannot be read says why."""

import base64
import codecs
import datetime
import decimal
import gzip
import json
import os
import shutil
import uuid

import pyarrow
import pyarrow.parquet
import pytest
from formats import write
from miles_datasets.plugin import Datasets, DatasetsOptions
from miles_datasets.source import Source

from miles_core.config.tables import RunConfig
from miles_core.errors import DataError
from miles_core.reading import field_of

ROWS = [{"q": f"question {i}", "a": str(i), "level": f"{i % 3}"} for i in range(50)]
CHAT = [{"q": [{"role": "system", "content": "s"}, {"role": "user", "content": f"u{i}"}], "a": str(i), "n": i,
         "reward_model": {"ground_truth": {"target": [f"t{i}"]}, "style": "rule"}} for i in range(9)]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "csv", "tsv", "json"])
@pytest.mark.parametrize("cut", ["", "@[10:30]", "@[-7:]"])
def test_the_same_rows_are_the_same_prompts(prompts, tmp_path, kind, cut):
    theirs, ours = (write(tmp_path / f"data.{one}", ROWS) for one in ("jsonl", kind))
    for shuffle in (False, True):
        first, second = (prompts(f"{path}{cut}", label_key="a", shuffle=shuffle, seed=3) for path in (theirs, ours))
        assert [first.next() for _ in range(120)] == [second.next() for _ in range(120)]
        assert len(first) == len(second)


def test_chats_and_objects_are_those_of_jsonl(prompts, tmp_path):
    """A Parquet file gives every message the keys of all; those that are null are left out again."""
    rows = [CHAT[0] | {"q": [{"role": "user", "content": "x", "name": "ada"}]}, *CHAT[1:]]
    theirs, ours = (write(tmp_path / f"data.{kind}", rows) for kind in ("jsonl", "parquet"))
    keys = {"template": {}, "label_key": "reward_model.style"}
    first, second = (prompts(path, **keys) for path in (theirs, ours))
    found = [second.next() for _ in range(9)]
    assert found == [first.next() for _ in range(9)]
    assert found[1].text == "<system>s<user>u1<assistant>" and found[1].label == "rule"
    assert found[1].messages == tuple(CHAT[1]["q"]), "no key that it did not have"
    assert found[1].metadata["reward_model"]["ground_truth"] == {"target": ["t1"]}


def test_long_rows_are_left_out_as_they_are_of_jsonl(prompts, tmp_path):
    rows = [{"q": "x" * n} for n in (5, 900, 20, 990)]
    for path in (write(tmp_path / f"data.{kind}", rows) for kind in ("jsonl", "parquet")):
        made = prompts(path, max_prompt_len=800)
        assert (len(made), made.left_out) == (2, 2)
        assert [made.next().row for _ in range(3)] == [0, 2, 0]
        with pytest.raises(DataError, match="(line 2|row 1)"):
            prompts(path, context=800)


def test_values_are_what_json_has(read, tmp_path):
    table = pyarrow.table({
        "day": [datetime.date(2026, 5, 1)], "at": [datetime.datetime(2026, 5, 1, 12)], "none": [None],
        "price": [decimal.Decimal("1.50")], "raw": [b"\x00"], "image": [{"bytes": b"\x00", "path": "a.png"}],
        "took": [datetime.timedelta(seconds=90)], "nested": [[{"day": datetime.date(2026, 5, 2)}]]})
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    [row] = read(str(tmp_path / "data.parquet"))
    assert row == {"day": "2026-05-01", "at": "2026-05-01T12:00:00", "none": None, "price": "1.50", "took": 90.0,
                   "nested": [{"day": "2026-05-02"}]}
    json.dumps(row)


def test_a_tool_without_a_function_around_it_has_no_keys_of_others(tmp_path):
    tools = [{"name": name, "parameters": {"properties": {key: {"type": "string"}}}} for name, key in ("fa", "gb")]
    pyarrow.parquet.write_table(pyarrow.table({"tools": [tools]}), tmp_path / "data.parquet")
    assert list(Source(str(tmp_path / "data.parquet")).stream()) == [{"tools": tools}]


def test_maps_are_objects_and_schemas_of_tools_have_no_keys_of_others(tmp_path):
    """In a stream and a plan; the package datasets, which makes tables, has no maps."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": "int"}}}
    other = {"type": "function", "function": {"name": "g", "parameters": {"b": "str"}}}
    columns = {"q": ["x", "y"], "tools": [[tool], [other]], "kind": pyarrow.array(["u", "v"]).dictionary_encode(),
               "id": pyarrow.array([uuid.UUID(int=1).bytes] * 2, pyarrow.uuid()),
               "at": pyarrow.array([[("k", datetime.date(2026, 5, 1))], None],
                                   pyarrow.map_(pyarrow.string(), pyarrow.date32()))}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "data.parquet")
    rows = [{"q": "x", "tools": [tool], "kind": "u", "id": str(uuid.UUID(int=1)), "at": {"k": "2026-05-01"}},
            {"q": "y", "tools": [other], "kind": "v", "id": str(uuid.UUID(int=1)), "at": None}]
    path = str(tmp_path / "data.parquet")
    assert list(Source(path).stream()) == list(Datasets(DatasetsOptions(), RunConfig()).parquet(path, 65536)) == rows


def text(data):
    return base64.b64encode(data).decode()


def test_images_that_the_run_names_are_text_in_base64_and_other_bytes_are_left_out(tmp_path, cache):
    """Columns of bytes, of lists, and of the package's own images, in a table, a stream and a plan."""
    raw, other = b"\x89PNG\x00", b"GIF8"
    struct = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    kinds = {"bytes": (pyarrow.binary(), raw, text(raw)),
             "list": (pyarrow.list_(pyarrow.large_binary()), [raw, other], [text(raw), text(other)]),
             "structs": (pyarrow.list_(struct), [{"bytes": raw, "path": "a.png"}, {"bytes": None, "path": "b.png"}],
                         [{"bytes": text(raw), "path": "a.png"}, {"bytes": None, "path": "b.png"}])}
    for name, (kind, value, known) in kinds.items():
        path = tmp_path / f"{name}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({
            "q": ["x", "y"], "images": pyarrow.array([value, None], kind), "sound": [raw, raw]}), path)
        config = RunConfig(options={"vision": {"multimodal_keys": {"image": "images"}}})
        rows = [{"q": "x", "images": known}, {"q": "y", "images": None}]
        plugin = Datasets(DatasetsOptions(), config)
        assert list(plugin.parquet(str(path), None)) == rows == list(plugin.parquet(str(path), 65536)), name
        assert list(Source(str(path), media=("images",)).stream()) == rows
        assert list(Datasets(DatasetsOptions(), RunConfig()).parquet(str(path), None)) == [{"q": "x"}, {"q": "y"}]


def test_text_of_csv_stays_text_and_objects_of_json_stay_apart(read, tmp_path):
    [first, second] = read(str(write(tmp_path / "a.csv", [{"q": "x", "a": "007"}, {"q": "NA", "a": ""}])))
    assert (first, second) == ({"q": "x", "a": "007"}, {"q": "NA", "a": ""})
    rows = [{"q": "a", "info": {"x": 1}}, {"q": "b", "info": {"y": "t"}}]
    assert list(read(str(write(tmp_path / "a.json", rows)))) == rows


@pytest.mark.parametrize("begin", [b"", b"\xef\xbb\xbf", b"\r\n", b"\n  \n\n", b"\xef\xbb\xbf\n"])
@pytest.mark.parametrize("kind", ["csv", "tsv", "json"])
def test_what_editors_put_before_the_first_row_is_passed_over(read, tmp_path, kind, begin):
    plain = write(tmp_path / f"plain.{kind}", ROWS[:3])
    (tmp_path / f"a.{kind}").write_bytes(begin + plain.read_bytes())
    for most in (None, 65536):
        assert list(read(str(tmp_path / f"a.{kind}"), most)) == list(read(str(plain), most)) == ROWS[:3]


@pytest.mark.parametrize("text", ["q,a\nWhat is 1,000+1?,1001\n", "q,a\nx,y,\n", "q,a\nx,y\nu,v,w\n"])
def test_a_row_of_more_cells_than_columns_is_refused_and_nothing_is_shifted(read, tmp_path, text):
    (tmp_path / "a.csv").write_text(text)
    for most in (None, 65536):
        with pytest.raises(DataError, match="a.csv"):
            list(read(str(tmp_path / "a.csv"), most))
    (tmp_path / "b.tsv").write_text('q\ta\n"1\t000"\t1,001\n')
    assert list(read(str(tmp_path / "b.tsv"))) == [{"q": "1\t000", "a": "1,001"}]


def test_two_columns_of_one_name_are_refused_and_unnamed_ones_are_not(read, tmp_path):
    """The table would have the first of them, and a stream the last."""
    (tmp_path / "a.csv").write_text("q,a,a\nx,1,2\n")
    for most in (None, 65536):
        with pytest.raises(DataError) as caught:
            list(read(str(tmp_path / "a.csv"), most))
        assert (caught.value.code, caught.value.got) == ("data-column-twice", "a")
    (tmp_path / "b.csv").write_text(",q,a,,\n0,x,1,,\n")  # the first is what pandas writes of its index
    for most in (None, 65536):
        assert list(read(str(tmp_path / "b.csv"), most)) == [
            {"Unnamed: 0": "0", "q": "x", "a": "1", "Unnamed: 3": "", "Unnamed: 4": ""}]
@pytest.mark.parametrize(("name", "text", "rows"), [
    ("train.csv", "q,a\n007,1.50\n\n2026-05-01,\nx\n",
     [{"q": "007", "a": "1.50"}, {"q": "2026-05-01", "a": ""}, {"q": "x", "a": None}]),
    ("train.jsonl", '{"q": "2026-05-01", "a": {"x": 1}}\n{"q": "5", "a": 6}\n',
     [{"q": "2026-05-01", "a": {"x": 1}}, {"q": "5", "a": 6}]),
    ("train.json", '[{"q": "2026-05-01", "a": {"x": 1}}, {"q": "7"}]',
     [{"q": "2026-05-01", "a": {"x": 1}}, {"q": "7"}]),
])
@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_a_folder_is_read_as_its_files_are_by_run_plan_and_stream(read, tmp_path, name, text, rows, mark):
    """No number is made of 007, no time of a date, no key of one row is in another."""
    (tmp_path / name).write_bytes(mark + text.encode())
    assert list(read(tmp_path)) == list(read(tmp_path, 65536)) == rows
    if name != "train.json":  # a list
        assert list(Source(str(tmp_path)).stream()) == rows
    if name != "train.jsonl":  # the core's
        assert list(read(tmp_path / name)) == rows


def test_a_quote_that_stays_open_takes_no_rows_with_it(read, tmp_path):
    (tmp_path / "a.csv").write_text('q,a\nsay "x",1\n"y,2\nz,3\n')
    for most in (None, 65536):
        with pytest.raises(DataError, match="a.csv, row 1") as caught:
            list(read(tmp_path / "a.csv", most))
        assert caught.value.code == "data-row-not-csv"


def test_every_file_of_a_folder_is_held_to_its_columns_where_it_is_read(read, tmp_path):
    (tmp_path / "train-0.csv").write_text("q,a\nx,1\n")
    (tmp_path / "train-1.csv").write_text("a,q\n2,y\n")
    assert list(read(tmp_path)) == [{"q": "x", "a": "1"}, {"q": "y", "a": "2"}]
    for text, code in (("q,a\nWhat is 1,000+1?,1001\n", "data-row-too-wide"), ("q,b\ny,2\n", "data-columns-differ")):
        (tmp_path / "train-1.csv").write_text(text)
        with pytest.raises(DataError, match="train-1.csv") as caught:
            list(read(tmp_path))
        assert caught.value.code == code
    (tmp_path / "train-1.csv.gz").write_bytes(gzip.compress(b"q,a\ny,2\n"))
    (tmp_path / "train-1.csv").unlink()
    with pytest.raises(DataError, match="train-1.csv.gz") as caught:
        read(tmp_path, 65536)
    assert caught.value.code == "data-kind-unread"


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_file_in_the_place_of_another_is_read_whatever_its_time(read, tmp_path, kind):
    """The package knows files by name and time; archives give the same time to all they hold."""
    for answer in ("1", "2"):
        os.utime(write(tmp_path / f"data.{kind}", [{"q": "x", "a": answer}]), (10**9, 10**9))
        assert list(read(tmp_path / f"data.{kind}")) == [{"q": "x", "a": answer}]


def test_files_of_a_folder_a_pattern_and_a_split_are_one_dataset(prompts, tmp_path):
    for number in range(3):
        write(tmp_path / f"data/train-{number}.parquet", ROWS[number * 10:][:10])
    write(tmp_path / "data/test-0.parquet", ROWS[40:])
    shutil.copytree(tmp_path / "data", tmp_path / "whole.parquet")
    for path, rows in (("data/train-*.parquet", ROWS[:30]), ("data", ROWS[:30]), ("data:train", ROWS[:30]),
                       ("data:test", ROWS[40:]), ("whole.parquet", ROWS[40:] + ROWS[:30]), ("data@[28:]", ROWS[28:30])):
        made = prompts(tmp_path / path)
        assert [made.next().text for _ in range(len(made))] == [row["q"] for row in rows], path
    assert len({prompts(tmp_path / path).data for path in ("data:train", "data:test", "data@[1:]", "data@[2:]")}) == 4


def test_what_the_package_saved_is_read(read, tmp_path):
    import datasets

    saved = datasets.DatasetDict({name: datasets.Dataset.from_list(rows)
                                  for name, rows in (("train", ROWS), ("test", ROWS[:5]))})
    saved.save_to_disk(tmp_path / "both")
    saved["train"].save_to_disk(tmp_path / "one")
    datasets.load_from_disk(tmp_path / "one").map(lambda row: row | {"q": "mapped"})  # which it keeps in there
    assert len(list((tmp_path / "one").glob("*.arrow"))) == 2
    for path, rows in (("both", ROWS), ("both:test", ROWS[:5]), ("one", ROWS)):
        assert list(read(f"{tmp_path}/{path}")) == rows


def test_a_dataset_of_the_cache_is_read_by_name_with_configuration_and_split(read, tmp_path, monkeypatch):
    """As `hf download` leaves it; nobody asks a server, and files of another configuration are not read."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "datasets--org--sums"
    folder = home / "snapshots" / ("0" * 40)
    for config in ("main", "hard"):
        for split in ("train", "test"):
            write(folder / config / f"{split}-00000-of-00001.parquet", [{"q": f"{config} {split}"}])
    (home / "refs").mkdir()
    (home / "refs/main").write_text("0" * 40)
    (folder / "README.md").write_text("---\nconfigs:\n" + "".join(
        f"- config_name: {config}\n  data_files:\n" + "".join(
            f"  - split: {split}\n    path: {config}/{split}-*\n" for split in ("train", "test"))
        for config in ("main", "hard")) + "---\n")
    for name in ("main:train", "hard:test"):
        assert list(read(f"org/sums:{name}")) == [{"q": name.replace(":", " ")}]
    for name, known in (("org/sums", "main"), ("org/sums:none:train", "hard"), ("org/sums:main:dev", "train, test"),
                        ("org/other", "hf download --repo-type dataset org/other")):
        with pytest.raises(DataError, match=known):
            read(name)


def test_a_script_of_a_dataset_is_never_run(read, tmp_path):
    folder = tmp_path / "sums"
    folder.mkdir()
    (folder / "sums.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(DataError, match="script"):
        read(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("name", "content", "known"), [
    ("a.parquet", b"hello, I am text", "a.parquet"), ("a.parquet", b"PAR1", "a.parquet"),
    ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ("a.arrow", b"no Arrow at all", "a.arrow"), ("a.json", b'[{"q": ', "a.json"), ("a.csv", b"", "a.csv"),
])
def test_what_is_not_what_its_ending_says_is_refused_with_its_name(read, tmp_path, name, content, known):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=known):
        read(str(tmp_path / name))


@pytest.mark.parametrize("kind", ["parquet", "csv", "tsv"])
def test_a_file_of_no_rows_says_so(read, tmp_path, kind):
    path = tmp_path / f"none.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"q": pyarrow.array([], pyarrow.string())}), path)
    else:
        path.write_text("q\n")
    with pytest.raises(DataError, match=r"\[data-rows-none\]") as caught:
        read(str(path))
    assert caught.value.who == str(path)


@pytest.mark.parametrize(("path", "keys", "known"), [
    ("none.parquet", {}, "none.parquet"), ("data.parquet@1:2", {}, "slice"), ("data.parquet@[60:]", {}, "no prompt"),
    ("data.parquet", {"input_key": "prompt"}, "row 0.*no key 'prompt'.*q, a, level"),
    ("data.parquet@[3:]", {"label_key": "b"}, "row 3.*no key 'b'.*q, a, level"),
    ("data.parquet", {"metadata_key": "a"}, "row 0.*'a' should be an object"),
    ("numbers.parquet", {}, "row 0.*text or a list"), ("chat.parquet", {}, "add --apply-chat-template"),
    ("folder", {}, "folder"), ("splits", {}, r"validation, test.*\[dataset-split-unknown\]"),
    ("splits:train", {}, "'train'.*validation, test"),
])
def test_bad_input_says_what_is_there(prompts, tmp_path, path, keys, known):
    write(tmp_path / "data.parquet", ROWS)
    write(tmp_path / "numbers.parquet", [{"q": 3}])
    write(tmp_path / "chat.parquet", CHAT)
    (tmp_path / "folder").mkdir()
    for split in ("dev", "test"):
        write(tmp_path / f"splits/{split}.parquet", ROWS)
    with pytest.raises(DataError, match=known) as caught:
        prompts(tmp_path / path, **keys).next()
    assert caught.value.fix


def test_labels_behind_a_mark(read, tmp_path):
    rows = [{"question": "2+2?", "answer": "2 and 2 #### are <<2+2=4>>4\n#### 4"}, {"question": "x", "answer": "y"}]
    path = write(tmp_path / "gsm8k.parquet", rows)
    table = read(path, label_key="answer", label_after="####")
    assert table[0] == {"question": "2+2?", "answer": "4"}
    with pytest.raises(DataError, match="row 1"):
        table[1]
    nested = write(tmp_path / "nested.json", [{"q": "2+2?", "graded": {"answer": "#### 4"}}])
    [row] = read(nested, label_key="graded.answer", label_after="####")
    assert field_of(row, "graded.answer") == "4"


def test_a_beginning_is_the_first_rows_and_knows_how_many_there_are(read, tmp_path):
    many = [{"q": "x" * 100, "n": str(i)} for i in range(3000)]
    for kind, total in (("parquet", 3000), ("csv", None)):
        path = str(write(tmp_path / f"data.{kind}", many, group=100))
        first = read(path, 10_000)
        assert list(first) == many[:len(first)] and 0 < len(first) < 3000 and first.total == total
        assert list(read(f"{path}@[5:8]", 10_000)) == many[5:8]
    assert list(read(f"{path}@[-2:]", 10_000)) == [], "nobody has counted the rows of a CSV file"
    assert list(read(f"{tmp_path}/data.parquet@[-2:]", 10_000)) == many[-2:]
    few = read(str(write(tmp_path / "few.csv", many[:3])), 10_000)
    assert (list(few), few.total) == (many[:3], 3)
