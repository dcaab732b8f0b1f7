"""Options of plugins: names of one plugin are nobody else's, and a further flag of two owners is an error."""

from __future__ import annotations

import pytest

from miles_core.errors import OwnerError
from miles_core.plugins.plan import prepare
from tests.unit.plugins.installed import BODY, install

RUN = ["--hf-checkpoint", "x", "--prompt-data", "y", "--rollout-batch-size", "2", "--num-rollout", "1",
       "--rm-type", "one-reward", "--plugin", "one", "two"]  # fmt: skip


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_an_option_of_two_plugins_is_one_of_each(site):
    for name in ("one", "two"):
        install(site, name)
    plan = prepare(None, [*RUN, "--one.width", "5", "--two.width", "7"])
    assert [plan.config.options[name]["width"] for name in ("one", "two")] == [5, 7]


def test_a_further_flag_of_two_plugins_names_both(site):
    for name in ("one", "two"):
        install(site, name, body=BODY.replace('"How wide."', '"How wide.", flags=("--wide",)'))
    with pytest.raises(OwnerError, match=r"--wide belongs to one\.width and to two\.width.*rename"):
        prepare(None, [*RUN, "--wide", "5"])
