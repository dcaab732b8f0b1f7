"""Where two sides part first: in the order of the model, then against it for the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from miles_core.errors import TrainError
from miles_divergence.recording import BACKWARD, Key, Recording, Tensor
from miles_divergence.rounding import ALL, EACH, Distances, distances
from miles_divergence.tokens import sample_of, token_of

AGREE, DIFFER, ELSEWHERE = "agree", "differ", "elsewhere"
"""Of a tensor; "elsewhere": it differs and the module around it does not, so the sides only cut the sum differently."""


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one tensor.

    Args:
        excess: the worst token's distance over the limit; above 1 it is no rounding.
        whole: the root mean square over all tokens, in tolerances.
        relative: the worst distance over the length of a usual row.
        differing, of: tokens.
        sample, token: the first that differs: its place in the batch, and its own in the sample.
    """

    name: str
    what: str
    state: str
    excess: float
    whole: float
    relative: float
    differing: int
    of: int
    sample: int | None = None
    token: int | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` says.

    Args:
        rows: of all tensors, in the order in which they are made.
        first: the first that differs; None: all agree.
        modules: whose computation it is, in Hugging Face's names; several are as likely.
        reason: why these, in words.
        weights: tensors of the checkpoint that differ.
        alone: (tensors of the checkpoint that A alone has, that B alone has).
        metrics: name -> (A, B) of loss and gradient norm.
        rerouted: samples in which two experts are so close that rounding decides, left out from there on.
        epsilon: last place of the coarsest dtype.
        parted: names of the metrics that differ by more than rounding.
    """

    rows: list[Row]
    first: Row | None
    modules: list[str]
    reason: str
    weights: list[str]
    alone: tuple[list[str], list[str]]
    metrics: dict[str, tuple[float, float]]
    rerouted: dict[int, int] = field(default_factory=dict)
    epsilon: float = 0.0
    parted: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Nothing differs but by rounding."""
        return self.first is None and not self.parted

    @property
    def exit_code(self) -> int:
        """0 the same, 1 different."""
        return 0 if self.same else 1


def compare(a: Recording, b: Recording, noisy: Recording) -> Comparison:
    """The first divergence.

    Args:
        noisy: side a, replayed with noise of the coarser side's last place; see rounding.py.

    Raises:
        TrainError: the two have no tensor of one name in common, or one of another width.
    """
    epsilon = max(a.epsilon, b.epsilon)
    keys = _ordered(a, b)
    _check(a, b, keys)
    rerouted: dict[int, int] = {}
    measured: dict[Key, Distances] = {}
    for key in keys:
        measured[key] = distances(a.tensors[key], b.tensors[key], noisy.tensors.get(key), epsilon,
                                  _before(rerouted, whole=key[1] in BACKWARD), difference=key[1] == "log_probs")
        if key[1] == "routing":
            rerouted |= _rerouted(a, b, key[0], measured, rerouted)
    rows = [_row(key, measured) for key in keys]
    first = next((row for row in rows if row.state == DIFFER), None)
    modules, reason = _blame(first, rows, measured, a, b) if first else ([], "")
    metrics = {name: (a.metrics[name], b.metrics[name]) for name in a.metrics if name in b.metrics}
    parted = [] if rerouted else [name for name, pair in metrics.items()
                                  if _parted(pair, noisy.metrics.get(name), epsilon)]
    return Comparison(rows, first, modules, reason, _weights(a, b, epsilon), _alone(a, b), metrics, rerouted,
                      epsilon, parted)


def _parted(pair: tuple[float, float], noisy: float | None, epsilon: float) -> bool:
    spread = 0.0 if noisy is None else abs(noisy - pair[0])
    return not abs(pair[0] - pair[1]) <= EACH * max(spread, epsilon * abs(pair[0]))


def _ordered(a: Recording, b: Recording) -> list[Key]:
    """Forward in the order of A, then gradients from the last output to the first."""
    both = [key for key in a.tensors if key in b.tensors]
    forward = sorted((key for key in both if key[1] not in BACKWARD), key=lambda key: a.tensors[key].place)
    place = {key: at for at, key in enumerate(forward)}
    of = {"gradient": "output", "input_gradient": "input"}
    backward = sorted((key for key in both if key[1] in BACKWARD),
                      key=lambda key: -place.get((key[0], of[key[1]]), 0))
    return forward + backward


def _check(a: Recording, b: Recording, keys: Sequence[Key]) -> None:
    if not keys:
        raise TrainError("the two sides have no module of one name", code="across-nothing-in-common",
                         got=f"{_few(name for name, _ in a.tensors)} and {_few(name for name, _ in b.tensors)}",
                         who="miles diff --across", fix="compare trainers whose modules have Hugging Face names, or a "
                         "family's weight map")
    for key in keys:
        shapes = [tuple(side.tensors[key].values.shape[1:]) for side in (a, b)]
        if shapes[0] != shapes[1]:
            raise TrainError("the two sides are models of different sizes", code="across-sizes-differ",
                             who=f"{key[0]} {key[1]}", got=f"{shapes[0][0]} and {shapes[1][0]} features",
                             fix="give both the same --hf-checkpoint")


def _before(rerouted: Mapping[int, int], *, whole: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Numbers -> which are not what a token in `rerouted` reaches: itself and those behind it, of gradients all."""
    until = dict(rerouted)

    def counts(numbers: torch.Tensor) -> torch.Tensor:
        before = torch.ones(len(numbers), dtype=torch.bool)
        for sample, token in until.items():
            before &= (sample_of(numbers) != sample) | (token_of(numbers) < (0 if whole else token))
        return before

    return counts


def _rerouted(a: Recording, b: Recording, router: str, measured: Mapping[Key, Distances], known: Mapping[int, int]
              ) -> dict[int, int]:
    """Sample -> its first token that goes to other experts because rounding has turned the order of two logits."""
    logits = measured.get((router, "output"))
    if logits is None or bool((logits.excess > 1).any()):
        return {}
    numbers, chosen = _chosen(a, router)
    other = _chosen(b, router)[1]
    mine, theirs = a.tensors[router, "output"].values, b.tensors[router, "output"].values
    if chosen.shape != other.shape or mine.shape != chosen.shape or theirs.shape != chosen.shape:
        return {}
    first: dict[int, int] = {}
    for place in (chosen != other).any(1).nonzero().flatten().tolist():
        swapped = (chosen[place] != other[place]).nonzero().flatten()
        gap = float((mine[place] - theirs[place]).norm())
        as_many = chosen[place].sum() == other[place].sum()
        close = as_many and float(mine[place][swapped].max() - mine[place][swapped].min()) <= 4 * gap
        sample, token = sample_of(int(numbers[place])), token_of(int(numbers[place]))
        if close and token < min(first.get(sample, 1 << 32), known.get(sample, 1 << 32)):
            first[sample] = token
    return first


def _chosen(side: Recording, router: str) -> tuple[torch.Tensor, torch.Tensor]:
    tensor = side.tensors[router, "routing"]
    return tensor.numbers, tensor.values > 0


def _row(key: Key, measured: Mapping[Key, Distances]) -> Row:
    gaps = measured[key]
    differing = gaps.excess > 1
    worst, relative = (float(one.max()) if len(one) else 0.0 for one in (gaps.excess, gaps.relative))
    numbers = gaps.numbers[differing].unique()
    row = Row(*key, AGREE, worst, gaps.whole, relative, len(numbers), len(gaps.numbers.unique()))
    if not len(numbers):
        return row
    first = int(numbers[0])
    return replace(row, state=ELSEWHERE if _heals(key, measured) else DIFFER, sample=sample_of(first),
                   token=token_of(first))


def _heals(key: Key, measured: Mapping[Key, Distances]) -> bool:
    """Whether what is around this output, or reads it first, agrees all the same; and so for the gradient by it."""
    name, what = key
    if what in BACKWARD:
        output = name, "output"
        return output in measured and not _close(measured[output]) and _heals(output, measured)
    parent = _parent(name, measured)
    while parent is not None:
        if _close(measured[parent, "output"]):
            return True
        parent = _parent(parent, measured)
    if _parent(name, measured) is not None or what != "output":
        return False
    later = [*measured][[*measured].index(key) + 1:]
    reader = next((one for one in later if one[1] in ("input", "log_probs")), None)
    return reader is not None and _close(measured[reader])


def _close(gaps: Distances) -> bool:
    """Half way to the limit counts as apart: a small difference is smaller yet in what it is added to."""
    return gaps.whole <= ALL / 2 and not bool((gaps.excess > 1).any())


def _parent(name: str, measured: Mapping[Key, Distances]) -> str | None:
    """The innermost module around this one whose output was compared."""
    while "." in name:
        name = name.rpartition(".")[0]
        if (name, "output") in measured:
            return name
    return None


def _blame(first: Row, rows: Sequence[Row], measured: Mapping[Key, Distances], a: Recording, b: Recording
           ) -> tuple[list[str], str]:
    """The modules whose own computation parts the sides, and why."""
    if first.what == "input_gradient":
        return [first.name], "the gradient by its output agrees, and what it hands back to its input differs"
    if first.what == "gradient":
        return _blame_backward(first, measured, a, b)
    if first.what == "log_probs":
        return ["lm_head"], "all before the output layer agrees: its weight, its scale, or the temperature"
    if first.what == "routing":
        return [first.name], "the logits agree: how experts are chosen and weighed"
    if first.what == "input":
        before = [row for row in rows[: rows.index(first)] if row.what == "output"]
        parent = _parent(first.name, measured)
        module = parent or (before[-1].name if before else first.name)
        return [module], f"what goes into {first.name} differs, and all outputs before it agree"
    if experts := _experts(first, measured, a):
        return experts, "every token that went there differs, and no token that did not"
    return [first.name], "its output differs, and all before it agrees"


def _experts(first: Row, measured: Mapping[Key, Distances], a: Recording) -> list[str]:
    """Of a mixture whose output differs: the experts that no agreeing token went to."""
    block = first.name.removesuffix(".experts")
    router = next((name for name, what in a.tensors if what == "routing" and name.rpartition(".")[0] == block), None)
    if router is None:
        return []
    numbers, chosen = _chosen(a, router)
    gaps = measured[first.name, first.what]
    differing = torch.isin(numbers, gaps.numbers[gaps.excess > 1])
    agreeing = torch.isin(numbers, gaps.numbers) & ~differing
    suspects = chosen[differing].any(0) & ~chosen[agreeing].any(0)
    explained = bool(chosen[differing][:, suspects].any(1).all())
    alone = explained and not bool(suspects.all()) and bool(agreeing.any())
    return [f"{block}.experts.{one}" for one in suspects.nonzero().flatten().tolist()] if alone else []


def _blame_backward(first: Row, measured: Mapping[Key, Distances], a: Recording, b: Recording
                    ) -> tuple[list[str], str]:
    """Who reads the output whose gradient differs, where all gradients behind it agree."""
    readers = {name: None for side in (a, b) if (output := side.tensors.get((first.name, "output"))) is not None
               for (name, what), tensor in side.tensors.items() if what == "input" and _same(tensor, output)
               and (name, "input_gradient") not in measured and not first.name.startswith(f"{name}.")}
    innermost = [name for name in readers if not any(other.startswith(f"{name}.") for other in readers)]
    if innermost:
        return innermost, f"they read the output of {first.name}, by which the gradient is the first to differ"
    return [_parent(first.name, measured) or first.name], (
        f"the gradient by the output of {first.name} is the first to differ; what modules hand back agrees")


def _same(one: Tensor, other: Tensor) -> bool:
    return one.values.shape == other.values.shape and torch.equal(one.values, other.values)


def _weights(a: Recording, b: Recording, epsilon: float) -> list[str]:
    """Names whose fingerprints differ by more than rounding to the coarser dtype."""
    def apart(name: str) -> bool:
        (size, *mine), (_, *theirs) = a.weights[name], b.weights[name]
        return any(abs(x - y) > ALL * epsilon * size for x, y in zip(mine, theirs, strict=True))

    return [name for name in a.weights if name in b.weights and apart(name)]


def _alone(a: Recording, b: Recording) -> tuple[list[str], list[str]]:
    return [name for name in a.weights if name not in b.weights], [name for name in b.weights if name not in a.weights]


def _few(names: Iterable[str]) -> str:
    return ", ".join([*dict.fromkeys(names)][:4]) or "none"
