"""The plugin: options and hooks. Formulas are in reverse_kl.py, the trainer's passes in passes.py, the client of a
teacher's server in server.py, the comparison of tokenizers in vocabulary.py; all imported when first used."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from miles_core.columns import Align, Column
from miles_core.config import RunConfig, option
from miles_core.hookspecs import hookimpl
from miles_core.stages.models import Model

if TYPE_CHECKING:
    import numpy as np

    from miles_core.stages.advantage import Values
    from miles_core.stages.step import TrainerAccess
    from miles_core.types import Batch, Sample
    from miles_opd.server import Servers


@dataclass(frozen=True, kw_only=True)
class OpdOptions:
    """Who the teacher is and how far the student is from it."""

    use_opd: bool = option(
        False, "Take the reverse KL to the teacher off the advantages of any estimator.", flags=("--use-opd",)
    )
    opd_type: Literal["megatron", "sglang"] | None = option(
        None, "Teacher in the trainer, or behind a server; default: what is given of --opd-teacher-load and -urls.",
        flags=("--opd-type",),
    )
    opd_kl_coef: float = option(1.0, "Weight of the reverse KL.", flags=("--opd-kl-coef",))
    opd_log_prob_top_k: int = option(
        0, "Compare the k likeliest tokens at each position; 0: the sampled token alone.",
        flags=("--opd-log-prob-top-k",),
    )
    opd_top_k_strategy: Literal["only-student", "only-teacher", "intersection", "union", "xor"] = option(
        "only-student", "Whose k likeliest tokens.", flags=("--opd-top-k-strategy",)
    )
    opd_reward_weight_mode: Literal["student_p", "teacher_p", "none"] = option(
        "student_p", "How these tokens are weighted.", flags=("--opd-reward-weight-mode",)
    )
    opd_top_k_baseline: bool = option(
        False, "Take the top-k estimate as the baseline of the sampled token's reverse KL, not in its place."
    )
    opd_teacher_load: str | None = option(
        None, "Checkpoint of a teacher in the trainer (Hugging Face, or torch_dist of the student's architecture).",
        flags=("--opd-teacher-load",),
    )
    opd_teacher_urls: list[str] = option(
        [], "SGLang servers that score: one URL, or NAME=URL for several teachers.", flags=("--opd-teacher-urls",)
    )
    opd_teacher_key: str = option(
        "opd_teacher", "Key of a prompt's metadata that names its teacher; without it: default.",
        flags=("--opd-teacher-key",),
    )
    opd_teacher_timeout: float = option(60.0, "Seconds that a server may take for one sample, retries included.")
    opd_teacher_concurrency: int = option(64, "Requests to servers that are under way at once.")


class Opd:
    """On-policy distillation: the student samples, and a teacher says of each token how likely it finds it."""

    provides = ("weights:opd_teacher_load",)
    refuses = (
        {"when": {"opd.opd_teacher_urls": {"like": r"([\w.-]+=)?https?://(0\.0\.0\.0|\[::\])([:/].*)?"}},
         "what": "this is where a server listens, not where it is reached",
         "fix": "write its host's address; on this machine 127.0.0.1"},
        {"when": {"algorithm.skip_actor_forward_only": True},
         "what": "distillation needs the old log-probs, which skip_actor_forward_only leaves out",
         "fix": "drop --skip-actor-forward-only"},
        {"when": {"opd.opd_teacher_load/config.json/quantization_config/quant_method": {"set": True}},
         "what": "the teacher computes in the trainer, where weights are plain",
         "fix": "name the checkpoint that is not quantised, or a server (--opd-teacher-urls)"},
        {"when": {"opd.opd_teacher_load/config.json/architectures": {
            "like": ".*(For(Sequence|Token)Classification|RewardModel|Eagle3?)"}},
         "what": "the teacher is no language model", "fix": "name one whose architecture ends in ForCausalLM"},
        {"when": {"opd.opd_teacher_load/config.json/vocab_size": {"apart": "architecture.vocab"},
                  "opd.opd_log_prob_top_k": {"above": 0}},
         "what": "top-k asks each model about the other's tokens, and their output layers differ in length",
         "fix": "take a teacher of the same vocab_size, or leave --opd-log-prob-top-k out"},
        {"when": {"opd.opd_teacher_urls": {"unlisted": r"([\w.-]+=)?https?://[^/ ,]+(/[^ ,]*)?"}},
         "what": "a teacher's server has an address that begins with http://",
         "fix": "write --opd-teacher-urls http://HOST:PORT; a checkpoint is --opd-teacher-load"},
        {"when": {"opd.opd_teacher_urls": {"twice": r"(?:([\w.-]+)=)?"}},
         "what": "two teachers have one name, and a row names its teacher",
         "fix": "write NAME=URL with names of their own; one URL without a name is the teacher called default"},
        {"when": {"opd.opd_teacher_urls": {"like": ".*/v1(/.*)?"}},
         "what": "this is the address of an OpenAI interface, and a teacher scores at /generate",
         "fix": "write the server's own: http://HOST:PORT"},
        {"when": {"opd.opd_teacher_key": {"said": True}, "opd.opd_teacher_urls": {"set": False}},
         "what": "opd_teacher_key chooses among servers, and the teacher is in the trainer", "fix": "leave it out"},
        {"when": {"opd.opd_top_k_strategy": {"said": True}, "opd.opd_log_prob_top_k": {"said": False, "below": 1}},
         "what": "opd_top_k_strategy has no effect without --opd-log-prob-top-k", "fix": "add it, or leave it out"},
        {"when": {"opd.opd_reward_weight_mode": {"said": True}, "opd.opd_log_prob_top_k": {"said": False, "below": 1}},
         "what": "opd_reward_weight_mode has no effect without --opd-log-prob-top-k", "fix": "add it, or leave it out"},
        {"when": {"algorithm.advantage_estimator": "on_policy_distillation", "opd.opd_kl_coef": 0},
         "what": "the advantages are the reverse KL, and its weight is 0", "fix": "1.0 is usual"},
        {"when": {"opd.use_opd": True, "algorithm.loss_type": "sft_loss"},
         "what": "the loss of demonstrations does not look at advantages, off which the reverse KL is taken",
         "fix": "drop --use-opd, or --loss-type sft_loss"},
        {"when": {"checkpoint.save_hf": {"is": "opd.opd_teacher_load"}},
         "what": "the export would overwrite the teacher", "fix": "name another folder with --save-hf"},
        {"when": {"checkpoint.save": {"is": "opd.opd_teacher_load"}},
         "what": "the run would save into the folder of the teacher", "fix": "name another folder with --save"},
        {"when": {"opd.opd_teacher_urls": {"set": True}, "rollout.rollout_temperature": {"apart": 1}},
         "what": "a server scores at temperature 1, and the student samples at another",
         "fix": "--rollout-temperature 1, or a teacher in the trainer (--opd-teacher-load)"},
        {"when": {"opd.opd_teacher_urls": {"set": True}, "opd.opd_log_prob_top_k": {"above": 0},
                  "opd.opd_top_k_strategy": {"not": "only-teacher"}},
         "what": "of a server's teacher only its own likeliest tokens are known when it is asked",
         "fix": "--opd-top-k-strategy only-teacher, or a teacher in the trainer (--opd-teacher-load)"},
        {"when": {"opd.opd_teacher_concurrency": {"outside": "[1, inf)"}},
         "what": "opd_teacher_concurrency should be at least 1", "fix": "leave it out"},
        {"when": {"opd.opd_teacher_timeout": {"outside": "(0, inf)"}},
         "what": "opd_teacher_timeout should be above 0", "fix": "leave it out"},
        {"when": {"algorithm.advantage_estimator": {"not": "on_policy_distillation"}, "opd.use_opd": False},
         "what": "plugin opd has nothing to do",
         "fix": "add --use-opd, or --advantage-estimator on_policy_distillation, or leave the plugin out"},
        {"when": {"algorithm.advantage_estimator": "on_policy_distillation", "opd.use_opd": True},
         "what": "the reverse KL would count twice, as advantage and on top of it",
         "fix": "drop --use-opd, or take another estimator"},
        {"when": {"opd.opd_teacher_load": {"set": False}, "opd.opd_teacher_urls": {"set": False}},
         "what": "distillation needs a teacher",
         "fix": "--opd-teacher-load CHECKPOINT, or --opd-teacher-urls URL of an SGLang server"},
        {"when": {"opd.opd_teacher_load": {"set": True}, "opd.opd_teacher_urls": {"set": True}},
         "what": "a teacher is in the trainer or behind a server", "fix": "drop --opd-teacher-load or -urls"},
        {"when": {"reward": "on_policy_distillation", "opd.opd_teacher_load": {"set": True}},
         "what": "scorer 'on_policy_distillation' asks a server, and the teacher is in the trainer",
         "fix": "leave the scorer out, or name --opd-teacher-urls"},
        {"when": {"reward": {"not": "on_policy_distillation"}, "opd.opd_teacher_urls": {"set": True}},
         "what": "nobody would ask the teacher's server: that is what scorer 'on_policy_distillation' does",
         "fix": "add on_policy_distillation to --rm-type; it counts 0 in the reward"},
        {"when": {"opd.opd_teacher_load": {"missing": True}},
         "what": "there is no such teacher", "fix": "name a Hugging Face folder, or one that a run saved into"},
        {"when": {"opd.opd_type": "sglang", "opd.opd_teacher_load": {"set": True}},
         "what": "the teacher is in the trainer, and opd_type says a server", "fix": "leave --opd-type out"},
        {"when": {"opd.opd_type": "megatron", "opd.opd_teacher_urls": {"set": True}},
         "what": "the teacher is behind a server, and opd_type says the trainer", "fix": "leave --opd-type out"},
        {"when": {"opd.opd_kl_coef": {"outside": "[0, inf)"}},
         "what": "below 0 the student would be driven away from its teacher", "fix": "1.0 is usual"},
        {"when": {"opd.opd_log_prob_top_k": {"outside": "[0, inf)"}},
         "what": "opd_log_prob_top_k is a number of tokens, or 0", "fix": "leave it out"},
        {"when": {"opd.opd_log_prob_top_k": {"above": "architecture.vocab"}},
         "what": "the model has fewer tokens than would be compared", "fix": "20 is usual"},
        {"when": {"opd.opd_top_k_baseline": True, "opd.opd_log_prob_top_k": 0},
         "what": "there is no baseline without top-k",
         "fix": "add --opd-log-prob-top-k 20, or write --normalize-advantages"},
    )

    def __init__(self, options: OpdOptions, config: RunConfig):
        from miles_opd.checks import checked

        self.options, self.config = checked(options, config), config
        self._servers: Servers | None = None

    @hookimpl
    def columns(self) -> Iterable[Column]:
        """What the teacher said, and the reverse KL; with top-k also tokens and their log-probs, between two passes."""
        yield Column("teacher_log_probs", Align.RESPONSE, missing="pad", owner="opd")
        yield Column("opd_reverse_kl", Align.RESPONSE, missing="pad", owner="opd")
        if self.options.opd_log_prob_top_k:
            for whose in ("student", "teacher"):
                yield Column(f"opd_{whose}_tokens", Align.RESPONSE, "int32", axes=("k",), missing="pad", owner="opd")
                yield Column(f"opd_{whose}_top", Align.RESPONSE, axes=("k",), missing="pad", owner="opd")
            yield Column("opd_student_at_teacher", Align.RESPONSE, axes=("k",), missing="pad", owner="opd")

    @hookimpl
    def models(self) -> dict[str, Model]:
        """The teacher, where the trainer holds it.

        Raises:
            ConfigError: it has another tokenizer than the student, or fewer tokens than top-k asks for.
        """
        from miles_opd.vocabulary import check_vocabulary

        student, teacher = self.config.checkpoint.hf_checkpoint, self.options.opd_teacher_load
        check_vocabulary(str(student), teacher, self.options.opd_log_prob_top_k)
        return {} if teacher is None else {"teacher": Model(teacher)}

    @hookimpl("reward", name="on_policy_distillation")
    async def ask(self, sample: Sample) -> float:
        """Let the sample's server score it; the number is 0, what was learnt is in the columns."""
        if sample.prompt.stream == "train":
            if self._servers is None:
                from miles_opd.server import Servers

                self._servers = Servers(self.options)
            sample.columns |= await self._servers.score(sample)
        return 0.0

    @hookimpl
    def log_prob(self, proceed: Callable[[], dict[str, float]], access: TrainerAccess) -> dict[str, float]:
        """After the log-probs, the teacher's, and the reverse KL of every trained token."""
        from miles_opd.passes import fill, metrics

        found, begin = proceed(), time.perf_counter()
        fill(access, self.options, self._student)
        return found | metrics(access.samples) | {"perf/teacher_log_probs_time": time.perf_counter() - begin}

    @hookimpl(name="on_policy_distillation")
    def advantage(self, batch: Batch) -> Values:
        """-opd_kl_coef x (log p_student - log p_teacher) of each token."""
        return [-penalty for penalty in self._penalties(batch)]

    @hookimpl
    def shape_advantages(self, batch: Batch) -> Batch:
        """With --use-opd: A_t - opd_kl_coef x reverse KL_t."""
        if self.options.use_opd:
            for sample, penalty in zip(batch.samples, self._penalties(batch), strict=True):
                sample.columns["advantages"] = sample.columns["advantages"] - penalty
        return batch

    @property
    def _student(self) -> str:
        """The column of the student's log-probs."""
        return "rollout_log_probs" if self.config.algorithm.use_rollout_logprobs else "log_probs"

    def _penalties(self, batch: Batch) -> list[np.ndarray]:
        from miles_opd.passes import penalty

        options = self.options
        return [options.opd_kl_coef * penalty(sample, self._student, baseline=options.opd_top_k_baseline)
                for sample in batch.samples]
