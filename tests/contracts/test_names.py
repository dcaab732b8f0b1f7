"""Names: locals say what they hold, and a class name means one thing."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CARRIERS = frozenset(["asked", "found", "given", "held", "kept", "rest", "said", "there", "told", "took"])
"""Words that say that a value was obtained, and not what it is."""
TO_DO = ("plugins/miles-compat/src",)
"""Where such locals still have to be renamed; remove an entry once it is done."""
ONCE = {"Flight": 0, "Model": 2, "Parts": 1, "Plan": 1, "Turns": 1}
"""Class name -> how many classes of the repository may have it. The two of Model are a table of the run file and what a
plugin declares."""


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted(ROOT.glob(folder))]


def stored(code: str) -> list[tuple[int, str]]:
    """(line, name) of every carrier that a source assigns."""
    return [(node.lineno, node.id) for node in ast.walk(ast.parse(code))
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in CARRIERS]


@pytest.mark.parametrize("folder", ["miles_core", *sorted(f"plugins/{path.parent.name}/src"
                                                             for path in ROOT.glob("plugins/*/src"))])
def test_locals_say_what_they_hold(folder):
    uses = [f"{path.relative_to(ROOT)}:{line}: {name}" for path in sources(f"{folder}/**/*.py")
            if not str(path.relative_to(ROOT)).startswith(TO_DO)
            for line, name in stored(path.read_text(encoding="utf-8"))]
    assert not uses


def test_every_form_of_assignment_counts():
    """A loop, a walrus, a comprehension, an annotation, `with` and a starred target; attributes and calls do not."""
    code = ("found = 1\nfor held in (): pass\nif said := 1: pass\n[kept for kept in ()]\nthere: int = 1\n"
            "with open('x') as given: pass\nfirst, *rest = ()\nself.told = asked(took=1)\n")
    assert {name for _, name in stored(code)} == {"found", "held", "said", "kept", "there", "given", "rest"}


def test_a_class_name_means_one_thing():
    places = defaultdict(list)
    for path in sources("miles_core/**/*.py", "plugins/*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name in ONCE:
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: paths for name, paths in places.items() if len(paths) > ONCE[name]} == {}
