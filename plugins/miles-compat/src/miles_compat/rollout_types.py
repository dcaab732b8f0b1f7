"""What rollout functions and generate functions of Miles are called with, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_compat.args import Args
    from miles_compat.sample import Sample


@dataclass
class GenerateState:
    """What a generate function finds beside its sample.

    Args:
        args: the run's options.
        tokenizer: the checkpoint's; loaded when it is first asked for.
        sampling_params: what a request is drawn with, by SGLang's names.
    """

    args: Args
    aborted: bool = False
    processor: None = None
    _semaphore: Any = None

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's."""
        return self.args.tokenizer

    @property
    def sampling_params(self) -> dict[str, Any]:
        """Of training, by SGLang's names."""
        args = self.args
        return compute_sampling_params(args, temperature=args.rollout_temperature, top_p=args.rollout_top_p,
                                       top_k=args.rollout_top_k, max_new_tokens=args.rollout_max_response_len)

    @property
    def generate_fn_semaphore(self) -> Any:
        """Bounds nothing: the engine bounds what is under way."""
        import asyncio

        if self._semaphore is None:
            self._semaphore = asyncio.Semaphore(2**20)
        return self._semaphore

    semaphore = generate_fn_semaphore

    def reset(self) -> None:
        """Begin anew after an abort."""
        self.aborted = False


def compute_sampling_params(args: Args, *, temperature: float, top_p: float, top_k: int,
                            max_new_tokens: int) -> dict[str, Any]:
    """Sampling parameters by SGLang's names."""
    return {"temperature": temperature, "top_p": top_p, "top_k": top_k, "max_new_tokens": max_new_tokens,
            "stop": list(args.rollout_stop or ()), "stop_token_ids": list(args.rollout_stop_token_ids or ()),
            "skip_special_tokens": args.rollout_skip_special_tokens, "no_stop_trim": True,
            "spaces_between_special_tokens": False}


@dataclass
class GenerateFnInput:
    """What a generate function is called with in Miles's newer form."""

    state: GenerateState
    sample: Sample
    sampling_params: dict[str, Any]
    evaluation: bool = False

    @property
    def args(self) -> Args:
        """The run's options."""
        return self.state.args


@dataclass
class GenerateFnOutput:
    """What it answers: one sample, or those that one execution split into."""

    samples: Sample | list[Sample]


@dataclass(frozen=True)
class RolloutFnConstructorInput:
    """What a class of rollout functions is made with."""

    args: Args
    data_source: Any


@dataclass(frozen=True)
class RolloutFnInput:
    """What a rollout function is called with in Miles's newer form."""

    rollout_id: int
    weight_version: int | None = None

    @property
    def evaluation(self) -> bool:
        """Whether it is asked to evaluate."""
        return False


@dataclass(frozen=True)
class RolloutFnTrainInput(RolloutFnInput):
    """Of a rollout to train on."""


@dataclass(frozen=True)
class RolloutFnEvalInput(RolloutFnInput):
    """Of an evaluation."""

    generate_state: Any = None
    hf_dir: str | None = None

    @property
    def evaluation(self) -> bool:
        """It is."""
        return True


@dataclass
class RolloutFnTrainOutput:
    """Groups of samples to train on."""

    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Name of an eval dataset -> lists: "rewards", "truncated", "samples"."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = field(default=None)
