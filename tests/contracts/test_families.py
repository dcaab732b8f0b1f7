"""The support matrix of docs/model-families.md speaks of every family that is offered, and of no other."""

import re
import tomllib
from pathlib import Path

import pytest
from miles_megatron import architecture, estimate, heads
from miles_megatron.testing.parity import BEGIN, END, cases
from source import ROOT

from miles_core.plugins import select
from miles_core.plugins.load import import_file
from miles_core.plugins.scan import KNOWN, installed

ROW = re.compile(r"^\| (?P<name>[^|]+) \| `(?P<family>\w+)` \| (?P<plugin>[^|]+) \|.*\| exact \|", re.MULTILINE)
CASES = [ROOT / "plugins/miles-megatron/tests/parity.toml", *ROOT.glob("plugins/*/tests/parity.toml")]


def rows():
    page = (ROOT / "docs" / "model-families.md").read_text(encoding="utf-8")
    return [match.groupdict() for match in ROW.finditer(page.partition(BEGIN)[2].partition(END)[0])]


def offers():
    """model_type -> who builds it."""
    built_in = {offer.name: "built in" for one in select.built_in() for offer in one.manifest.offers
                if offer.hook == "model_spec"}
    return built_in | {offer.partition(":")[2]: f"miles-{plugin}" for plugin, names in KNOWN.items() for offer in names
                       if offer.startswith("model_spec:")}


def test_the_support_matrix_has_a_row_for_every_family_and_no_other():
    assert {row["family"]: row["plugin"] for row in rows()} == offers()


def test_the_support_matrix_has_a_row_for_every_case_of_the_kit():
    found = {(case.family, case.name) for path in CASES for case in cases(path)}
    assert {(row["family"], row["name"]) for row in rows()} == found


def test_the_list_of_what_fsdp_alone_takes_is_that_of_the_release_it_names():
    fsdp_families = import_file(ROOT / "docs" / "fsdp_families.py")
    text = fsdp_families.PAGE.read_text(encoding="utf-8")
    if f"Of transformers {fsdp_families.transformers.__version__} these" not in text:
        pytest.skip("another transformers than that of constraints/cpu.txt")
    assert fsdp_families.page(text) == text, "run python docs/fsdp_families.py"
    assert fsdp_families.alone() and not {*fsdp_families.alone()} & {*offers()}


def test_every_tiny_model_divides_by_two():
    """So that the kit can cut each into tensor-parallel ranks and pipeline stages."""
    from miles_megatron.testing.parity import TINY

    keys = ("num_key_value_heads", "num_attention_heads", "num_hidden_layers", "vocab_size", "intermediate_size")
    for path in CASES:
        for family, entries in tomllib.loads(path.read_text(encoding="utf-8")).items():
            for one in entries:
                sizes = {**TINY, **one.get("config", {})}
                whole = "o_lora_rank" in sizes  # one head of keys, which every rank has
                assert not [key for key in keys[whole:] if sizes[key] % 2], f"{family} {one['name']}"


def test_what_a_plugin_states_of_a_config_json_is_of_its_families_and_in_keys_that_the_plan_reads():
    """A misspelt word would be passed over."""
    read = "".join(Path(one.__file__).read_text(encoding="utf-8") for one in (architecture, estimate, heads))
    stated = 0
    for one in installed():
        manifest = select.manifest_of(one)
        mine = {offer.name for offer in manifest.offers if offer.hook == "model_spec"}
        for word in (word for word in manifest.provides if word.startswith("model_spec:")):
            _, family, *words = word.split(":")
            assert family in mine, word
            for key, sign, other in (each.partition("=") for each in words):
                assert sign and other and f'"{key}"' in read, f"{word}: {key}"
                stated += 1
    assert stated > 20


def test_the_page_says_which_transformers_a_family_takes():
    """As its plugin states it, of a model_type that some plugin builds, by itself or as a text model inside."""
    stated: dict[str, dict[str, str]] = {}
    for one in installed():
        for kind, *rest in (word.split(":") for word in select.manifest_of(one).provides):
            if kind in ("read-by", "computed-by"):
                family, release = rest
                stated.setdefault(family, {})[kind] = release
    page = (ROOT / "docs" / "model-families.md").read_text(encoding="utf-8")
    table = page.partition("<!-- releases: begin -->")[2].partition("<!-- releases: end -->")[0]
    row = re.compile(r"^\| `(\w+)` \| ([\d.]*) ?\| ([\d.]*) ?\| .", re.MULTILINE)
    shown = {family: {kind: release for kind, release in (("read-by", read), ("computed-by", computed)) if release}
             for family, read, computed in row.findall(table)}
    assert stated == shown and stated.keys() <= offers().keys()
