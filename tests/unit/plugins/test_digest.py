"""A process proves that it runs what was planned; other versions or code are refused by host, rank and package."""

from __future__ import annotations

import pickle

import pytest

from miles_core.build import proven_trainer_part
from miles_core.errors import ConfigError
from miles_core.plugins import digest
from miles_core.plugins.plan import prepare
from miles_core.plugins.scan import DEFAULTS
from miles_core.types import Rank
from tests.unit.plugins.installed import install

BASE = ["--hf-checkpoint", "x", "--prompt-data", "y", "--rollout-batch-size", "2", "--num-rollout", "1", "--rm-type",
        "one-reward", "--plugin", "one"]  # fmt: skip


@pytest.fixture
def site(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    install(folder, "one")
    return folder


def test_the_same_files_prove_themselves(site):
    selected = prepare(None, BASE).selected
    proof = digest.proof(selected)
    digest.check(proof, pickle.loads(pickle.dumps(selected)), "rank 0")
    assert set(proof) == {"miles-core", "plugin one", "plugin grpo", *(f"plugin {name}" for name in DEFAULTS)}


@pytest.mark.parametrize("change", ["code", "version", "gone"])
def test_a_rank_with_other_code_is_refused_by_name(site, change):
    plan = prepare(None, BASE)
    proof = digest.proof(plan.selected)
    info = site / "miles_one-1.0.dist-info"
    if change == "code":
        (site / "miles_one" / "more.py").write_text("")
    elif change == "version":
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: miles-one\nVersion: 1.1\n")
    else:
        for folder in (info, site / "miles_one"):
            folder.rename(folder.with_name(f"gone-{folder.name}"))
    with pytest.raises(ConfigError, match=r"trainer rank 3 on .*: .*plugin one: "):
        proven_trainer_part(proof, plan.selected, plan.config, Rank(index=3, size=4))


def test_an_edited_core_is_told(site, monkeypatch):
    selected = prepare(None, BASE).selected
    proof = digest.proof(selected)
    monkeypatch.setattr(digest, "core", lambda: "0123456789ab")
    with pytest.raises(ConfigError, match="miles-core: 0123456789ab here"):
        digest.check(proof, selected, "rank 0")


def test_caches_of_bytecode_are_no_code(site):
    selected = prepare(None, BASE).selected
    proof = digest.proof(selected)
    cache = site / "miles_one" / "__pycache__"
    cache.mkdir()
    (cache / "plugin.cpython-311.pyc").write_bytes(b"x")
    digest.check(proof, selected, "rank 0")
