{% if cookiecutter.family -%}
"""{{ cookiecutter.summary | replace('\\', '\\\\') | replace('"', '\\"') }}"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_core import hookimpl

if TYPE_CHECKING:
    from miles_megatron.specs import Family


class {{ cookiecutter.__class }}:
    """{{ cookiecutter.summary | replace('\\', '\\\\') | replace('"', '\\"') }}"""

    # A plan counts parameters by config.json alone. Where it has another name for a key than most, or leaves it out:
    # provides = ("model_spec:{{ cookiecutter.family }}:n_shared_experts=num_shared_experts:tie_word_embeddings=1",)

    # A further model_type is a further method, with @hookimpl("model_spec", name=...).
    @hookimpl(name="{{ cookiecutter.family }}")
    def model_spec(self, hf_config: Any) -> Family:
        """The family of checkpoints whose model_type is {{ cookiecutter.family }}."""
        from miles_megatron.decoder import DecoderFamily

        from {{ cookiecutter.__package }}.families import decoder

        return DecoderFamily(decoder)
{% else -%}
{%- set where = 'templates/stubs.jinja' if _copier_conf is defined else 'stubs.jinja' %}{%- from where import STUBS %}{%- set chosen = cookiecutter.hooks.replace(' ', '').split(',') %}"""{{ cookiecutter.summary | replace('\\', '\\\\') | replace('"', '\\"') }}"""

from __future__ import annotations

{% set named = namespace(imports=[['typing', 'Any']] if cookiecutter.state == 'yes' else [], packages=[]) -%}
{% for hook in chosen -%}
{% set named.imports = named.imports + STUBS[hook].imports -%}
{% set named.packages = named.packages + STUBS[hook].packages -%}
{% endfor -%}
from dataclasses import dataclass
{%- if named.imports or named.packages %}
from typing import TYPE_CHECKING
{%- endif %}

from miles_core import hookimpl, option
{%- if named.imports or named.packages %}

if TYPE_CHECKING:
{%- for module, group in named.imports | groupby(0) if module in ('collections.abc', 'pathlib', 'typing') %}
    from {{ module }} import {{ group | map(attribute=1) | unique | sort | join(', ') }}
{%- endfor %}
{%- set theirs = named.imports | rejectattr(0, 'in', ('collections.abc', 'pathlib', 'typing')) | list %}
{%- if (named.packages or theirs) and named.imports | length > theirs | length %}
{% endif %}
{%- for line in named.packages | unique | sort %}
    {{ line }}
{%- endfor %}
{%- for module, group in theirs | groupby(0) %}
    from {{ module }} import {{ group | map(attribute=1) | unique | sort | join(', ') }}
{%- endfor %}
{%- endif %}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the plugin: [{{ cookiecutter.__name }}] in a run file, --{{ cookiecutter.__name }}.NAME as a flag."""

    strength: float = option(1.0, "Example option; replace it with your own.")


class {{ cookiecutter.__class }}:
    """{{ cookiecutter.summary | replace('\\', '\\\\') | replace('"', '\\"') }}"""
{% if cookiecutter.state == 'yes' %}
    state_version = 1
{% endif %}
    def __init__(self, options: Options):
        self.options = options
{%- if cookiecutter.state == 'yes' %}
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        """State for checkpoints, as plain data."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.count = state["count"]
{%- endif %}
{% for hook in chosen %}
    @hookimpl{% if STUBS[hook].named %}(name="{{ cookiecutter.part }}"){% endif %}
{%- for line in STUBS[hook].lines %}
    {{ line }}
{%- endfor %}
{%- for line in STUBS[hook].doc %}
        {{ line }}
{%- endfor %}
{%- for line in STUBS[hook].body %}
{{ ('        ' ~ line) if line else '' }}
{%- endfor %}
{% endfor -%}
{% endif -%}
