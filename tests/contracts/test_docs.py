"""What the docs show is true: commands run, Python runs, quoted code stands in its file, links lead somewhere.

A code block may be marked by an HTML comment on the line before it:

    <!-- file: NAME -->        it is a file of that name, which the page's other blocks use
    <!-- quoted: PATH -->      it stands in that file of the repository, word for word
    <!-- not run: REASON -->   it cannot run here

A `miles run` line without --plan is run with it.
"""

import re
import shlex
import sys
import tomllib
from dataclasses import dataclass

import pytest
from click.testing import CliRunner
from source import ROOT

from miles_core.cli import cli
from miles_core.cli.convert import command as convert
from miles_core.plugins.load import import_file
from miles_core.record.directory import RunDirectory
from miles_core.record.events import EventLog

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
LINKED = sorted({*PAGES, *(path for where in ("plugins/*/README.md", "examples/**/*.md", "bench/**/*.md")
                           for path in ROOT.glob(where))})
MARK = r"(?:^<!-- (?P<mark>file|quoted|not run): (?P<what>[^>]+?) -->\n)?"
BLOCK = re.compile(MARK + r"^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
GENERATED = ("flags.md", "hooks.md")
FOLLOWED = ("new-architecture.md",)
"""A test of its own does what the page says (tests/integration/test_new_architecture.py)."""


@dataclass(frozen=True)
class Block:
    """One fenced code block."""

    language: str
    text: str
    mark: str | None
    what: str | None
    line: int


def blocks(page):
    """The code blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [Block(found["language"], found["text"], found["mark"], found["what"], text[: found.start()].count("\n") + 1)
            for found in BLOCK.finditer(text)]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder that looks like the repository's root after some runs, with the files that the README makes."""
    for block in blocks(ROOT / "README.md"):
        if block.mark == "file":
            (tmp_path / block.what).write_text(block.text)
    for name in ("examples", "plugins", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("demo", "a", "b"):
        with RunDirectory(tmp_path / "runs" / name).acquire() as directory:
            log = EventLog(directory.events)
            log.run_start("0", {})
            log.metrics(0, {"rollout/raw_reward": 0.5})
            log.append("hashes", 0, weights="0", batch="0")
            log.run_end("completed")
            log.close()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in FOLLOWED], ids=lambda page: page.name)
def test_code_blocks_run(page, place):
    names: dict[str, object] = {"__name__": page.stem}
    for block in blocks(page):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.mark == "not run":
            continue
        if block.mark == "quoted":
            assert block.text in (ROOT / block.what).read_text(), f"{where} is not what {block.what} says"
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "sh":
            for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
                command(line, where)
        elif block.language == "python" and block.mark is None:
            exec(compile(block.text, where, "exec"), names)
        elif block.language == "python":
            compile(block.text, where, "exec")
        else:
            raise AssertionError(f"{where}: nobody knows how to run {block.language}")
        if block.mark == "file":
            (place / block.what).write_text(block.text)


def command(line, where):
    """Run one line of shell as a user would."""
    words = shlex.split(line, comments=True)
    if not words:
        return
    assert words[0] in ("miles", "make"), f"{where}: {line}"
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"{where}: {line}"
        return
    if words[1] == "run" and "--plan" not in words and "--help" not in words:
        words.append("--plan")
    result = CliRunner().invoke(cli, words[1:], catch_exceptions=False)
    assert result.exit_code == 0, f"{where}: {line}\n{result.output}"


def test_make_commands_of_the_readme_are_there():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = set(re.findall(r"\bmake\s+([a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {"demo", "test"} <= named <= set(targets)


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{page.relative_to(ROOT)} links to {target}"
        if anchor and there.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, f"{page.relative_to(ROOT)} links to {target}"


def slug(heading):
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in GENERATED], ids=lambda page: page.name)
def test_lines_are_short_enough_to_read(page):
    long = [f"{page.name}:{number}" for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
            if len(line) > 130 and not line.startswith("|")]
    assert not long, long


FLAG = re.compile(r"`(--[a-z][a-z0-9.-]*)")


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in GENERATED], ids=lambda page: page.name)
def test_flags_that_the_docs_name_exist(page):
    from miles_core.backends.megatron.surface import surface
    from miles_core.backends.sglang.forwarded import PREFIXES, surface_of
    from miles_core.cli import flags
    from miles_core.config.flags import miles_flags

    known = {flag for option in flags.options() for side in flags.spellings(option) for flag in side}
    known |= {"--plugin", "--plan", "--json", "--live", "--no-live", "--help", "--version", "--messages"}
    known |= {"--bundle", "--with-samples", "--no-plugin", "--preset", "--locked", "--out", "--all"}
    known |= {"--host", "--port", "--open"}
    known |= {flag for one in convert.commands.values() for option in one.params for flag in option.opts}
    known |= set(miles_flags()) | {f"--{name.replace('_', '-')}" for name in surface()}
    known |= {f"--{begin}-{flag[2:]}" for table, begin in PREFIXES.items() for flag in surface_of(table).spellings()}
    known |= {"--sglang", "--cut-off.most-truncated", "--most-truncated"}  # of the plugin that write-a-plugin.md makes
    named = set(FLAG.findall(page.read_text(encoding="utf-8")))
    assert not {flag for flag in named if flag.rstrip("-.") not in known and flag != "--no-"}


def test_the_metrics_table_has_every_metric_that_the_core_writes():
    page = (ROOT / "docs" / "run-directory.md").read_text(encoding="utf-8")
    written = set()
    for path in (ROOT / "miles_core").rglob("*.py"):
        if "record" not in path.parts and "testing" not in path.parts:
            written |= set(re.findall(r'"((?:rollout|train|perf)/[\w/-]+[a-z0-9])"', path.read_text(encoding="utf-8")))
    missing = {name for name in written if f"`{name}`" not in page and f"`{name.rpartition('/')[2]}`" not in page}
    assert not missing, missing


def test_docs_speak_of_nothing_but_the_project():
    words = re.compile(r"/work/|/tmp/|/root/", re.IGNORECASE)
    found = [f"{page.name}: {match[0]}" for page in LINKED for match in words.finditer(page.read_text(encoding="utf-8"))
             if "bench" not in page.parts]
    assert not found, found


def test_the_list_for_programs_is_what_the_pages_say():
    module = import_file(ROOT / "docs" / "llms.py")
    assert (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8") == module.text(), "run python docs/llms.py"


def test_every_page_has_its_place_on_the_site():
    listed = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == {path.name for path in (ROOT / "docs").glob("*.md")}
