"""Accepted but unread fails: every option that is declared is read from its own table by code that acts on it."""

import ast
import re

import pytest
from miles_megatron.surface import surface
from source import ROOT, core_files, plugin_files

from miles_core.config.load import load
from miles_core.config.options import Option, options_of
from miles_core.config.tables import TABLES
from miles_core.errors import ConfigError, UnknownKeyError
from miles_core.plugins.manifest import of_toml

DECLARED = {(table, name): option for table, kind in TABLES.items() for name, option in options_of(table, kind).items()}

BY_NAME = {"eval_temperature", "eval_top_p", "eval_top_k"}
"""Read by getattr in build.sampling; tests/integration/test_evaluation.py shows that they act."""


@pytest.fixture(scope="module")
def read() -> set[tuple[str, str]]:
    """(table, option) of every attribute that is read from a thing called like a table; checks do not count."""
    found = set()
    for path in (*core_files(), *plugin_files()):
        if path.parent.name in ("config", "sglang") and path.name in ("tables.py", "check.py", "serving.py"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                base = ast.unparse(node.value).rpartition(".")[2].rstrip("_")
                tables = TABLES if base in ("given", "a") else [base]
                found |= {(table, node.attr) for table in tables}
    return found


@pytest.mark.parametrize(("table", "name"), DECLARED)
def test_every_option_is_read(read, table, name):
    if len(DECLARED[table, name].choices) == 1 or name in BY_NAME:
        return
    assert (table, name) in read, f"[{table}] {name} is accepted, and nobody reads it"


def test_the_exceptions_are_still_needed(read):
    names = {name for _, name in DECLARED}
    assert names >= BY_NAME and not BY_NAME & {name for _, name in read}


def test_the_page_of_flags_has_the_keys_of_megatron_core_that_a_run_file_takes(tmp_path):
    """A key that is derived, refused or the core's own is not among them."""
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    listed = {row for part in page.split("### Megatron-core's fields")[1:]
              for row in re.findall(r"^\| `(\w+)` \|", part.partition("\n#")[0], re.MULTILINE)}

    def takes(field) -> bool:
        file = tmp_path / "run.toml"
        file.write_text(f'[{field.table}]\n{field.name} = "x"\n')
        try:
            load(file, [])
        except UnknownKeyError:
            return False
        except ConfigError:  # of another type
            pass
        return (field.table, field.name) not in DECLARED

    assert {name for name, field in surface().items() if takes(field)} == listed


def flags_without_their_table(options: list[Option]) -> set[str]:
    """What an option is not called: flags of a plugin's option without the table, unless somebody takes them."""
    taken = {f"--{option.name.replace('_', '-')}" for option in DECLARED.values()}
    taken |= {flag for option in [*DECLARED.values(), *options] for flag in (*option.flags, *option.off)}
    taken |= {flag for path in (*core_files(), *plugin_files())  # those of commands
              for flag in re.findall(r'option\(\s*"(--[\w-]+)', path.read_text(encoding="utf-8"))}
    return {f"--{option.name.replace('_', '-')}" for option in options} - taken


def test_an_error_names_flags_by_which_options_are_set():
    paths = sorted(ROOT.glob("plugins/*/src/*/miles-plugin.toml"))
    manifests = [of_toml(path.read_text(encoding="utf-8")) for path in paths]
    unknown = flags_without_their_table([option for one in manifests for option in one.options.values()])
    assert "--sft-response-key" in unknown and "--loss-mask-type" not in unknown
    for path in (*core_files(), *plugin_files()):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "fix" and "miles convert" not in ast.unparse(node.value):
                named = re.findall(r"(?<![\w.-])--[a-z][\w.-]*\w", ast.unparse(node.value))
                assert not unknown & set(named), f"{path}:{node.value.lineno}: write --TABLE.NAME"
