"""Write what follows from elsewhere; a test compares.

templates/stubs.jinja has a method for each hook, made from the hookspecs; cookiecutter.json the names of these hooks;
copier.yml the same questions for copier.

    python cookiecutter/make_stubs.py
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from pathlib import Path

from miles_core import hookspecs

HERE = Path(__file__).parent

NAMED = {
    "generate": ["from miles_core.stages.rollout import single_turn", "",
                 "return await single_turn(prompt, generation)"],
    "reward": ["return float(sample.text.strip() == sample.prompt.label)"],
    "combine_rewards": ["return sum(weight * sample.rewards[name] for name, weight in weights.items())"],
    "advantage": ["rewards = [float(sample.reward or 0.0) for sample in batch.samples]",
                  "mean = sum(rewards) / max(1, len(rewards))", "return [reward - mean for reward in rewards]"],
    "policy_loss": ["from miles_core.stages.loss import at_trained, bounded_exp, log_ratio", "",
                    "ratio = bounded_exp(log_ratio(inputs))",
                    'return -ratio * at_trained(inputs, inputs.advantages), {"ratio": ratio.detach()}'],
    "reduction": ["import numpy as np", "",
                  'counts = [max(1, int(sample.columns["loss_mask"].sum())) for sample in samples]',
                  "return np.array([1.0 / (len(samples) * count) for count in counts], np.float32)"],
    "clip_gradients": ['squares = gradients.sums({"norm": sum(float(p.grad.square().sum()) for p in gradients.pieces',
                       "                                      if p.counts)})", 'norm: float = squares["norm"] ** 0.5',
                       "scale = min(1.0, gradients.clip_grad / (norm + 1e-6)) if gradients.clip_grad else 1.0",
                       "for piece in gradients.pieces:", "    piece.grad.mul_(scale)", "return norm"],
    "convert": ["import shutil", "", "shutil.copytree(source, out)", 'return f"{len(list(out.iterdir()))} files"'],
}
"""Bodies of named hooks: something that works, to be replaced."""

HOMES = {
    "Column": "miles_core.columns", "Packed": "miles_core.columns", "RunConfig": "miles_core.config",
    "Gradients": "miles_core.stages.gradients", "LossInputs": "miles_core.stages.loss",
    "Metrics": "miles_core.stages.loss", "TokenWeights": "miles_core.stages.loss", "Model": "miles_core.stages.models",
    "Generation": "miles_core.stages.rollout", "Request": "miles_core.stages.rollout",
    "Response": "miles_core.stages.rollout", "TrainerAccess": "miles_core.stages.step",
    "ModelSpec": "miles_core.backends.megatron.specs", "WeightMap": "miles_core.backends.megatron.specs",
    **dict.fromkeys(("Batch", "Drop", "Group", "Prompt", "Sample"), "miles_core.types"), "Path": "pathlib",
    **dict.fromkeys(("Callable", "Iterable", "Iterator", "Sequence"), "collections.abc"), "Any": "typing",
}  # fmt: skip
"""Where the types of the signatures live."""


def stub(name: str, spec) -> dict:
    """One hook: its method's lines, the imports of its types, and what a table says of it."""
    signature = inspect.signature(spec)
    parameters = ", ".join(["self", *(f"{one.name}: {one.annotation}" for one in signature.parameters.values())])
    if name == "reward":  # a scorer takes a sample or a group, and returns accordingly
        parameters, signature = "self, sample: Sample", signature.replace(return_annotation="float")
    first = next(iter(signature.parameters), "")
    arguments = ", ".join(list(signature.parameters)[1:2] if name == "microbatch" else [])
    body = {"chain": [f"return {first}"], "around": [f"return proceed({arguments})"],
            "gather": ["return ()" if "Iterable" in str(signature.return_annotation) else "return {}"],
            "observe": [], "named": NAMED.get(name, [])}[spec.kind]
    word = "async def" if inspect.iscoroutinefunction(spec) else "def"
    lines = [f"{word} {name}({parameters}) -> {signature.return_annotation}:"]
    if len(lines[0]) > 110:
        lines = [f"{word} {name}(", *(f"    {one}," for one in _split(parameters)),
                 f") -> {signature.return_annotation}:"]
    text = " ".join((spec.__doc__ or "").split())
    about = re.sub(r"^\d(?:, \d)*(?: to \d)?: ", "", text).partition(". ")[0].rstrip(".:")
    about = about[0].upper() + about[1:]
    words = set(re.findall(r"\w+", f"{parameters} " + str(signature.return_annotation)))
    doc = textwrap.wrap(f'"""{about}."""', 112) if len(about) < 104 else [
        *textwrap.wrap(f'"""{about}.', 112), '"""']
    return {"named": spec.kind == "named", "kind": spec.kind, "role": spec.role, "per": spec.per, "about": about,
            "lines": lines, "doc": doc, "body": body, "torch": "torch" in words, "numpy": "np" in words,
            "imports": sorted((HOMES[word], word) for word in words & HOMES.keys())}


def _split(parameters: str) -> list[str]:
    """At commas outside of brackets."""
    return [one.strip() for one in re.split(r",(?![^\[]*\])", parameters)]


def stubs() -> dict[str, dict]:
    """Of every hook that a plugin may begin with; parts (engines, trainers) are no matter of one method."""
    return {name: stub(name, spec) for name, spec in hookspecs.specs().items() if not spec.part}


def questions() -> dict:
    """cookiecutter.json, with the names of the hooks."""
    found = json.loads((HERE / "cookiecutter.json").read_text(encoding="utf-8"))
    return found | {"__known": " ".join(stubs())}


def copier() -> str:
    """The same questions for copier, which knows no `cookiecutter.`: the last, hidden one gathers the answers."""
    asked = questions()
    lines = ["# Written by cookiecutter/make_stubs.py from cookiecutter.json.", "_min_copier_version: '9'",
             "_subdirectory: '{% raw %}{{cookiecutter.distribution}}{% endraw %}'", "_templates_suffix: ''",
             "_answers_file: .copier-answers.yml", "_skip_if_exists: [CHANGELOG.md]", ""]
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
                if name.startswith("__") and name not in ("__prompts__", "__known")}
    pairs = [f"'{name}': {name}" for name in names] + [
        f"'{name}': {value.strip('{} ')}" for name, value in computed.items()]
    lines += ["cookiecutter:", "  type: yaml", "  when: false",
              f"  default: {json.dumps('{{ {' + ', '.join(pairs) + '} | to_json }}')}", ""]
    return "\n".join(lines)


CHECKS = {
    "name": "{% if not (name | regex_search('^[a-z][a-z0-9]*(-[a-z0-9]+)*$')) %}Lower-case letters and digits, with "
            "single dashes between: my-reward.{% endif %}",
    "distribution": "{% if distribution not in ['miles-' ~ name, 'miles-plugin-' ~ name] %}It should be "
                    "miles-{{ name }} or miles-plugin-{{ name }}.{% endif %}",
    "hooks": "{% set known = '" + " ".join(stubs()) + "'.split(' ') %}{% for hook in hooks.replace(' ', '').split(',') "
             "if hook not in known %}There is no hook {{ hook }} to begin with; there are {{ known | join(', ') }}."
             "{% endfor %}",
}  # fmt: skip
"""What copier asks again after; hooks/pre_gen_project.py says the same to users of cookiecutter."""


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
