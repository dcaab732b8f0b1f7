"""The rules as one table, and the diagnosis that they add up to."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from miles_core.errors import clean
from miles_core.record.events import Kind
from miles_report.doctor import engine, rollout, system, training
from miles_report.doctor.finding import SEVERITIES, Finding, Rule
from miles_report.doctor.record import Record

RULES = (
    Rule("gibberish", "rollout", "the first answers are noise, or repeat one token", rollout.gibberish,
         causes=("same-reward", "truncated", "collapse", "disagreement")),
    Rule("chat-template", "rollout", "an instruct model is unsure of its own answers (about 0.8 nats per token)",
         rollout.template),
    Rule("same-reward", "rollout", "all answers of a group score the same", rollout.same_reward),
    Rule("silent-scorer", "rollout", "a scorer always returns 0", rollout.silent_scorer),
    Rule("scorer-failed", "rollout", "a scorer raised, hung, or returned no number", rollout.scorer_failed),
    Rule("starved", "rollout", "filters leave too few groups", rollout.starved),
    Rule("truncated", "rollout", "answers hit the length limit", rollout.truncated),
    Rule("shrinking", "rollout", "answers become very short", rollout.shrinking),
    Rule("stale", "rollout", "tokens are older than --max-lag, or grow older", rollout.stale),
    Rule("engine-restarts", "rollout", "servers or the router die", engine.engine_restarts),
    Rule("failing-requests", "rollout", "requests are retried", engine.requests_fail),
    Rule("silent-worker", "rollout", "no heartbeat, or no group finishes", engine.silent_worker),
    Rule("not-loaded", "training", "no log contains `Loaded checkpoint from`", training.not_loaded),
    Rule("untrained", "training", "no rollout steps the actor", training.untrained),
    Rule("first-kl", "training", "KL is not 0 at the first optimizer step", training.first_kl),
    Rule("disagreement", "both", "both sides disagree on log-probs of the same tokens", training.disagreement),
    Rule("first-gradient", "training", "the first gradient is large", training.first_gradient),
    Rule("explosion", "training", "gradient or loss grow a hundredfold", training.explosion),
    Rule("non-finite", "training", "NaN or infinity", training.non_finite),
    Rule("uncorrected", "training", "most tokens come from older weights, uncorrected",
         training.uncorrected),
    Rule("experts-collapse", "training",
         "reward of a mixture of experts falls and log-probs part, without routing replay", training.experts_collapse),
    Rule("reward-falls", "training", "the reward falls and does not recover", training.reward_falls),
    Rule("collapse", "training", "answers become noise or loops, or the entropy vanishes", training.collapse),
    Rule("trainer-oom", "training", "out of memory in a step; often the second with colocate", training.trainer_oom),
    Rule("hang", "both", "a weight sync, a collective or a call does not end", system.hang),
    Rule("dead-process", "both", "ranks or workers died", system.dead_process),
    Rule("inductor-cache", "both", "`JSONDecodeError` from inductor", system.inductor_cache),
    Rule("imbalance", "both", "one stage takes most of the time", system.imbalance),
    Rule("killed", "neither", "the run stopped without an end event", system.killed),
    Rule("interrupted", "neither", "the run was interrupted", system.interrupted),
    Rule("disk", "neither", "the disk is full", system.disk),
    Rule("damaged", "neither", "`events.jsonl` has a damaged line", system.damaged),
    Rule("told", "neither", "the run itself printed a warning", system.told),
    Rule("failed", "neither", "an error that no other rule covers", system.failed),
)


@functools.cache
def rules() -> tuple[Rule, ...]:
    """All rules: those here, then those of installed plugins (hook `diagnose`)."""
    from miles_core.config import RunConfig
    from miles_core.plugins.bind import bind
    from miles_core.plugins.select import readable, select

    offering = [(manifest.name, "miles doctor") for manifest in readable("diagnose")]
    diagnose = bind(select(offering, ()), RunConfig(), "plan").diagnose if offering else None
    return (*RULES, *(diagnose() if diagnose is not None else ()))


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the rules found, the worst first; in the order of the table within a severity."""

    run: str
    state: str
    findings: list[Finding]

    @property
    def healthy(self) -> bool:
        """Nothing but notes."""
        return all(finding.severity == "note" for finding in self.findings)

    @property
    def side(self) -> str:
        """The side of the worst findings: "rollout", "training", "both" or "neither"."""
        if self.healthy:
            return "neither"
        worst = self.findings[0].severity
        sides = {finding.side for finding in self.findings if finding.severity == worst} - {"neither"}
        if not sides:
            return "neither"
        return sides.pop() if len(sides) == 1 else "both"

    @property
    def exit_code(self) -> int:
        """1 where there is an error, else 0."""
        return int(any(finding.severity == "error" for finding in self.findings))

    def text(self) -> Iterator[str]:
        """The answer in lines, the side first. What it quotes of errors, logs and samples steers no terminal."""
        return map(clean, self._lines())

    def _lines(self) -> Iterator[str]:
        if self.side == "neither":
            symptoms = {rule.name: rule.symptom.replace("`", "") for rule in rules()}
            yield "neither: healthy" if self.healthy else f"neither side: {symptoms[self.findings[0].rule]}"
        else:
            yield "both sides" if self.side == "both" else f"{self.side} side"
        yield f"{self.run}: {self.state}"
        for finding in self.findings:
            about = "" if finding.rollout_id is None else f", rollout {finding.rollout_id}"
            yield ""
            yield f"{finding.severity}  {finding.rule} ({finding.side}{about})"
            yield f"  seen   {finding.seen}"
            yield f"  where  {finding.where}"
            yield f"  why    {finding.why}"
            yield f"  do     {finding.fix}"

    def to_json(self) -> dict[str, object]:
        """The same as plain values."""
        return {"side": self.side, "healthy": self.healthy, "exit_code": self.exit_code, "run": self.run,
                "state": self.state, "findings": [asdict(finding) for finding in self.findings]}


def examine(run: Record) -> Diagnosis:
    """Ask every rule about a run."""
    findings = [replace(finding, rule=rule.name, side=finding.side or rule.side)
             for rule in rules() for finding in rule.check(run)]
    wrong = {finding.rule for finding in findings if finding.severity == "error"}
    follows = {name for rule in rules() if rule.name in wrong for name in rule.causes}
    findings = [replace(one, severity="warning") if one.rule in follows and one.severity == "error" else one
             for one in findings]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Diagnosis(os.fspath(run.directory), _state(run), findings)


def _state(run: Record) -> str:
    starts = run.of(Kind.RUN_START)
    if run.end is not None:
        status = str(run.end.get("status"))
    else:
        ended = "killed" if starts else "not started"
        status = "running" if run.holder is not None else ended
    of = starts[-1].get("rollouts") if starts else None
    return f"{status}, {len(run.metrics)}{f' of {of}' if of else ''} rollouts done"
