"""Error codes: every error has one, in kebab-case, and a code means one thing."""

import pickle
import re
from collections import defaultdict

import pytest
from source import ROOT, where

from miles_core.errors import ConfigError, MilesError, OutOfMemoryError
from miles_core.plugins.load import import_file

errors = import_file(ROOT / "docs" / "errors.py")
SITES = list(errors.sites())
WITHOUT = ()
"""Packages whose errors have no codes yet; remove an entry once they have."""


def test_every_error_has_a_code():
    assert [where(site.path, site.line) for site in SITES
            if not site.codes and errors.package(site.path) not in WITHOUT] == []


def test_codes_are_kebab_case():
    assert [code for site in SITES for code in site.codes if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", code)] == []


def test_a_code_means_one_thing():
    """Two places may share a code only where they say the same; a message that is computed is said in one place."""
    places = defaultdict(set)
    for site in SITES:
        for code in site.codes:
            what = re.sub(r"\{.*?\}", "{}", site.what) if site.what else where(site.path, site.line)
            places[code].add(what)
    assert {code: texts for code, texts in places.items() if len(texts) > 1} == {}


def test_the_page_has_the_codes_of_today():
    assert errors.PAGE.read_text(encoding="utf-8") == errors.text(), "python docs/errors.py"


def test_the_message_ends_with_the_code():
    error = ConfigError("lr is too large", code="lr-out-of-range", got=3, who="--lr", fix="lower it")
    assert str(error) == "--lr: lr is too large (got 3). Fix: lower it. [lr-out-of-range]"
    assert str(ConfigError("lr is too large")) == "lr is too large.", "a plugin's error may have none"


@pytest.mark.parametrize("kind", [MilesError, ConfigError, OutOfMemoryError])
def test_code_facts_and_notes_cross_processes(kind):
    error = kind("it failed", code="it-failed", got=[1], who="rank 3", fix="restart it")
    error.add_note("while saving")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error)
    assert vars(again) == vars(error) and again.__notes__ == ["while saving"]


def test_the_scan_sees_every_way_to_make_an_error(tmp_path, monkeypatch):
    """A raise, a lambda, a subclass of a package, a variable that holds the class, and a choice of codes."""
    source = tmp_path / "made.py"
    source.write_text('class OwnError(ConfigError): pass\nclass MilesError: pass\nclass ConfigError(MilesError): pass\n'
                      'late = lambda: ConfigError("late", code="too-late")\n'
                      'raise OwnError(f"{one.name} is bad", code="a-b" if full else "c-d")\n'
                      'raise kind(what, who="me")\nraise ValueError("no")\n')
    monkeypatch.setattr(errors, "sources", lambda: [source])
    assert [(site.kind, site.codes, site.what) for site in errors.sites()] == [
        ("ConfigError", ("too-late",), "late"), ("OwnError", ("a-b", "c-d"), "{name} is bad"), ("kind", (), None)]
