"""The parity kit: a tiny random model of a family against transformers, as authors of a model_spec plugin test it.

    for case in cases(Path("parity.toml")):
        model_parity(case, tmp_path).check()

`python -m miles_megatron.testing.parity` runs it for every family of this repository and writes the table of
docs/model-families.md; with paths of files of cases it prints the table of these. Nothing is fetched: models are made
from configs.
"""

from __future__ import annotations

import copy
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.errors import ConfigError
from miles_megatron.testing.support_matrix import matrix

if TYPE_CHECKING:
    import torch

    from miles_core.plugins.select import Selected
    from miles_megatron.model import LanguageModel
    from miles_megatron.specs import Family

LOGITS = 5e-6
"""Largest difference of a logit in fp32, where logits have a standard deviation of about 1."""

ROUNDING = 2.0
"""Where transformers' own logits in fp32 are farther from those in float64, how many times as far they may differ."""

GRADIENTS = 1e-5
"""Largest difference of a gradient's entry, as a share of the largest entry of its tensor."""

GRADIENT = 2e-6
"""Of a model that is cut over ranks: largest |g - g1| / |g1| over all parameters together."""

LOOSE = 1e-3
"""The same for tensors that a case names: gradients that add up terms which all but cancel, where transformers' own
are so far from those in float64."""

TINY: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1,
}  # fmt: skip
"""Sizes of every case unless it says otherwise. All divide by two, so that a model can be cut into tensor-parallel
ranks and pipeline stages."""

LENGTHS = (13, 40, 1, 37, 64, 40, 100, 15)
"""Of the packed sequences: unequal, several in one bucket, not in the order of their buckets."""

BEGIN, END = "<!-- support matrix: begin -->\n", "<!-- support matrix: end -->\n"


@dataclass(frozen=True, slots=True)
class Case:
    """One variant of a family.

    Args:
        family: its model_type.
        name: what a table calls it.
        config: keys of config.json in which it differs from TINY.
        notes: what is special about it.
        loose: ends of names of tensors whose gradients may differ by LOOSE.
        like: the model_type that transformers computes the model as, where it has none of the family's.
        inside: beginning of the names of the model's tensors in a checkpoint of a larger model, whose config.json has
            the keys below text_config; see inside_name.
        flags: more of the run on two ranks.
    """

    family: str
    name: str
    config: dict[str, object] = field(default_factory=dict)
    notes: str = ""
    loose: tuple[str, ...] = ()
    like: str = ""
    inside: str = ""
    flags: tuple[str, ...] = ()

    @property
    def text(self) -> dict[str, Any]:
        """What config.json says of the text model."""
        inside = self.config.get("text_config")
        return inside if isinstance(inside, dict) else self.config

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


@dataclass(frozen=True, slots=True)
class Parity:
    """What was measured of a case.

    Args:
        logits: largest difference of a logit; deviation: the logits' standard deviation.
        rounding: where that is above LOGITS, what transformers' own logits differ by from those of its float64.
        gradients: worst tensor's largest difference, as a share of its largest entry; worst: that tensor's name.
        loose: the largest of those differences among the tensors that the case names, which `gradients` leaves out.
        exact: the model, streamed out again, has the checkpoint's names, shapes and bits.
    """

    case: Case
    logits: float
    deviation: float
    gradients: float
    worst: str
    exact: bool
    loose: float = 0.0
    rounding: float = 0.0

    def check(self) -> None:
        """
        Raises:
            AssertionError: the family computes something else than transformers does.
        """
        problems = [
            f"logits differ by {self.logits:.1e}" if not self.logits <= max(LOGITS, ROUNDING * self.rounding) else "",
            f"logits deviate by {self.deviation:.2f}, too little or much to tell" if not 0.3 < self.deviation < 3
            else "",
            f"the gradient of {self.worst} differs by {self.gradients:.1e}" if not self.gradients <= GRADIENTS else "",
            f"the gradients of {', '.join(self.case.loose)} differ by {self.loose:.1e}" if not self.loose <= LOOSE
            else "",
            "" if self.exact else "the exported checkpoint is not the imported one",
        ]
        if any(problems):
            raise AssertionError(f"{self.case.name}: " + "; ".join(filter(None, problems)))


def cases(path: Path) -> list[Case]:
    """Read cases from TOML: `[[MODEL_TYPE]]` with `name` and, where there are any, `config` and `notes`.

    TOML has no null: a key of `config` that is null in config.json is the text "null". A `text_config` in it is that of
    a model which reads images too.
    """
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    parsed = [Case(family, **one) for family, entries in tables.items() for one in entries]
    return [replace(case, config=_with_null(case.config)) for case in parsed]


def _with_null(config: dict[str, Any]) -> dict[str, Any]:
    return {key: None if value == "null" else _with_null(value) if isinstance(value, dict) else value
            for key, value in config.items()}


@dataclass(frozen=True, slots=True)
class Cut:
    """A family on two ranks beside itself on one.

    Args:
        gradient: |g - g1| / |g1| of a step, Euclidean over all parameters.
        exact: what is streamed out has the checkpoint's names and bits.
    """

    case: Case
    layout: str
    gradient: float
    exact: bool

    def check(self) -> None:
        """
        Raises:
            AssertionError: the cut model is another model.
        """
        if not (self.gradient <= GRADIENT and self.exact):
            raise AssertionError(f"{self.case.name} under {self.layout}: the gradient differs by {self.gradient:.1e}, "
                                 f"the exported checkpoint is {'' if self.exact else 'not '}the imported one")


def model_parity(case: Case, folder: Path, family: Family | None = None) -> Parity:
    """Build the case's model with transformers, save it, load it through the family, and compare.

    Args:
        folder: where the checkpoint is written.
        family: by default what the installed plugins offer under the case's model_type.

    Raises:
        ConfigError: no installed package provides the family, or the family refuses the case.
        CheckpointError: the family's weight map does not fit the checkpoint.
    """
    import torch

    from miles_megatron import cpu, hf_config, model, weights

    if not _initialized():
        cpu.initialize()
    theirs = random_model(case)
    saved = save(theirs, case, folder)
    # As config.json of the folder says it: building a model, transformers changes the one that it was given.
    hf = hf_config.read(folder) if case.like else _config(case, folder)
    family = family or family_of(case.family, hf)
    spec, weight_map = family.model_spec(hf), family.weight_map(hf)
    ours = model.build(model.transformer_config(spec), spec)
    weights.load_hf(folder, ours, weight_map)
    streamed = {name: tensor.clone() for name, tensor in weights.hf_stream(ours, weight_map)}
    own = {name for name in saved if not name.startswith(weight_map.carried)}
    exact = streamed.keys() == own - weight_map.ignored and all(
        torch.equal(streamed[name], saved[name]) for name in streamed
    )
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(3, spec.vocab_size, (length,), generator=generator) for length in LENGTHS]
    expected = torch.cat([theirs(sequence[None]).logits[0] for sequence in sequences])
    got = packed_logits(ours, sequences, spec.logit_softcap)
    difference, rounding = float((got - expected).detach().abs().max()), 0.0
    if difference > LOGITS:  # processors differ in the order of their sums
        rounding = _rounding(theirs, sequences, expected)
    targets = torch.randint(0, spec.vocab_size, (len(got),), generator=generator)
    for each, logits in ((theirs, expected), (ours, got)):
        torch.nn.functional.cross_entropy(logits, targets, reduction="sum").backward()
        _hold_gradients(each)
    wanted = save(theirs, case, folder / "gradients")
    differences = {name: _share(grad, wanted[name]) for name, grad in weights.hf_stream(ours, weight_map)}
    loose = {name: differences.pop(name) for name in [*differences] if name.endswith(tuple(case.loose))}
    worst = max(differences, key=differences.__getitem__)
    return Parity(case, difference, float(expected.detach().std()), differences[worst], worst, exact,
                  max(loose.values(), default=0.0), rounding)


def _rounding(theirs: Any, sequences: Sequence[Any], logits: Any) -> float:
    """The largest difference of transformers' logits from those of the same model in float64."""
    import torch

    precise = copy.deepcopy(theirs).double()
    precise.set_experts_implementation("eager")  # the grouped product has no float64
    with torch.no_grad():
        return float((logits - torch.cat([precise(sequence[None]).logits[0] for sequence in sequences])).abs().max())


def random_model(case: Case) -> Any:
    """A transformers model of the case with eager attention, and norms and biases that are not what they start as."""
    import torch
    from miles_local import repairs  # noqa: F401 - for what is built here
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    config = _config(case)
    alone = config.get_text_config() is config and type(config) in AutoModelForCausalLM._model_mapping
    kind = AutoModelForCausalLM if alone else AutoModelForImageTextToText
    model = kind.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        state = model.state_dict(keep_vars=True)  # with a router's bias, which is no parameter
        for tensor in (*model.parameters(), *(x for x in state.values() if not isinstance(x, torch.nn.Parameter))):
            if not tensor.is_floating_point():  # for each token the experts that it is sent to
                drawn = torch.rand(len(tensor), config.n_routed_experts).argsort(1)
                tensor.copy_(drawn[:, :tensor.shape[1]])
            elif tensor.dim() == 1:
                tensor.add_(0.2 * torch.randn_like(tensor))
    return model


def _config(case: Case, folder: Path = Path()) -> Any:
    from transformers import AutoConfig

    hf_config: dict[str, Any] = copy.deepcopy(case.config)  # it changes them in place
    if "text_config" in hf_config:
        hf_config["text_config"] = TINY | hf_config["text_config"]
    else:
        hf_config = TINY | hf_config
    return AutoConfig.for_model(case.like or case.family, name_or_path=str(folder), **hf_config)


def packed_logits(model: LanguageModel, sequences: Sequence[torch.Tensor], softcap: float | None) -> torch.Tensor:
    """[total, V] of the sequences, packed into one micro-batch of a Megatron model."""
    import torch

    from miles_megatron.packed_layout import packed_rows

    bounds = torch.tensor([0, *map(len, sequences)]).cumsum(0)
    hidden = model(torch.cat(list(sequences))[None], None, None, packed_seq_params=packed_rows(bounds))
    logits: torch.Tensor = hidden[:, 0] @ model.output_weight.t()
    return logits if softcap is None else (logits / softcap).tanh() * softcap


def family_of(model_type: str, hf: Any) -> Any:
    """The family that a built-in or installed plugin offers under a model_type.

    Raises:
        ConfigError: none does.
    """
    from miles_core.plugins import load

    one, method = builder(model_type)
    return getattr(load.load(one.manifest)(), method)(hf)


def builder(model_type: str) -> tuple[Selected, str]:
    """(the plugin, its method) that offers the family of a model_type: built in, official, or installed.

    Raises:
        ConfigError: none does.
    """
    from miles_core.plugins import select
    from miles_core.plugins.scan import KNOWN, installed

    def offered(selected: Sequence[Selected]) -> list[tuple[Selected, str]]:
        return [(one, offer.method) for one in selected for offer in one.manifest.offers
                if (offer.hook, offer.name) == ("model_spec", model_type)]

    official = [name for name, offers in KNOWN.items() if f"model_spec:{model_type}" in offers]
    named = [(name, "the parity kit") for name in official or [each.name for each in installed()]]
    for family in offered(select.built_in()) or offered(select.select(named, ())):
        return family
    raise ConfigError("no installed plugin builds this architecture", code="architecture-without-plugin",
                      got=model_type, fix="see docs/model-families.md")


def inside_name(inside: str, name: str) -> str:
    """Of a tensor in a larger model: what begins with `model.` takes the place of the text model's `model.`."""
    return inside + (name.removeprefix("model.") if inside.startswith("model.") else name)


def save(model: Any, case: Case, folder: Path) -> dict[str, Any]:
    """Save a case's model; its tensors under the names that the files have, which need not be its modules'."""
    import json

    from safetensors.torch import load_file, save_file

    model.save_pretrained(folder)
    tensors = {inside_name(case.inside, name): tensor for file in folder.glob("*.safetensors")
               for name, tensor in load_file(file).items()}
    if case.inside:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if case.like:
        path = folder / "config.json"
        hf_config = json.loads(path.read_text(encoding="utf-8"))
        hf_config = {"text_config": hf_config} if case.inside else hf_config
        path.write_text(json.dumps(hf_config | {"model_type": case.family, "architectures": None}), encoding="utf-8")
    return tensors


def _hold_gradients(model: torch.nn.Module) -> None:
    """Put gradients in the place of weights: saved or streamed like them they get the checkpoint's names."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)


def _share(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def _initialized() -> bool:
    from megatron.core import parallel_state

    return bool(parallel_state.model_parallel_is_initialized())


def measure(paths: Iterable[Path]) -> tuple[list[tuple[Parity, list[Cut]]], list[str]]:
    """(every case of some files, whole and cut; what failed its check)."""
    import tempfile

    import transformers

    from miles_megatron.testing.ranks import Ranks
    from miles_megatron.testing.resharding import reshard_parity

    transformers.utils.logging.disable_progress_bar()
    results: list[tuple[Parity, list[Cut]]] = []
    failed: list[str] = []
    with Ranks(1) as alone, Ranks(2) as two:
        for case in (case for path in paths for case in cases(path)):
            with tempfile.TemporaryDirectory() as folder:
                whole = model_parity(case, Path(folder))
            with tempfile.TemporaryDirectory() as folder:
                cuts = list(reshard_parity(case, Path(folder), alone, two))
            results.append((whole, cuts))
            measured: tuple[Parity | Cut, ...] = (whole, *cuts)
            for one in measured:
                try:
                    one.check()
                except AssertionError as error:
                    failed.append(str(error))
    return results, failed


def main(root: Path, paths: Sequence[str]) -> int:
    """The table of some files' cases, printed; without any that of the repository's, written. 1 if a check failed."""
    known = [root / "plugins/miles-megatron/tests/parity.toml", *sorted(root.glob("plugins/*/tests/parity.toml"))]
    results, failed = measure([Path(path) for path in paths] or known)
    print(*failed, sep="\n", end="\n" * bool(failed), file=sys.stderr)
    if paths:
        print(matrix(results), end="")
    else:
        page = root / "docs" / "model-families.md"
        before, _, after = page.read_text(encoding="utf-8").partition(BEGIN)
        page.write_text(before + BEGIN + matrix(results) + END + after.partition(END)[2], encoding="utf-8")
    return int(bool(failed))


if __name__ == "__main__":
    from miles_megatron.testing import parity  # spawned ranks know this module by its name

    sys.exit(parity.main(Path.cwd(), sys.argv[1:]))
