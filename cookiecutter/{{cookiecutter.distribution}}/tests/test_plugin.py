"""The plugin can be enabled, and its options are validated."""

import pytest
from miles_core.errors import ConfigError
from miles_core.plugins.plan import prepare

from {{ cookiecutter.__package }} import plugin

RUN = ["--hf-checkpoint", "model", "--prompt-data", "data/train.jsonl", "--rollout-batch-size", "2",
       "--num-rollout", "1", "--rm-type", "math"]  # fmt: skip


def test_it_takes_part_in_a_plan():
    plan = prepare(None, [*RUN, "--plugin", "{{ cookiecutter.__name }}", "--{{ cookiecutter.__name }}.strength", "2"])
    assert "{{ cookiecutter.__name }}" in [one.manifest.name for one in plan.selected]
    assert "{{ cookiecutter.__name }}.strength = 2.0" in plan.to_text()


def test_an_option_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="strength") as caught:
        prepare(None, [*RUN, "--plugin", "{{ cookiecutter.__name }}", "--{{ cookiecutter.__name }}.strength", "much"])
    assert caught.value.code == "option-wrong-type"


def test_it_is_made_of_its_options():
    assert plugin.{{ cookiecutter.__class }}(plugin.Options(strength=0.5)).options.strength == 0.5
{%- if cookiecutter.gpu_tests == 'yes' %}


@pytest.mark.gpu
def test_it_runs_on_a_gpu():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    assert torch.ones(2, device="cuda").sum().item() == 2
{%- endif %}
