"""The plugin: options and hooks. What it reads from answers is in answers.py, what it does in a forward in passes.py;
routers of Megatron-core are in replay.py and those of transformers in modules.py, imported when first used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from miles_megatron.architecture import architecture_of

from miles_core.columns import Align, Column
from miles_core.config import RunConfig, option
from miles_core.config.load import who, with_values
from miles_core.errors import ConfigError
from miles_core.hookspecs import hookimpl
from miles_r3.columns import BYTE_NONE, PLACE, ROUTES

if TYPE_CHECKING:
    import torch

    from miles_core.columns import Packed
    from miles_core.stages.rollout import Request, Response
    from miles_core.stages.step import TrainerAccess
    from miles_core.types import Prompt, Sample
    from miles_r3.passes import Routers

@dataclass(frozen=True, kw_only=True)
class R3Options:
    """Whose routing is replayed; the engine's unless the options say otherwise."""

    use_rollout_routing_replay: bool = option(
        False, "Replay the engine's routing; the default unless only use_routing_replay is set.",
        flags=("--use-rollout-routing-replay",),
    )
    use_routing_replay: bool = option(
        False, "If set alone: replay the routing of the log-prob pass in the steps, independently of the engine.",
        flags=("--use-routing-replay",),
    )
    drop_computed_again: bool = option(
        False,
        "Leave out routes that a server computed again after it had drawn the token, not only where it did so by newer "
        "weights.",
    )
    compare_every: int = option(
        0, "Rollouts between extra passes without replay, for a metric that compares log-probs; 0 is never."
    )


class R3:
    """Routing replay: the trainer's mixture of experts uses the experts that the engine used (R3)."""

    provides = ("needs-no-log-prob-pass",)
    implies = {"server.enable_return_routed_experts": True, "megatron.moe_enable_routing_replay": True}

    def __init__(self, options: R3Options, config: RunConfig):
        self.options, self.config = options, config
        self.records = options.use_routing_replay and not options.use_rollout_routing_replay
        self.sizes = _check(options, config, self.records)
        self._routers: Routers | None = None

    @hookimpl
    def derive(self, config: RunConfig) -> RunConfig:
        """The pass whose routing is replayed is made, also where nothing else needs it."""
        if not self.records or "algorithm.skip_actor_forward_only" in config.origin:
            return config
        return with_values(config, "--use-routing-replay", algorithm__skip_actor_forward_only=False)

    @hookimpl
    def columns(self) -> list[Column]:
        """The routes of every position that predicts a token, in a byte each where that is enough."""
        return [Column(ROUTES, Align.PREDICTION, self.sizes.dtype, axes=("layer", "topk"), pad=self.sizes.none,
                       missing="pad", owner="r3"),
                Column(PLACE, Align.PREDICTION, "int32", pad=-1, missing="pad", owner="r3")]

    @hookimpl
    def generate_request(self, request: Request, prompt: Prompt) -> Request:
        """Ask for the experts of what is trained on; evaluations do without."""
        if self.records or prompt.stream != "train":
            return request
        return replace(request, want=request.want | {ROUTES})

    @hookimpl
    def generate_response(self, sample: Sample, response: Response) -> Sample:
        """Take them into the column.

        Raises:
            EngineError: none came, or not those of this model.
        """
        if not self.records and sample.prompt.stream == "train":
            from miles_r3.answers import routes_of

            stale = 1 if self.options.drop_computed_again else 2
            sample.columns[ROUTES] = routes_of(sample, response, self.sizes, stale)
        return sample

    @hookimpl
    def microbatch(self, proceed: Callable[[Packed], torch.Tensor], packed: Packed, model: str) -> torch.Tensor:
        """The routes of these rows, for every router that this forward meets, and again when it is recomputed."""
        if self._routers is None:
            return proceed(packed)
        with self._routers.forward(packed.rows.get(ROUTES), packed.rows.get(PLACE), replay=model == "actor"):
            return proceed(packed)

    @hookimpl
    def log_prob(self, proceed: Callable[[], dict[str, float]], access: TrainerAccess) -> dict[str, float]:
        """Number the positions; replay in the scoring pass or record it; compare where that is asked for."""
        from miles_r3.passes import numbered

        rows, routers = numbered(access.samples), self._adopted(access)
        if self.records:
            with routers.recording() as recorded:
                metrics = proceed()
            recorded.spread(access.samples, rows, self.sizes.dtype)
            return metrics
        with routers.counting() as counts:
            metrics = proceed()
        metrics = metrics | counts.metrics("rollout/r3")
        if self.options.compare_every and access.batch.rollout_id % self.options.compare_every == 0:
            from miles_r3.compare import gaps

            metrics |= gaps(access, routers)
        return metrics

    def _adopted(self, access: TrainerAccess) -> Routers:
        """The actor's own routers, which replay from the first pass on; those of other models do not."""
        if self._routers is None:
            chunks = access.chunks("actor")
            self._routers = self._of(chunks[0])
            for chunk in chunks:
                self._routers.adopt(chunk)
        return self._routers

    def _of(self, chunk: torch.nn.Module) -> Routers:
        if self.config.perf.trainer == "megatron":
            from miles_r3.replay import MegatronRouters

            return MegatronRouters(cast("Any", chunk).config)
        from miles_r3.modules import ModuleRouters

        return ModuleRouters(*(cast("int", size) for size in (self.sizes.layers, self.sizes.topk, self.sizes.experts)))

    @hookimpl
    def train_step(self, proceed: Callable[[], dict[str, float]], access: TrainerAccess) -> dict[str, float]:
        """Replay in forward and recompute; records that no recompute used are dropped."""
        routers = self._adopted(access)
        with routers.counting() as counts, routers.stepping():
            metrics = proceed()
        if access.index == cast("int", self.config.rollout.num_steps_per_rollout) - 1:
            for sample in access.batch.samples:
                sample.columns.pop(PLACE, None)
        return metrics | counts.metrics("train/r3")

    @hookimpl
    def finish(self) -> None:
        """Leave nothing of this model behind."""
        if self._routers is not None:
            self._routers.close()


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a row of routes, by config.json; None is not known."""

    layers: int | None
    topk: int | None
    experts: int | None

    @property
    def none(self) -> int:
        """The number of no expert, for where routes are unknown."""
        return BYTE_NONE if self.dtype == "uint8" else -1

    @property
    def dtype(self) -> str:
        """Of the column."""
        return "uint8" if self.experts is not None and self.experts <= BYTE_NONE else "int16"


def _check(options: R3Options, config: RunConfig, records: bool) -> Sizes:
    """
    Raises:
        ConfigError: there is nothing to replay, or routers that would not.
    """
    model, algorithm = architecture_of(config), config.algorithm
    if model.experts is None and model.checkpoint:
        raise ConfigError("routing replay is for mixtures of experts, and this model has none",
                          got=str(config.model.model_name), who=f"plugin r3, {config.checkpoint.hf_checkpoint}",
                          fix="leave the plugin out", code="r3-model-without-experts")
    for key, bad, why in (("moe_router_fusion", True, "the fused router of Transformer Engine replays nothing"),
                          ("moe_enable_routing_replay", False, "the plugin needs Megatron's RouterReplay")):
        if config.surface("megatron").get(key) == bad:
            raise ConfigError(why, got=f"{key} = {bad}", who=f"plugin r3, {who(config, f'megatron.{key}')}",
                              fix=f"leave {key} out, or run without the plugin", code="r3-setting-unsupported")
    if not records and config.rollout.engine == "sglang" and (
            config.surface("server").get("enable_return_routed_experts") is False):
        raise ConfigError("the engine's routing is to be replayed, but the engine would not return it", got=False,
                          who=f"plugin r3, {who(config, 'server.enable_return_routed_experts')}",
                          fix="leave it out, or write --use-routing-replay alone", code="r3-engine-routing-disabled")
    if options.compare_every < 0:
        raise ConfigError("compare_every counts rollouts", got=options.compare_every, who="[r3]",
                          fix="0 for never, 10 for every tenth", code="r3-compare-every-invalid")
    if records and (options.compare_every or algorithm.use_rollout_logprobs or algorithm.skip_actor_forward_only):
        raise ConfigError("the routing that is replayed is that of the log-prob pass, which this run does not have" if
                          not options.compare_every else "compare_every is about the engine's routing",
                          who="--use-routing-replay", fix="write --use-rollout-routing-replay, or leave "
                          + ("compare_every out" if options.compare_every else
                             "use_rollout_logprobs and skip_actor_forward_only out"), code="r3-no-routing-to-replay")
    return Sizes(model.layers, model.experts_per_token, model.experts)
