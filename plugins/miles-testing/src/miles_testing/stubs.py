"""For each hook a method that works: what a new project begins with, and the example on the hook's page."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable

from miles_core.plugins.select import all_specs, built_in

NAMED = {
    "generate": ["from miles_core.stages.rollout import single_turn", "",
                 "return await single_turn(prompt, generation)"],
    "reward": ["return float(str(sample.prompt.label) in sample.text)"],
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
    "commands": ["import click", "", "@click.command()", "def command() -> None:",
                 '    click.echo("Nothing yet.")', "", "return command"],
    "convert": ["import shutil", "", "shutil.copytree(source, out)", 'return f"{len(list(out.iterdir()))} files"'],
    "prompt_source": ["from miles_core.stages.prompts import RowPrompts, rows_of", "",
                      "rows = rows_of(config)", "return RowPrompts(rows, read(rows.path), tokenizer)"],
    "read_rows": ["from miles_core.stages.prompts import JsonlRecords", "", "return JsonlRecords(path, most)"],
    "engine": ["from pathlib import Path", "", "from miles_local.engine import LocalEngine", "",
               "assert config.checkpoint.hf_checkpoint",
               "return LocalEngine(Path(config.checkpoint.hf_checkpoint), tokenizer=tokenizer, max_batch=8,",
               "                   max_context=config.rollout.rollout_max_context_len,",
               "                   incoming=hooks.import_weights, inputs=hooks.prefill_inputs)"],
    "trainer": ["from miles_megatron.step import MegatronTrainer", "",
                "return MegatronTrainer(config, hooks, columns, rank)"],
    "model_spec": ["from miles_megatron.families import FAMILIES", "", 'return FAMILIES["qwen3"]'],
    "weight_sync": ["from miles_core.stages.sync import InProcess", "", 'return InProcess("retract")'],
    "placement": ["from miles_core.stages.placement import Local", "", "return Local(config)"],
}  # fmt: skip
"""Bodies of named hooks: something that works, to be replaced."""

HOMES = {
    "Column": "miles_core.columns", "Packed": "miles_core.columns", "RunConfig": "miles_core.config",
    "Surface": "miles_core.config.surfaces", "Selected": "miles_core.plugins.select",
    "Evaluation": "miles_core.evaluation",
    "Gradients": "miles_core.stages.gradients", "LossInputs": "miles_core.stages.loss",
    "Metrics": "miles_core.stages.loss", "TokenWeights": "miles_core.stages.loss", "Model": "miles_core.stages.models",
    "Generation": "miles_core.stages.rollout", "Request": "miles_core.stages.rollout",
    "Response": "miles_core.stages.rollout", "Engine": "miles_core.stages.rollout",
    "TrainerAccess": "miles_core.stages.step", "Trainer": "miles_core.stages.step", "Rank": "miles_core.types",
    "ModelSpec": "miles_megatron.specs", "WeightMap": "miles_megatron.specs",
    "Placement": "miles_core.stages.placement", "PromptSource": "miles_core.stages.prompts",
    "Records": "miles_core.stages.prompts",
    "WeightSync": "miles_core.stages.sync",
    **dict.fromkeys(("Batch", "Drop", "Group", "Prompt", "Sample"), "miles_core.types"), "Path": "pathlib",
    **dict.fromkeys(("Callable", "Iterable", "Iterator", "Sequence"), "collections.abc"), "Any": "typing",
}  # fmt: skip
"""Where the types of the signatures live."""

PACKAGES = {"click": "import click", "np": "import numpy as np", "torch": "import torch"}
"""And what is named with its module."""


SHOWN = {"commands": "Print something", "convert": "Copy a Hugging Face directory"}
"""What `miles --help` and `miles convert --help` say of the example."""


def stub(name: str, spec: Callable) -> dict:
    """One hook's method: its lines, the imports of its types, and what a table says of it; plain data."""
    signature = inspect.signature(spec)
    parameters = ", ".join(["self", *(f"{one.name}: {one.annotation}" for one in signature.parameters.values())])
    if name == "reward":  # a scorer takes a sample or a group, and returns accordingly
        parameters, signature = "self, sample: Sample", signature.replace(return_annotation="float")
    word = "async def" if inspect.iscoroutinefunction(spec) else "def"
    lines = [f"{word} {name}({parameters}) -> {signature.return_annotation}:"]
    if len(lines[0]) > 110:
        lines = [f"{word} {name}(", *(f"    {one}," for one in re.split(r", (?![^\[]*\])", parameters)),
                 f") -> {signature.return_annotation}:"]
    words = set(re.findall(r"\w+", f"{parameters} {signature.return_annotation}"))
    about = SHOWN.get(name) or _about(spec)
    doc = [f'"""{about}."""'] if len(about) < 104 else [*textwrap.wrap(f'"""{about}.', 112), '"""']
    return {"named": spec.kind == "named", "kind": spec.kind, "role": spec.role, "per": spec.per, "about": about,
            "lines": lines, "doc": doc, "body": _body(name, spec), "help": f"{about}." if name in SHOWN else "",
            "packages": [line for word, line in PACKAGES.items() if word in words],
            "imports": sorted((HOMES[word], word) for word in words & HOMES.keys())}


def listed() -> dict[str, Callable]:
    """Hooks of the core and of plugins that every run has: what pages and scaffolds list, whoever else is loaded."""
    modules = {"miles_core.hookspecs", *(one.manifest.hookspecs for one in built_in())}
    return {name: spec for name, spec in all_specs().items() if spec.__module__ in modules}


def stubs() -> dict[str, dict]:
    """Of every hook that is listed."""
    return {name: stub(name, spec) for name, spec in listed().items()}


def example(name: str) -> str:
    """A plugin of one file that implements one hook."""
    one = stub(name, all_specs()[name])
    typed = bool(one["imports"] or one["packages"])
    lines = ["from __future__ import annotations", "", *(["from typing import TYPE_CHECKING", ""] if typed else []),
             "from miles_core import hookimpl", ""]
    if typed:
        lines += ["if TYPE_CHECKING:", *_typing(one), ""]
    kind = "".join(word.capitalize() for word in name.split("_"))
    marker = '    @hookimpl(name="mine")' if one["named"] else "    @hookimpl"
    inside = [*one["doc"], *one["body"]]
    body = [*one["lines"], *(f"    {line}" if line else "" for line in inside)]
    return "\n".join([*lines, "", f"class My{kind}:", '    """An example."""', "", '    name = "mine"', "", marker,
                      *(f"    {line}" if line else "" for line in body), ""])


def _typing(one: dict) -> Iterable[str]:
    """Imports that only type checkers carry out."""
    by_module: dict[str, list[str]] = {}
    for module, word in one["imports"]:
        by_module.setdefault(module, []).append(word)
    own = {module for module in by_module if module.startswith("miles_core")}
    for module in sorted(by_module.keys() - own):
        yield f"    from {module} import {', '.join(by_module[module])}"
    if by_module.keys() - own and (own or one["packages"]):
        yield ""
    yield from (f"    {line}" for line in one["packages"])
    for module in sorted(own):
        yield f"    from {module} import {', '.join(by_module[module])}"


def _body(name: str, spec: Callable) -> list[str]:
    signature = inspect.signature(spec)
    first = next(iter(signature.parameters), "")
    passed = "packed" if "packed" in signature.parameters else ""
    return {"chain": [f"return {first}"], "around": [f"return proceed({passed})"],
            "gather": ["return ()" if "Iterable" in str(signature.return_annotation) else "return {}"],
            "observe": [], "named": NAMED.get(name, [])}[spec.kind]


def _about(spec: Callable) -> str:
    """The first sentence of a hook's docstring, without the loop's stage."""
    text = " ".join((spec.__doc__ or "").split())
    about = re.sub(r"^\d(?:, \d)*(?: to \d)?: ", "", text).partition(". ")[0].rstrip(".:")
    return about[0].upper() + about[1:]
