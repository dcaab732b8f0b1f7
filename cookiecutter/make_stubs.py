"""Write what follows from elsewhere; a test compares.

templates/stubs.jinja has a method for each hook, made from the hookspecs; cookiecutter.json the names of these hooks;
copier.yml the same questions for copier.

    python cookiecutter/make_stubs.py
"""

from __future__ import annotations

import json
from pathlib import Path

from miles_testing.stubs import stubs

from miles_core.config.tables import TABLES
from miles_core.plugins.scan import BUILT_IN, KNOWN

HERE = Path(__file__).parent


def questions() -> dict:
    """cookiecutter.json, with the names of the hooks, and those that no plugin can have."""
    found = json.loads((HERE / "cookiecutter.json").read_text(encoding="utf-8"))
    return found | {"__known": " ".join(stubs()), "__taken": " ".join(taken())}


def taken() -> list[str]:
    """Names of parts and tables of the core, and of official plugins."""
    return sorted({*BUILT_IN, *TABLES, *KNOWN})


def copier() -> str:
    """The same questions for copier, which knows no `cookiecutter.`: the last, hidden one gathers the answers."""
    asked = questions()
    lines = ["# Written by cookiecutter/make_stubs.py from cookiecutter.json.", "_min_copier_version: '9'",
             "_subdirectory: '{% raw %}{{cookiecutter.distribution}}{% endraw %}'", "_templates_suffix: ''",
             "_answers_file: .copier-answers.yml", "_skip_if_exists: [CHANGELOG.md]",
             f"_exclude: {json.dumps([*LEFT_OUT, '__pycache__', '*.py[co]'])}", ""]
    names = [name for name in asked if not name.startswith("_")]
    for name in names:
        default = asked[name]
        lines += [f"{name}:", "  type: str", f"  help: {json.dumps(asked['__prompts__'][name])}"]
        if isinstance(default, list):
            lines += [f"  choices: {json.dumps(default)}", f"  default: {json.dumps(default[0])}"]
        else:
            lines.append(f"  default: {json.dumps(default.replace('cookiecutter.', ''))}")
        lines += [f"  validator: {json.dumps(CHECKS[name])}"] if name in CHECKS else []
    computed = {name: asked[name].replace("cookiecutter.", "") for name in asked
                if name.startswith("__") and name not in ("__prompts__", "__known", "__taken")}
    pairs = [f"'{name}': {name}" for name in names] + [
        f"'{name}': {value.strip('{} ')}" for name, value in computed.items()]
    lines += ["cookiecutter:", "  type: yaml", "  when: false",
              f"  default: {json.dumps('{{ {' + ', '.join(pairs) + '} | to_json }}')}", ""]
    return "\n".join(lines)


SHORT = "name.removeprefix('miles-plugin-').removeprefix('miles-')"
"""The plugin's name where that of the distribution is given."""
CHECKS = {
    "name": "{% if not (name | regex_search('^[a-z][a-z0-9]*(-[a-z0-9]+)*$')) %}Lower-case letters and digits, with "
            "single dashes between: my-reward.{% elif " + SHORT + " in '" + " ".join(taken()) + "'.split(' ') %}The "
            "name {{ " + SHORT + " }} is already used by Miles or an official plugin.{% endif %}",
    "distribution": "{% set short = " + SHORT + " %}{% if distribution not in ['miles-' ~ short, 'miles-plugin-' ~ "
                    "short] %}It should be miles-{{ short }} or miles-plugin-{{ short }}.{% endif %}",
    "family": "{% if family and not (family | regex_search('^[a-z][a-z0-9_]*$')) %}A model_type of config.json, such "
              "as seed_oss.{% endif %}",
    "hooks": "{% set known = '" + " ".join(stubs()) + "'.split(' ') %}{% for hook in hooks.replace(' ', '').split(',') "
             "if hook not in known %}Unknown hook {{ hook }}; choose from {{ known | join(', ') }}."
             "{% endfor %}",
}  # fmt: skip
"""What copier asks again after; hooks/pre_gen_project.py says the same to users of cookiecutter."""


LEFT_OUT = ["{% if not family %}families.py{% endif %}", "{% if not family %}parity.toml{% endif %}",
            "{% if not family %}test_family.py{% endif %}", "{% if family %}test_plugin.py{% endif %}"]
"""Files of the other kind of plugin, in copier's words; hooks/post_gen_project.py says the same of cookiecutter."""


def files() -> dict[Path, str]:
    """Everything that is written here."""
    about = "{#- Written by cookiecutter/make_stubs.py from miles_core/hookspecs.py. -#}"
    return {
        HERE / "templates" / "stubs.jinja": f"{about}\n{{%- set STUBS = {json.dumps(stubs(), indent=1)} -%}}\n",
        HERE / "cookiecutter.json": json.dumps(questions(), indent=2) + "\n",
        HERE / "copier.yml": copier(),
    }  # fmt: skip


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content, encoding="utf-8")
