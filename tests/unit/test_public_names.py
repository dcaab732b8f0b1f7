"""What `from miles_core import ...` gives."""

from __future__ import annotations

import subprocess
import sys

import pytest

import miles_core


def test_every_public_name_is_there_and_others_are_not():
    for name in miles_core.__all__:
        assert callable(getattr(miles_core, name))
    from miles_core import events, plan, train
    from miles_core.execute import execute
    from miles_core.plugins.plan import prepare
    from miles_core.record.events import read

    assert (plan, train, events) == (prepare, execute, read)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        miles_core.nothing_like_it  # noqa: B018
    with pytest.raises(ImportError):
        exec("from miles_core import nothing_like_it")


def test_none_of_them_brings_torch_and_a_plugin_brings_none_of_them():
    code = ("import sys, miles_core; light = set(sys.modules); from miles_core import *; "
            "sys.exit('torch' in sys.modules or bool(light & {'miles_core.execute', 'miles_core.plugins.plan'}))")
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
