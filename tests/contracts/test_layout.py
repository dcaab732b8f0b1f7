"""The shape of the repository: names of files, who imports whom, what everybody writes or leaves out."""

import ast
import re
import subprocess
import sys
import tomllib

import pytest
from source import (
    BUDGETS,
    CORE,
    PACKAGES,
    ROOT,
    core_files,
    imports,
    module_of,
    plugin_files,
    repository_files,
    tree,
    where,
)

LAYERS = BUDGETS["layers"]
HEAVY = ("torch", "ray", "sglang", "megatron", "transformers", "numpy", "pydantic", "safetensors")


def layer_of(module):
    """The layer of the longest listed name that the module lies in."""
    fits = [(len(name), layer) for layer in LAYERS["order"] for name in LAYERS[layer]
            if module == name or module.startswith(name + ".")]
    return max(fits)[1]


def test_no_file_has_a_name_that_says_nothing():
    found = [where(path) for path in repository_files() if path.stem in ("utils", "util", "common", "misc", "helpers")]
    assert not found, found


def test_no_stage_imports_another():
    found = []
    for path in sorted((CORE / "stages").glob("*.py")):
        for line, name in imports(path):
            # defaults.py is the plugin that offers the stages' defaults through the hooks; it is no stage itself.
            if name.startswith("miles_core.stages.") and path.stem != "defaults":
                found.append(f"{where(path, line)} imports {name}")
    assert not found, found


def test_imports_go_down_the_layers():
    found = []
    for path in core_files():
        module = module_of(path)
        for line, name in imports(path):
            if name.split(".")[0] == "miles_core" and module != "miles_core":
                here, there = (LAYERS["order"].index(layer_of(each)) for each in (module, name))
                if there < here:
                    found.append(f"{where(path, line)} ({layer_of(module)}) imports {name} ({layer_of(name)})")
    assert not found, found


def test_every_module_has_a_layer_of_its_own_choice():
    named = {name for layer in LAYERS["order"] for name in LAYERS[layer]} - {"miles_core"}
    for name in named:
        path = ROOT / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), f"{name} has a layer and is not there"
    stray = [module_of(path) for path in core_files() if module_of(path) not in ("miles_core",)
             and not any(module_of(path) == name or module_of(path).startswith(name + ".") for name in named)]
    assert not stray, f"give them a layer in .ci/budgets.toml: {stray}"


def test_the_core_knows_no_package():
    assert PACKAGES, "there are packages to know nothing of"
    imported = [f"{where(path, line)} imports {name}" for path in core_files()
                for line, name in imports(path, checkers=True) if name.split(".")[0] in PACKAGES]
    assert not imported, imported
    words = re.compile(r"\b(" + "|".join(PACKAGES) + r")\b")
    named = [where(path, number) for path in core_files()
             for number, line in enumerate(path.read_text().splitlines(), 1) if words.search(line)]
    assert not named, named


def test_a_package_imports_of_others_what_they_declare_public():
    """Under [tool.miles] in their pyproject.toml; and nothing is declared that nobody imports."""
    declared = {name: set(tomllib.loads((folder / "pyproject.toml").read_text()).get("tool", {}).get("miles", {}).get(
        "public", ())) for name, folder in PACKAGES.items()}
    found, used = [], set()
    for path in plugin_files():
        own = path.relative_to(ROOT / "plugins").parts[2]
        for line, name in imports(path, checkers=True):
            top = name.partition(".")[0]
            if top not in PACKAGES or top == own:
                continue
            used.add(name)
            if name not in declared[top]:
                found.append(f"{where(path, line)} imports {name}, which {top} does not declare public")
    assert not found, found
    assert not {name for names in declared.values() for name in names} - used


def imported(*, checkers):
    """Module -> modules of this repository that are imported when it is: at its top level, not inside functions.

    The packages above a module are left out: they are imported before it, and hand on names of modules below.
    """
    files = {module_of(path): path for path in core_files()}
    for path in plugin_files():
        parts = path.relative_to(ROOT / "plugins").with_suffix("").parts[2:]
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {module: {name for _, name in imports(path, lazy=False, checkers=checkers) if name in files} - {module}
            for module, path in files.items()}


def cycles(graph):
    """The strongly connected components of more than one node (Tarjan, 1972), each sorted."""
    number, lowest, path, found = {}, {}, [], []

    def visit(node):
        number[node] = lowest[node] = len(number)
        path.append(node)
        for other in graph[node]:
            if other not in number:
                visit(other)
            if other in path:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == number[node]:
            component = path[path.index(node):]
            del path[path.index(node):]
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in number:
            visit(node)
    return sorted(found)


def test_no_modules_import_each_other():
    graph = imported(checkers=False)
    assert len(graph) > 300 and "miles_core.stages.rollout" in graph["miles_core.build"]
    assert "miles_core.plugins.resolve" in graph["miles_megatron.step"]
    assert cycles(graph) == []
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


NAMED_BY_TYPES = [
    ["miles_tools.agent", "miles_tools.conversation", "miles_tools.plugin"],  # options stand in the plugin's own file
]
"""Modules of packages that know each other by annotations alone."""


def test_annotations_of_packages_go_one_way_too():
    """Of the core they need not: hookspecs.py names the types of everybody."""
    ours = [cycle for cycle in cycles(imported(checkers=True)) if not cycle[0].startswith("miles_core.")]
    assert ours == NAMED_BY_TYPES


ALGORITHMS = ("grpo", "sft", "gspo", "ppo", "reinforce", "rloo", "dapo")


def test_the_core_decides_nothing_by_the_name_of_an_algorithm():
    """Names of algorithms appear as documented defaults and in scan.py's table of official plugins, nowhere else."""
    allowed = {
        ("config/tables.py", "grpo"),  # the default of --advantage-estimator, and of --loss-type sft_loss
        ("config/tables.py", "sft"),
        ("plugins/resolve.py", "sft"),  # --loss-type sft_loss is Miles's name for two parts called sft
    }
    found = []
    for path in core_files():
        if path.name == "scan.py":
            continue
        for node in ast.walk(tree(path)):
            is_name = isinstance(node, ast.Constant) and node.value in ALGORITHMS
            if is_name and (str(path.relative_to(CORE)), node.value) not in allowed:
                found.append(f"{where(path, node.lineno)} says {node.value!r}")
    assert not found, found


WHAT_PLUGINS_ADD = re.compile(r"(?<![a-z])(ppo|opd|gae|critic|teacher|distil)(?!al)", re.IGNORECASE)
METRICS_OF_MILES = ("ppo_kl", "train/ppo_kl", "teacher_log_probs")
"""Names that the core writes, or reads for whoever reports them."""


def test_a_second_trained_model_and_distillation_add_no_line_to_the_core():
    """Critics and teachers appear in comments and docstrings, as examples, and in scan.py's table of plugins."""
    found = []
    for path in core_files():
        documents = {id(node.value) for node in ast.walk(tree(path)) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree(path)):
            says = [value for field in ("id", "attr", "arg", "name", "value") if id(node) not in documents
                    and isinstance(value := getattr(node, field, None), str)]
            found += [f"{where(path, getattr(node, 'lineno', 0))} says {text!r}" for text in says
                      if WHAT_PLUGINS_ADD.search(text) and text not in METRICS_OF_MILES and path.name != "scan.py"]
    assert not found, found


def run(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("code", [
    "import miles_core.cli, miles_core.cli.run, miles_core.cli.plugins, miles_testing.commands.flags",
    "import miles_testing.commands.hooks, miles_core.cli.completion, miles_preflight.commands.check_template",
    "import miles_report.commands.report, miles_report.commands.watch, miles_report.commands.doctor",
    "import miles_core.hookspecs, miles_core",
    "from click.testing import CliRunner; from miles_core.cli import cli; "
    "assert CliRunner().invoke(cli, ['run', '--help']).exit_code == 0",
])  # fmt: skip
def test_help_imports_nothing_heavy(code):
    assert run(f"{code}\nimport sys; print(*(m for m in {HEAVY} if m in sys.modules))") == ""


def test_a_plan_imports_neither_torch_nor_a_plugin():
    heavy = ("torch", "ray", "sglang", "megatron", "transformers", "miles_grpo", "miles_math")
    code = ("from pathlib import Path; from miles_core.plugins.plan import prepare\n"
            "prepare(None, ['--hf-checkpoint', 'x', '--prompt-data', 'y', '--num-rollout', '1', '--rollout-batch-size',"
            " '1', '--rm-type', 'math'])")
    assert run(f"{code}\nimport sys; print(*(m for m in {heavy} if m in sys.modules))") == ""


def test_all_is_sorted():
    found = []
    for path in (*core_files(), *plugin_files()):
        for node in tree(path).body:
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
                names = ast.literal_eval(node.value)
                if list(names) != sorted(names):
                    found.append(where(path, node.lineno))
    assert not found, found


def test_no_assert_in_the_core():
    """`python -O` removes them, and they give no sentence; the conformance kit may assert."""
    found = [where(path, node.lineno) for path in (*core_files(), *plugin_files()) for node in ast.walk(tree(path))
             if isinstance(node, ast.Assert) and not {"miles_testing", "testing"} & set(path.parts)]
    assert not found, found


def test_what_is_public_has_a_docstring():
    """Modules, classes and functions; not methods that implement a documented contract, nor dunder methods."""
    found = []
    for path in core_files():
        body = tree(path)
        if path.name != "__init__.py" and not ast.get_docstring(body):
            found.append(f"{where(path)} (module)")
        for node in body.body:
            public = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_"
            drawn = path.name == "errors.py" and isinstance(node, ast.ClassDef)  # in the module's docstring, as a tree
            form = [ast.unparse(one) for one in getattr(node, "decorator_list", ())] == ["overload"]
            if public and not ast.get_docstring(node) and not drawn and not form:
                found.append(f"{where(path, node.lineno)} {node.name}")
    assert not found, found


def test_nothing_is_left_for_later():
    word = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
    found = [
        where(path, number)
        for path in repository_files() if path.suffix in (".py", ".md", ".toml", ".html", "")
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if word.search(line)
    ]
    assert not found, found
