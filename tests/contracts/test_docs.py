"""What the docs show is true: commands run, Python runs, quoted code stands in its file, links lead somewhere.

The marks of code blocks are described in docs/index.md. A `miles run` line without --plan is run with it.
"""

import os
import re
import subprocess
import sys
import tomllib

import pytest
from click.testing import CliRunner
from miles_megatron.commands.convert import command as convert
from source import ROOT

from miles_core.cli import cli
from miles_core.plugins.load import import_file
from miles_core.plugins.select import all_specs
from miles_core.record.directory import RunDirectory
from miles_core.record.events import EventLog
from tests.pages import blocks, commands, compare_printed, pages

PAGES = pages()
LINKED = sorted({*PAGES, *(path for where in ("docs/hooks/*.md", "plugins/*/README.md", "examples/**/*.md",
                                              "bench/**/*.md") for path in ROOT.glob(where))})
GENERATED = ("flags.md", "hooks.md")
FOLLOWED = {"new-architecture.md": "test_tutorials.py", "publish-a-plugin.md": "test_tutorials.py",
            "reward.md": "test_tutorials.py", "loss.md": "test_tutorials.py", "model-spec.md": "test_tutorials.py",
            "python-api.md": "test_python_api.py", "your-model.md": "test_your_model.py"}
"""Page -> the test in tests/integration that does from beginning to end what it says."""
FIGURE = re.compile(r"  \w+(\[[\w ]+\])? --(?: [\w ]+ --)?> \w+(\[[\w ]+\])?")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder that looks like the repository's root after some runs, with the files that the README makes."""
    for block in blocks(ROOT / "README.md"):
        if block.mark == "file":
            (tmp_path / block.what).write_text(block.text)
    for name in ("examples", "plugins", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "runs" / "saved").mkdir(parents=True)
    for name in ("demo", "a", "b"):
        with RunDirectory(tmp_path / "runs" / name) as directory:
            log = EventLog(directory.events)
            log.run_start("0", {})
            log.append("metrics", 0, metrics={"rollout/raw_reward": 0.5})
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
    printed = ""
    for block in blocks(page):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.mark == "quoted":
            assert block.text in (ROOT / block.what).read_text(), f"{where} is not what {block.what} says"
        elif block.mark == "file":
            read(block, where)
            (place / block.what).write_text(block.text)
        elif block.language == "sh" and block.mark is None:
            printed = "".join(command(words, f"{where}: {line}") for line, words in commands(block.text))
        elif block.language == "text" and block.mark is None:
            compare_printed(block.text, printed, where)
        elif block.language == "python" and block.mark is None:
            exec(compile(block.text, where, "exec"), names)
        elif block.mark is None:
            read(block, where)


def read(block, where):
    """Whether a block is of its language."""
    if block.language == "toml":
        tomllib.loads(block.text)
    elif block.language == "python":
        compile(block.text, where, "exec")
    else:
        assert block.language == "mermaid", f"{where}: nobody knows how to run {block.language}"
        assert all(map(FIGURE.fullmatch, block.text.splitlines()[1:])), f"{where}: a line is no arrow"


def command(words, where):
    """What a line of shell prints to a user."""
    assert words[0] in ("miles", "make"), where
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), where
        return ""
    if words[1] == "run" and "--plan" not in words and "--help" not in words:
        words.append("--plan")
    result = CliRunner().invoke(cli, words[1:], catch_exceptions=False)
    assert result.exit_code == 0, f"{where}\n{result.output}"
    return result.output


@pytest.mark.parametrize(("page", "test"), FOLLOWED.items())
def test_pages_that_are_followed_elsewhere_are_and_quote_what_is_there(page, test):
    assert page in (ROOT / "tests" / "integration" / test).read_text(encoding="utf-8")
    [path] = [path for path in PAGES if path.name == page]
    for block in blocks(path):
        assert block.mark != "quoted" or block.text in (ROOT / block.what).read_text(encoding="utf-8"), block


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_fences_are_blocks(page):
    """A fence that the pattern does not find would not be run."""
    text = re.sub(r"^<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(blocks(page))


def test_the_page_of_contracts_is_what_the_code_says():
    made = import_file(ROOT / "docs" / "contracts.py")
    assert (ROOT / "docs" / "contracts.md").read_text(encoding="utf-8") == made.text(), "python docs/contracts.py"
    parts = {name for name, spec in all_specs().items() if spec.part and name != "model_spec"}
    assert {hook for hook, _ in made.PARTS.values()} == parts


def test_names_in_tables_of_the_site_break_at_their_joints_and_nothing_else_does():
    outside = import_file(ROOT / "docs" / "outside.py")
    page = "<p><code>a_b</code></p><tr><td>c_d <code>num_layers</code></td><th><code>._e a.b</code></th></tr>"
    assert outside.on_page_content(page) == page.replace("num_", "num_<wbr>").replace("a.b", "a.<wbr>b")


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


def test_tests_that_the_docs_name_are_there():
    named = [(page, *found) for page in LINKED
             for found in re.findall(r"`(tests/\w+/[\w/]+\.py)(?:::(\w+))?`", page.read_text(encoding="utf-8"))]
    missing = [f"{page.name}: {path} {name}" for page, path, name in named
               if not (ROOT / path).is_file() or name and f"def {name}(" not in (ROOT / path).read_text("utf-8")]
    assert len(named) > 20 and not missing, missing


FLAG = re.compile(r"`(--[a-z][a-z0-9.-]*)")


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in GENERATED], ids=lambda page: page.name)
def test_flags_that_the_docs_name_exist(page):
    from miles_flags.table import flags
    from miles_megatron.surface import surface
    from miles_sglang.forwarded import PREFIXES, surface_of

    from miles_core.cli import completion
    from miles_core.config.flags import spellings

    known = {flag for option in completion.options() for side in spellings(option) for flag in side}
    known |= {"--plugin", "--plan", "--json", "--live", "--no-live", "--help", "--version", "--messages"}
    known |= {"--bundle", "--with-samples", "--no-plugin", "--preset", "--locked", "--out", "--all"}
    known |= {"--host", "--port", "--open", "--distribution", "--family", "--template", "--both", "--b-on-cpu"}
    known |= {flag for one in convert.commands.values() for option in one.params for flag in option.opts}
    known |= set(flags()) | {f"--{name.replace('_', '-')}" for name in surface()}
    known |= {f"--{begin}-{flag[2:]}" for table, begin in PREFIXES.items() for flag in surface_of(table).spellings()}
    known |= {"--sglang", "--cut-off.most-truncated", "--most-truncated"}  # of plugins that pages make
    known |= {"--varied.least", "--digits.most", "--hook"}
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
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == {path.relative_to(ROOT / "docs").as_posix() for path in PAGES if path.name != "README.md"}


def test_the_site_builds_and_every_link_in_it_leads_somewhere(tmp_path):
    """Not with --quiet, which keeps --strict from counting warnings."""
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
                          cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
                          timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tutorials" / "reward.html").is_file() and (tmp_path / "hooks" / "reward.html").is_file()
