"""Regular expressions on the names of parameters: what they match, and what becomes of it."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles_core.errors import ConfigError

if TYPE_CHECKING:
    import torch

ONLY, FROZEN, MULT = "--only-train-params-name-list", "--freeze-params-name-list", "--lr-mult"


@dataclass(frozen=True, slots=True)
class Choice:
    """
    Args:
        only: a parameter that trains matches one of these, if there are any.
        frozen: and none of these.
        lr_mult: patterns, and the factors of the learning rate.
    """

    only: tuple[re.Pattern[str], ...]
    frozen: tuple[re.Pattern[str], ...]
    lr_mult: tuple[tuple[re.Pattern[str], float], ...]

    @classmethod
    def of(cls, only: Iterable[str], frozen: Iterable[str], lr_mult: Iterable[str]) -> Choice:
        """
        Raises:
            ConfigError: no regular expression, or no factor.
        """
        return cls(tuple(_compiled(one, ONLY) for one in only), tuple(_compiled(one, FROZEN) for one in frozen),
                   tuple((_compiled(one, MULT), factor) for one, factor in map(_factor, lr_mult)))

    def __bool__(self) -> bool:
        return bool(self.only or self.frozen or self.lr_mult)

    def lines(self, rate: float) -> Iterable[str]:
        """For the plan: what trains, and the rates, the highest first as trainers number their metrics."""
        if self.only:
            yield "only parameters like " + ", ".join(one.pattern for one in self.only) + " train"
        if self.frozen:
            yield "parameters like " + ", ".join(one.pattern for one in self.frozen) + " do not train"
        for pattern, factor in sorted(self.lr_mult, key=lambda item: -item[1]):
            yield f"learning rate {rate * factor:g} for parameters like {pattern.pattern}"

    def apply(self, parameters: Mapping[str, torch.nn.Parameter], names: Mapping[str, Sequence[str]]) -> None:
        """Freeze parameters, and note factors of the learning rate on others (`lr_mult`).

        Args:
            parameters: this rank's by the trainer's names.
            names: trainer's name -> the checkpoint's, of the whole model; empty where this is all, under one name.

        Raises:
            ConfigError: a pattern without effect, or with two; no parameter is left. On every rank alike.
        """
        names = names or dict.fromkeys(parameters, ())
        matched = {}
        for flag, patterns in ((ONLY, self.only), (FROZEN, self.frozen), (MULT, [one for one, _ in self.lr_mult])):
            for pattern in patterns:
                matched[pattern] = _matched(pattern, flag, names)
        training = set(names) if not self.only else set().union(*(matched[one] for one in self.only))
        training -= set().union(*(matched[one] for one in self.frozen))
        if not training:
            raise ConfigError("no parameter is left to train", code="param-all-frozen", who=f"{ONLY}, {FROZEN}",
                              got=f"{len(names)} parameters, all frozen", fix="freeze less")
        factors = self._factors(matched, training)
        for name, parameter in parameters.items():
            if name not in training:
                parameter.requires_grad_(False)
            elif name in factors:
                parameter.lr_mult = factors[name]  # type: ignore[attr-defined]

    def _factors(self, matched: Mapping[re.Pattern[str], set[str]], training: set[str]) -> dict[str, float]:
        """
        Raises:
            ConfigError: two patterns for one parameter, or one for parameters that are all frozen.
        """
        for (one, _), (other, _) in itertools.combinations(self.lr_mult, 2):
            if both := sorted(matched[one] & matched[other] & training):
                raise ConfigError("two factors for the learning rate of one parameter", code="param-lr-twice",
                                  got=both[0], who=f"{MULT} {one.pattern} and {other.pattern}",
                                  fix="write patterns that exclude each other")
        for pattern, _ in self.lr_mult:
            if not matched[pattern] & training:
                raise ConfigError("parameters that are frozen have no learning rate", code="param-lr-frozen",
                                  got=sorted(matched[pattern])[0], who=f"{MULT} {pattern.pattern}",
                                  fix="leave the pattern out, or let them train")
        return {name: factor for pattern, factor in self.lr_mult for name in matched[pattern] & training}


def _factor(text: str) -> tuple[str, float]:
    pattern, _, factor = text.rpartition("=")
    try:
        number = float(factor)
    except ValueError:
        number = math.nan
    if not pattern or not 0 < number < math.inf:
        raise ConfigError("a learning rate by pattern is PATTERN=FACTOR, and the factor is above 0",
                          code="lr-mult-invalid", got=text, who=MULT,
                          fix=rf"write {MULT} 'embed_tokens\.weight=0.1'; {FROZEN} stands for a factor of 0")
    return pattern, number


def _compiled(pattern: str, flag: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"this is no regular expression: {error}", code="param-pattern-invalid", got=pattern,
                          who=flag, fix="a dot of a name is \\. and anything is .*") from None


def _matched(pattern: re.Pattern[str], flag: str, names: Mapping[str, Sequence[str]]) -> set[str]:
    """Trainer's names of the parameters that a pattern matches.

    Raises:
        ConfigError: it matches nothing, or some of the tensors that the trainer keeps in one.
    """
    matched = set()
    for name, on_disk in names.items():
        hits = [one for one in on_disk if pattern.search(one)]
        if pattern.search(name) or (hits and len(hits) == len(on_disk)):
            matched.add(name)
        elif hits:
            raise ConfigError("the trainer keeps these tensors in one parameter, of which a part cannot be frozen or "
                              "have a learning rate of its own", code="param-pattern-splits",
                              got=f"{name}: " + ", ".join(on_disk), who=f"{flag} {pattern.pattern}",
                              fix=f"match all of them, or {re.escape(name.rpartition('.')[0].rpartition('.')[2])}")
    if not matched:
        raise _nothing(pattern, flag, names)
    return matched


def _nothing(pattern: re.Pattern[str], flag: str, names: Mapping[str, Sequence[str]]) -> ConfigError:
    every = [*names, *itertools.chain.from_iterable(names.values())]
    plain = {re.sub(r"\.\d+", "", name): name for name in every}  # one of each kind, whatever its layer
    text = re.sub(r"\\|\.\*|[$^]|\\d\+", "", pattern.pattern)
    parts = {part: name for kind, name in plain.items() for part in (kind, *kind.split("."))}
    near = [parts[part] for part in difflib.get_close_matches(text, parts, 3, 0.5)] or list(plain.values())[:3]
    return ConfigError("no parameter matches this pattern", code="param-pattern-unmatched", got=pattern.pattern,
                       who=flag, fix="there are " + ", ".join(dict.fromkeys(near)))
