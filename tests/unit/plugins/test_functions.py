"""Functions that options name by path, as a plan reads their source."""

import pytest

from miles_core.errors import ConfigError
from miles_core.plugins.functions import check_function

REWARD = "async? reward(args, sample) -> float"
SOURCE = "class Source(args).get_samples(num_samples)"
TIS = "tis(args, *, loss, masks) -> (loss, masks)"
GENERATE = "async generate(args, sample, params) -> sample, or generate(input) -> output"
NO, GONE, ABSENT = "cannot be called as it would be", "there is no such function", "cannot be imported"


def check(tmp_path, text, call):
    (tmp_path / "own.py").write_text(text)
    check_function("custom_path", f"{tmp_path}/own.py:f", call, ["miles"])


@pytest.mark.parametrize(("text", "call", "message"), [
    ("def f(sample): return 1", REWARD, NO), ("def f(a, b, c): return 1", REWARD, NO),
    ("def f(): return 1", REWARD, NO),
    ("def f(*, args, sample): return 1", REWARD, NO), ("def f(a, b): print(a)", REWARD, NO),
    ("def f(a, b): yield 1", REWARD, NO), ("f = 1", REWARD, NO), ("def f(a, b, c): return 1", GENERATE, NO),
    ("async def f(a, b): return 1", GENERATE, NO), ("async def f(a): pass", "f(args)", NO),
    ("def f(args, loss): return loss", TIS, NO), ("class f:\n def get_samples(self, n): return []", SOURCE, NO),
    ("class f:\n def __init__(self, args): pass", SOURCE, NO),
    ("f = lambda text: 1", REWARD, NO), ("def f(a, b): return {'score': 1}", REWARD, NO),
    ("def f(a, b):\n if a: return None\n return", REWARD, NO), ("def f(a, b): return '1'", REWARD, NO),
    ("def f(a, b): return [1 for _ in b]", REWARD, NO), ("def f(a, b): return 1, 'good'", REWARD, NO),
    ("def f(a, b): return [one for one in b]", "keep(args, samples) -> bool", NO),
    ("def f(a, b): return -b.loss", "loss(args, inputs) -> (loss, metrics)", NO),
    ("class f:\n def __init__(self, args): pass\n def get_samples(self): return []", SOURCE, NO),
    ("# f\ndef g(a, b): return 1", REWARD, GONE), ("class g:\n def f(self, a, b): return 1", REWARD, GONE),
    ("def g():\n def f(a, b): return 1", REWARD, GONE), ("import not_there\ndef f(a, b): return 1", REWARD, ABSENT),
    ("from .here import g\ndef f(a, b): return 1", REWARD, ABSENT),
])
def test_what_the_source_shows_is_refused(tmp_path, text, call, message):
    with pytest.raises(ConfigError, match=message):
        check(tmp_path, text, call)


@pytest.mark.parametrize(("text", "call"), [
    ("def f(a, b, **more): return 1", REWARD), ("async def f(a, b, c=1): return 1", REWARD),
    ("def f(args, samples): return [1 for _ in samples]", REWARD),
    ("def f(a, b): return b.reward, {}", "loss(args, inputs) -> (loss, metrics)"),
    ("def f(a, b):\n def g(): return {'x': 1}\n return g()['x']", REWARD),
    ("def f(*given): return 1", REWARD), ("f = lambda a, b: 1", REWARD), ("f = make(1)", REWARD),
    ("from json import loads as f", REWARD), ("from json import *", REWARD),
    ("class f:\n def __call__(self, a, b): return 1", REWARD), ("f, g = 1, 2", REWARD),
    ("@made\ndef f(sample): pass", REWARD), ("from miles.utils.types import Sample\ndef f(a, b): return 1", REWARD),
    ("try:\n import not_there\nexcept ImportError:\n pass\nif 1:\n def f(a, b): return 1", REWARD),
    ("async def f(input): return input", GENERATE), ("def f(args, *, loss, masks, more=1): return loss", TIS),
    ("def f(args, **given): return given", TIS), ("class f(Base): pass", SOURCE),
    ("def f(a, b): pass", "f(args, data)"),
    ("class f:\n def __init__(self, args): pass\n def get_samples(self, n): return []", SOURCE),
])
def test_what_it_does_not_show_is_not(tmp_path, text, call):
    check(tmp_path, text, call)


@pytest.mark.parametrize("path", ["own/f", "own.py::f", "own/dotted.f", "json.no_such", "no_such_package.f"])
def test_paths_that_are_none(path):
    with pytest.raises(ConfigError):
        check_function("custom_path", path, REWARD, [])
