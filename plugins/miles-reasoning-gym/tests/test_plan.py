"""What is wrong is said while a run is planned, and reasoning_gym is not imported for it."""

import dataclasses
import subprocess
import sys
import textwrap

import pytest
from miles_reasoning_gym import catalogue
from miles_reasoning_gym.plugin import ReasoningGym, ReasoningGymOptions
from miles_reasoning_gym.tasks import of_path, tasks_of
from miles_testing.tiny import run_file

from miles_core.errors import ConfigError
from miles_core.plugins.plan import prepare

CURRICULUM = """
[[reasoning-gym.tasks]]
name = "chain_sum"
curriculum = true
"""


@pytest.mark.parametrize(("given", "code", "told"), [
    ('{"name": ', "reasoning-gym-task-not-json", "name"),
    ("chain_sun", "reasoning-gym-task-unknown", "chain_sum"),
    ({"weight": 2.0}, "reasoning-gym-task-unknown", "README"),
    ({"name": "chain_sum", "wieght": 2.0}, "reasoning-gym-task-key", "weight"),
    ({"name": "chain_sum", "config": {"max_term": 3}}, "reasoning-gym-config-key", "max_terms"),
    ({"name": "chain_sum", "config": {"seed": 3}}, "reasoning-gym-config-key", "seed"),
    ({"name": "chain_sum", "config": "hard"}, "reasoning-gym-config-not-table", "KEY"),
    ({"name": "chain_sum", "weight": 0}, "reasoning-gym-weight", "0"),
    ({"name": "chain_sum", "weight": -1.0}, "reasoning-gym-weight", "-1"),
    ({"name": "chain_sum", "weight": float("nan")}, "reasoning-gym-weight", "nan"),
    ({"name": "chain_sum", "level": -1}, "reasoning-gym-level", "-1"),
    ({"name": "acre", "curriculum": True}, "reasoning-gym-no-curriculum", "acre"),
])
def test_a_task_that_cannot_be_meant_is_refused(given, code, told):
    with pytest.raises(ConfigError, match=told) as caught:
        tasks_of([given])
    assert caught.value.code == code


def test_a_task_is_named_once():
    with pytest.raises(ConfigError, match="chain_sum") as caught:
        tasks_of(["chain_sum", "products", {"name": "chain_sum"}])
    assert caught.value.code == "reasoning-gym-task-twice"


@pytest.mark.parametrize(("path", "code"), [
    ("chain_sum.gym", "reasoning-gym-slice"), ("chain_sum.gym@[8:]", "reasoning-gym-slice"),
    ("chain_sum.gym@[-8:-1]", "reasoning-gym-slice"), ("chain_sun.gym@[0:8]", "reasoning-gym-task-unknown"),
    ("acre:1.gym@[0:8]", "reasoning-gym-no-curriculum"), ("a/b.gym@[0:8]", "reasoning-gym-path")])
def test_a_path_that_names_no_problems_is_refused(path, code):
    with pytest.raises(ConfigError) as caught:
        of_path(path, [])
    assert caught.value.code == code


def test_a_path_has_the_config_of_the_task_and_a_level_of_its_own():
    tasks = tasks_of([{"name": "chain_sum", "config": {"allow_negation": True}, "level": 2}])
    levels = [of_path(path, tasks).level for path in ("chain_sum.gym@[0:8]", "chain_sum:4.gym@[0:8]")]
    assert levels == [2, 4] and "allow_negation" in of_path("chain_sum:4.gym@[0:8]", tasks).config


def plan(tmp_path, text=CURRICULUM, plugins=("reasoning-gym",), **options):
    path = run_file(tmp_path / "run.toml", list(plugins), {}, {
        "prompt_source": "reasoning-gym", "rm_type": ["reasoning-gym"], **options}, table="rollout")
    path.write_text(path.read_text() + text)
    return prepare(path)


def test_a_plan_refuses_what_would_not_work(tmp_path):
    plan(tmp_path, plugins=("reasoning-gym", "dapo-filter"))
    for changes, code in (({"text": ""}, "reasoning-gym-no-task"), ({"rm_type": ["toy"]}, "reasoning-gym-unscored"),
                          ({"text": "[reasoning-gym]\ncurriculum_up = 0.1\n"}, "reasoning-gym-curriculum-bounds"),
                          ({"eval.eval_prompt_data": ["chain_sum.gym"], "eval.eval_interval": 1},
                           "reasoning-gym-slice")):
        with pytest.raises(ConfigError) as caught:
            plan(tmp_path, **changes)
        assert caught.value.code == code


def test_a_filter_before_it_would_hide_answers_from_the_curriculum(tmp_path):
    made = plan(tmp_path, plugins=("dapo-filter", "reasoning-gym"))
    plugin = ReasoningGym(ReasoningGymOptions(tasks=[{"name": "chain_sum", "level": 0}]), made.config)
    with pytest.raises(ConfigError, match="dapo-filter") as caught:
        plugin.begin(made.to_json(), "", None, tmp_path)
    assert caught.value.code == "reasoning-gym-after-filter"


def test_the_ending_of_an_evaluation_set_enables_the_plugin(tmp_path):
    path = run_file(tmp_path / "run.toml", [], {"eval": {"eval_interval": 1, "eval_prompt_data": [
        "sums", "chain_sum.gym@[0:8]"]}}, {})
    assert ("read_rows", "gym", "reasoning-gym") in {(c.hook, c.name, c.plugin) for c in prepare(path).choices}


def test_a_plan_imports_neither_torch_nor_the_package(tmp_path):
    plan(tmp_path)
    code = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from miles_core.plugins.plan import prepare
        prepare(Path({str(tmp_path / 'run.toml')!r}))
        print({{"torch", "transformers", "reasoning_gym", "sympy"}} & set(sys.modules))""")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "set()", done.stderr


def test_the_source_says_what_the_package_has():
    from reasoning_gym.factory import CURRICULA, DATASETS

    assert set(catalogue.names()) == set(DATASETS) - {"composite"}, "a composite is the option tasks"
    for name in catalogue.names():
        has = catalogue.known(name)
        assert {*has.keys, "seed", "size"} == {field.name for field in dataclasses.fields(DATASETS[name][1])}, name
        assert has.curriculum == (name in CURRICULA), name
