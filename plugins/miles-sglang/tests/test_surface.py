"""The arguments read from the source of SGLang and its routers: what is declared, in every form that the sources use.

Against the real packages it is checked where there is an environment that has them: test_real_server.py.
"""

from __future__ import annotations

import dataclasses
import sys

import pytest
from miles_sglang import source, surface

from miles_core.config.options import Origin, _annotation, convert
from miles_core.errors import ConfigError

SERVER = '''
WORDS = ["a", "b"]
MORE = [*WORDS, "c"]
OTHERS = {"y", "x"}
if PLUGIN:
    OTHERS.add("z")

class ServerArgs:
    """Prose."""

    model_path: A[str, Arg(help="The model. Second sentence.", aliases=["--model"])]
    word: A[Optional[str], "One word."] = None
    chosen: A[str, Arg(help="One of them.", choices=MORE)] = WORDS[0]
    listed: A[Optional[str], Arg(choices=OTHERS)] = None
    computed: A[str, Arg(choices=Backend.ALL)] = "p"
    literal: A[Optional[Literal["full", "none"]], "..."] = None
    number: A[int, Arg(help="Tokens." + f"{doc}", type_parser=human_readable_int)] = 10 * 2**3
    share: A[float, "..."] = 0.5
    sizes: A[Optional[List[int]], "..."] = None
    made: A[List[str], Arg(nargs="*")] = dataclasses.field(default_factory=lambda: list(WORDS))
    loader: A[Optional[List[str]], Arg(nargs="*")] = None
    settings: A[Optional[Dict[str, Any]], Arg(type_parser=json.loads)] = None
    hooks: A[Optional[List[dict[str, Any]]], Arg(type_parser=json_list_type)] = None
    either: A[Optional[Union[str, Dict]], "..."] = None
    on: A[bool, "..."] = False
    both: A[bool, Arg(action=argparse.BooleanOptionalAction)] = True
    renamed: A[str, Arg(cli_name="--other-name")] = "auto"
    graph: A[Optional[str], Arg(choices=WORDS)] = None
    manual: Optional[str] = None
    hidden: A[bool, Arg(no_cli=True)] = False
    never: A[bool, Arg(no_cli=True)] = False
    handler: Optional[Callable] = None

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--manual", type=str, choices=["auto"] + list(Parser.all()), help="By hand.")
        parser.add_argument("--config", type=str, help="No field.")
        parser.add_argument("--gone", action=DeprecatedAction, help="Nothing.")
        parser.add_argument("--old-number", action=DeprecatedAliasStoreAction, new_flag="--number", dest="number")
        parser.add_argument("--graph-a", action=DeprecatedStoreConstAction, dest="graph", const_value=Kind.A)
        parser.add_argument("--hidden", action=DeprecatedStoreTrueAction, new_flag="--on")
'''

ROUTER = '''
POLICIES = ["random", "cache_aware"]

class RouterArgs:
    policy: str = "cache_aware"
    retries: int = 5
    workers: list[str] = dataclasses.field(default_factory=list)

    @staticmethod
    def add_cli_args(parser, use_router_prefix=False):
        prefix = "router-" if use_router_prefix else ""
        if use_router_prefix:
            parser.add_argument("--router-only-beside-a-server", action="store_true")
        group.add_argument("--host", type=str, default="0.0.0.0")
        group.add_argument(f"--{prefix}policy", f"--{prefix}routing", default=RouterArgs.policy, choices=POLICIES,
                           help=("How. " "Why."))
        group.add_argument(f"--{prefix}retries", type=int, default=RouterArgs.retries)
        group.add_argument(f"--{prefix}port", type=_non_negative_int, default=None)
        group.add_argument(f"--{prefix}workers", type=str, nargs="*", action="extend", default=[])
        group.add_argument(f"--{prefix}alias", type=str, action="append", default=[])
        group.add_argument(f"--{prefix}prefill", nargs="+", action="append")
        group.add_argument(f"--{prefix}dp-aware", action="store_true")
        group.add_argument(f"--{prefix}remove", action=argparse.BooleanOptionalAction, default=None)
        group.add_argument(f"--{prefix}router-selector", type=str, nargs="+", action="extend", default=None)
'''


def read(tmp_path, text, reader):
    path = tmp_path / "args.py"
    path.write_text(text)
    return reader(path)


@pytest.mark.parametrize(("name", "kind", "default", "flag", "form"), [
    ("model_path", "str", None, "--model-path", "words"),
    ("word", "str | None", None, "--word", "words"),
    ("chosen", "Literal['a', 'b', 'c']", "a", "--chosen", "words"),
    ("listed", "Literal['x', 'y'] | None", None, "--listed", "words"),
    ("computed", "str", "p", "--computed", "words"),
    ("literal", "Literal['full', 'none'] | None", None, "--literal", "words"),
    ("number", "int", 80, "--number", "words"),
    ("share", "float", 0.5, "--share", "words"),
    ("sizes", "list[int] | None", None, "--sizes", "words"),
    ("made", "list[str]", ["a", "b"], "--made", "words"),
    ("loader", "list[str] | None", None, "--loader", "words"),
    ("settings", "dict[str, object] | None", None, "--settings", "json"),
    ("hooks", "list[object] | None", None, "--hooks", "json"),
    ("either", "str | None", None, "--either", "words"),
    ("on", "bool", False, "--on", "switch"),
    ("both", "bool", True, "--both", "pair"),
    ("renamed", "str", "auto", "--other-name", "words"),
    ("manual", "str | None", None, "--manual", "words"),
    ("hidden", "bool", False, "--hidden", "switch"),
])
def test_a_field_of_each_sort(tmp_path, name, kind, default, flag, form):
    fields, _ = read(tmp_path, SERVER, source.server_args)
    assert fields[name] == surface.Field(name, kind, default, flag, form, fields[name].also, fields[name].help)


def test_what_no_flag_can_say_is_left_out_and_older_flags_are_known(tmp_path):
    fields, old = read(tmp_path, SERVER, source.server_args)
    assert not {"handler", "never"} & set(fields)
    assert old == {"--graph-a": ["graph", "a"]}
    assert fields["number"].also == ("--old-number",) and fields["model_path"].also == ("--model",)


def test_help_is_the_first_sentences_on_one_line(tmp_path):
    fields, _ = read(tmp_path, SERVER, source.server_args)
    assert fields["model_path"].help == "The model. Second sentence." and fields["number"].help == "Tokens."
    assert fields["manual"].help == "By hand."


def test_the_flags_of_a_router(tmp_path):
    fields, _ = read(tmp_path, ROUTER, source.router_args)
    assert {name: (field.type, field.default, field.flag, field.form) for name, field in fields.items()} == {
        "host": ("str", "0.0.0.0", "--host", "words"),
        "policy": ("Literal['random', 'cache_aware']", "cache_aware", "--policy", "words"),
        "retries": ("int", 5, "--retries", "words"),
        "port": ("int | None", None, "--port", "words"),
        "workers": ("list[str]", [], "--workers", "words"),
        "alias": ("list[str]", [], "--alias", "repeat"),
        "dp_aware": ("bool", False, "--dp-aware", "switch"),
        "remove": ("bool | None", None, "--remove", "pair"),
        "router_selector": ("list[str]", [], "--router-selector", "words"),
    }
    assert fields["policy"].also == ("--routing",) and fields["policy"].help == "How. Why."


def test_fields_of_composed_classes_and_those_with_more_beside_their_help_are_read(tmp_path):
    """Since 0.5.20 ServerArgs is put together from classes; one annotation may say more than a help text."""
    folder = tmp_path / "arg_groups" / "fields"
    folder.mkdir(parents=True)
    (folder.parent / "choices.py").write_text('KINDS = ["a", "b"]\n')
    (folder / "model.py").write_text("""
MANY = 3

class Model(msgspec.Struct):
    _NS_PATH = "model"
    model_path: A[str, Arg(help="The model.", aliases=["--model"])]
    kind: A[Optional[str], Arg(help="Which.", choices=KINDS), Derived(fallback="a")] = None
    many: A[int, NS("model"), "How many."] = MANY
""")
    fields, _ = read(tmp_path, "class ServerArgs:\n    def add_cli_args(parser):\n        pass\n", source.server_args)
    seen = {name: (field.type, field.default, field.flag) for name, field in fields.items()}
    assert seen == {"model_path": ("str", None, "--model-path"), "many": ("int", 3, "--many"),
                    "kind": ("Literal['a', 'b'] | None", None, "--kind")}
    assert fields["kind"].help == "Which." and fields["many"].help == "How many."


def test_a_flag_whose_second_spelling_is_the_field_is_read(tmp_path):
    """Up to 0.5.12 fields are plain, and add_cli_args has all flags."""
    fields, _ = read(tmp_path, """
class ServerArgs:
    tp_size: int = 1

    def add_cli_args(parser):
        parser.add_argument("--tensor-parallel-size", "--tp-size", type=int, default=ServerArgs.tp_size, help="GPUs.")
""", source.server_args)
    assert (fields["tp_size"].flag, fields["tp_size"].also) == ("--tensor-parallel-size", ("--tp-size",))


@pytest.mark.parametrize(("text", "message"), [
    ("class Other:\n    pass\n", "there is no class ServerArgs"),
    ("class ServerArgs:\n    word: str = 'a'\n", "has no method add_cli_args"),
    ("class ServerArgs(:\n", "cannot be read"), ("class ServerArgs:\n    pass\n", "declares no arguments"),
])
def test_a_source_of_another_shape_is_named_with_its_file(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, text, source.server_args)
    assert "args.py" in str(caught.value)


def test_the_bundled_list_is_well_formed():
    for package in ("sglang", "smg"):
        known = surface.bundled(package)
        assert len(known.fields) > 200 and not known.installed and known.version in str(known)
        flags = [flag for field in known.fields.values() for flag in (field.flag, *field.also)]
        assert len(flags) == len(set(flags))
        for field in known.fields.values():
            _annotation(field.type)
            if field.default is not None:
                assert convert(field.option("server"), field.default, Origin("default")) == field.default


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An importable package `sglang` 9.9.9 that raises when it is imported, and an empty cache."""
    package = tmp_path / "site" / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "srt" / "server_args.py").write_text(SERVER)
    about = tmp_path / "site" / "sglang-9.9.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9.9\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    surface.folder_of.cache_clear()
    surface._installed.cache_clear()
    yield package
    surface.folder_of.cache_clear()
    surface._installed.cache_clear()


def test_what_is_installed_is_read_without_importing_it(site):
    known = surface.server()
    assert str(known) == "SGLang 9.9.9" and known.installed
    assert "number" in known.fields and "sglang" not in sys.modules


def test_the_second_read_is_from_the_cache_until_the_source_changes(site, monkeypatch):
    first = surface.server()
    surface._installed.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(source, "server_args", lambda file: pytest.fail("read again"))
        assert surface.server() == first
    file = site / "srt" / "server_args.py"
    file.write_text(SERVER.replace("share: A[float", "portion: A[float"))
    surface._installed.cache_clear()
    assert "portion" in surface.server().fields


def test_where_nothing_is_installed_the_bundled_list_stands_in(monkeypatch):
    monkeypatch.setattr(surface, "folder_of", lambda package: None)
    assert str(surface.server()).endswith("which is not installed here")
    assert surface.router().package == "smg" and surface.router("sglang_router").package == "smg"


def test_a_list_of_the_bundle_holds_all_but_the_help(site, tmp_path):
    """What the bundle leaves out of an entry comes back when it is read."""
    import tomllib

    fields, _ = read(tmp_path, SERVER, source.server_args)
    text = "\n".join(f"{name} = {source._entry(dataclasses.asdict(field))}" for name, field in fields.items())
    back = {name: surface.Field(**{"name": name, **surface.usual(name, entry["type"]), **entry,
                                   "also": tuple(entry.get("also", ()))})
            for name, entry in tomllib.loads(text).items()}
    assert back == {name: dataclasses.replace(field, help="") for name, field in fields.items()}
