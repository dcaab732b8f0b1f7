"""Every hook is documented and implemented by somebody; the generated pages are up to date.

That each is called, and that its example works, is shown by a run: tests/integration/test_every_hook.py.
"""

import inspect
import re

import pytest
from miles_testing.commands import flags, hooks
from miles_testing.stubs import listed
from source import BUDGETS, ROOT

from miles_core import hookspecs
from miles_core.cli import completion
from miles_core.config.flags import spellings
from miles_core.config.tables import TABLES, RunConfig
from miles_core.plugins import bind, select
from miles_core.plugins.manifest import of_source
from miles_core.plugins.select import built_in

SPECS = listed()
WAITING = BUDGETS["hooks"]["waiting"]


def offered():
    """Hooks that a built-in part or a plugin of this repository implements, by its source."""
    found = {offer.hook for one in built_in() for offer in one.manifest.offers}
    for project in ROOT.glob("plugins/miles-*"):
        for path in project.glob("src/*/plugin.py"):
            found |= {offer.hook for offer in of_source(path).offers}
    return found


@pytest.mark.parametrize("name", SPECS)
def test_a_hook_has_a_docstring_and_a_known_kind_and_role(name):
    spec = SPECS[name]
    assert inspect.getdoc(spec)
    assert spec.kind in hookspecs.KINDS
    assert spec.role in (*hookspecs.ROLES, "every", "plan")
    assert "." in inspect.getdoc(spec)


def test_every_hook_has_an_implementation_or_a_reason_to_wait():
    missing = set(SPECS) - offered()
    assert missing == set(WAITING), "the list hooks.waiting in .ci/budgets.toml is not what the code says"


def test_a_hook_that_has_none_of_it_would_be_found():
    """Neither a page, nor a call site, nor a plugin: these checks see that."""
    assert not hooks.call_sites("made_up") and "made_up" not in offered()
    assert not (ROOT / "docs" / "hooks" / "made_up.md").exists()


def test_the_pages_name_every_hook_once():
    page = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \[`(\w+)`\]", page, re.MULTILINE) == list(SPECS), "hooks in docs/hooks.md, in loop order"
    assert {path.stem for path in (ROOT / "docs" / "hooks").glob("*.md")} == set(SPECS)


@pytest.mark.parametrize("name", SPECS)
def test_a_hook_has_a_page_a_call_site_and_an_example_that_binds(name, tmp_path):
    page = (ROOT / "docs" / "hooks" / f"{name}.md").read_text(encoding="utf-8")
    assert page == hooks.page(name), "write it anew: miles hooks --pages docs/hooks"
    assert hooks.call_sites(name), f"nothing in the core calls the hook {name}"
    path = tmp_path / "mine.py"
    path.write_text(page.partition(f"<!-- hook: {name} -->\n```python\n")[2].partition("```")[0])
    selected = select.select([(str(path), "the page")], ())
    roles = hookspecs.ROLES if SPECS[name].role == "every" else [SPECS[name].role]
    for role in roles:
        bound = getattr(bind.bind(selected, RunConfig(), role), name)
        assert bound is not None and bound != {}, f"{name} is not bound in the {role}"


@pytest.mark.parametrize("page, text", [("hooks.md", hooks.text), ("flags.md", flags.text)])
def test_a_generated_page_is_what_its_command_prints(page, text):
    have = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert have == text(), f"write it anew: miles {page.removesuffix('.md')} > docs/{page}"


def test_every_option_is_on_the_page_of_flags():
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    missing = [option.key for option in completion.options()
               if option.table in TABLES and f"| `{spellings(option)[0][0]}` |" not in page]
    assert not missing
