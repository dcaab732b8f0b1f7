"""The rules that the package adds to `miles doctor`; tests/integration/test_doctor.py lets each find something."""

from miles_report.doctor.rules import RULES, rules

from miles_core.config import RunConfig
from miles_core.plugins.bind import bind
from miles_core.plugins.select import select


def test_the_rules_of_the_hook_diagnose_stand_behind_the_doctors_own():
    plugin = select([("sglang", "a test")], ())
    names = [rule.name for rule in bind(plugin, RunConfig(), "plan").diagnose()]
    assert names == ["disguised-oom", "engine-oom", "retractions", "draft-drift"]
    assert [rule.name for rule in rules()] == [rule.name for rule in RULES] + names
