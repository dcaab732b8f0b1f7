"""Build: a plan becomes a Run. The only place that makes parts from settings."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from miles_core import rng
from miles_core.columns import Columns
from miles_core.config.load import config_json, vocabulary_of, with_values
from miles_core.config.tables import RunConfig
from miles_core.errors import CheckpointError, ConfigError, DataError, HookError
from miles_core.evaluation import Dataset, Evaluation
from miles_core.hosts import Handle, ThreadHost, cpus
from miles_core.plugins import bind, digest, state
from miles_core.plugins.bind import Hooks
from miles_core.plugins.plan import Plan
from miles_core.plugins.resolve import chosen
from miles_core.plugins.select import Selected
from miles_core.reading import format_of, reading
from miles_core.record.journal import Journal
from miles_core.record.replay import Replay, load_flow
from miles_core.resume import Hosted, check_same_data, restore, restore_prompts
from miles_core.run import Run
from miles_core.stages.buffer import Buffer
from miles_core.stages.placement import Placement
from miles_core.stages.prompts import PromptSource, Records, RowPrompts, rows_of
from miles_core.stages.reward import Scoring
from miles_core.stages.rollout import Engine, Generation, SamplingParams, ServerEngine, attended
from miles_core.stages.step import Resume
from miles_core.types import Batch, CancelHandle, Drop, Group, Prompt, Rank, Sample, Status


@dataclass(slots=True)
class Parts:
    """What has to be there before a journal can be opened: hooks of each role, tokenizer, checked configuration."""

    config: RunConfig
    driver: Hooks
    rollout: Hooks
    tokenizer: Any
    readers: dict[str, Callable[[str, int | None], Records]]

    def read(self, path: str) -> Records:
        """All rows of a path, by its format."""
        if (name := format_of(path)) not in self.readers:
            raise DataError(f"no enabled plugin reads rows of the format {name!r}", code="row-format-unknown", who=path,
                            got=f"offered: {', '.join(sorted(self.readers))}",
                            fix="enable the plugin that reads it with --plugin NAME")
        return self.readers[name](path, None)


def parts(plan: Plan) -> Parts:
    """Import the plugins, bind their hooks, load the tokenizer.

    Raises:
        PluginError: a plugin that does not import, does not fit its hooks, or shares state between roles.
        CheckpointError, DataError: --hf-checkpoint is not one.
    """
    config = with_context(plan.config)
    hooks = {role: bind.bind(plan.selected, config, role) for role in ("driver", "rollout")}
    readers = bind.bind(plan.selected, config, "plan").read_rows
    return Parts(config, hooks["driver"], hooks["rollout"], load_tokenizer(config), readers)


async def build(plan: Plan, parts: Parts, journal: Journal) -> Run:
    """Everything the loop calls; the trainer has loaded its checkpoint when this returns."""
    config = parts.config
    placement: Placement = parts.driver.placement[config.perf.placement](config)
    trainer = Untrained()
    try:
        await placement.open()
        counted, replays = config.rollout.num_rollout is not None, config.debug.load_debug_rollout_data
        prompts = None if counted and replays else parts.rollout.prompt_source[config.rollout.prompt_source](
            config, parts.tokenizer, parts.read)
        if not counted:  # schedules of learning rates count to the last step
            count = config.rollout.num_epoch * len(prompts) // config.rollout.rollout_batch_size
            config = parts.config = with_values(config, "num_epoch", rollout__num_rollout=count)
        trainer = trainer if config.debug.debug_rollout_only else _host(plan.selected, parts, placement)
        trainer.timeout = config.perf.trainer_timeout
        return await _assembled(parts, journal, placement, trainer, None if replays else prompts)
    except BaseException:
        for part in (trainer, placement):
            with contextlib.suppress(Exception):
                await asyncio.wait_for(part.close(), 10)
        raise


async def _assembled(parts: Parts, journal: Journal, placement: Placement, trainer: Handle,
                     prompts: PromptSource | None) -> Run:
    config, tokenizer, rollout = parts.config, parts.tokenizer, parts.config.rollout
    only_rollout, only_train = config.debug.debug_rollout_only, config.debug.debug_train_only
    engine: Engine | None = None if only_train else parts.rollout.engine[chosen(config, "engine")](
        config, tokenizer, placement, parts.rollout)  # before the trainer loads, so that what it lacks is said at once
    resume = await trainer.load()
    journal.console.message("info", f"Loaded checkpoint from {resume.source}")
    slots, partial_groups = load_flow(resume.state or {})
    if resume.state is not None:
        await restore((parts.driver, parts.rollout), trainer, resume.state, config, journal)
        if not restore_prompts(config, prompts, resume.state, journal):
            slots, partial_groups = [], []  # their prompts are of the other source
    if slots or partial_groups:
        check_same_data(config, prompts, resume.state["prompts"])
    if engine is not None:
        journal.message("info", f"engine {chosen(config, 'engine')}: {engine.path}")
    datasets = [] if only_train else _datasets(parts, engine)
    for name, source in (("prompts", prompts), *((dataset.name, dataset.prompts) for dataset in datasets)):
        if left_out := getattr(source, "left_out", 0):
            journal.message("info", f"{name}: left out {left_out:,} longer than the limit for prompts")
    evaluation = Evaluation(datasets, config.eval.eval_interval, config.eval.skip_eval_before_train)
    if parts.rollout.evaluation is not None:
        evaluation = parts.rollout.evaluation(evaluation, parts)
    first = rollout.start_rollout_id if rollout.start_rollout_id is not None else resume.rollout_id
    most = config.debug.debug_exit_after_rollout
    last = rollout.num_rollout if most is None else min(rollout.num_rollout, first + most)
    buffer = Replay(config.debug.load_debug_rollout_data, first) if prompts is None else _buffer(
        config, max(last - first, 0), keeps=parts.rollout.unfinished is not None)
    sync = NoEngine() if only_rollout or only_train else parts.driver.weight_sync[config.perf.weight_sync](config)
    generate = _generator(parts, engine or sync, sampling(config), "train", rollout.n_samples_per_prompt)
    run = Run(
        config=config, first=first, last=last, steps=0 if only_rollout else rollout.num_steps_per_rollout,
        prompts=prompts, generate=lambda slot: generate(slot.prompt, slot.begun, slot.recall),
        scoring=_scoring(parts, rollout.reward_key),
        chain=parts.rollout.filter_group, shape=parts.rollout.shape_rewards, buffer=buffer,
        engine=engine, trainer=trainer, weight_sync=sync, placement=placement,
        evaluation=evaluation, journal=journal, state=lambda: state.collect((parts.driver, parts.rollout)),
        hook_timings=lambda: parts.driver.timings() | parts.rollout.timings(),
        unfinished=parts.rollout.unfinished, select=parts.rollout.select_from_buffer, begun=partial_groups,
        made_of=(resume.state or {}).get("lock") or {})
    if isinstance(buffer, Buffer):
        buffer.requeue, buffer.too_stale = run.requeue, run.too_stale
        await run.requeue(buffer.restore(slots))
    if isinstance(engine, ServerEngine):
        engine.recover, engine.event = run.recover, journal.event
    return run


def _buffer(config: RunConfig, batches: int, keeps: bool) -> Buffer:
    """
    Args:
        keeps: a plugin keeps groups that were called back.
    """
    rollout, most = config.rollout, config.rollout.async_max_concurrent_samples
    # Further ahead than the limit, groups would only be sampled to be found too stale.
    most_stale = rollout.max_lag if rollout.max_weight_staleness is None else rollout.max_weight_staleness
    again = {"aborted", "stale"} if rollout.async_unused_samples_handler == "retry" else set()
    return Buffer(
        rollout.rollout_batch_size, min(rollout.max_lag, most_stale), batches=batches, order=rollout.batch_order,
        credit=rollout.over_sampling_batch_size - rollout.rollout_batch_size,
        most_in_flight=most and most // rollout.n_samples_per_prompt,
        most_drops=rollout.max_over_sampling_waves * rollout.over_sampling_batch_size,
        again=frozenset(again | ({"aborted"} if keeps else set())), resumes=keeps)  # fmt: skip


def proven_trainer_part(proof: dict[str, str], selected: Sequence[Selected], config: RunConfig, rank: Rank) -> Any:
    """`trainer_part` in a process of its own, which first shows that it runs what the driver planned.

    Raises:
        ConfigError: it has other code; names host, rank and package.
    """
    digest.check(proof, selected, f"trainer rank {rank.index} on {platform.node()}")
    return hosted_trainer_part(selected, config, rank, bind.bind(selected, config, "trainer"))


def hosted_trainer_part(selected: Sequence[Selected], config: RunConfig, rank: Rank, hooks: Hooks) -> Hosted:
    """`trainer_part` with what a host's driver asks beside the contract of a trainer."""
    return Hosted(trainer_part(selected, config, rank, hooks), hooks, rank, config.rollout.num_steps_per_rollout)


def trainer_part(selected: Sequence[Selected], config: RunConfig, rank: Rank, hooks: Hooks | None = None) -> Any:
    """The trainer of one rank, made where it runs."""
    hooks = hooks or bind.bind(selected, config, "trainer")
    columns = Columns(hooks.columns() if hooks.columns else ())
    return hooks.trainer[config.perf.trainer](config, hooks, columns, rank)


def _host(selected: Sequence[Selected], parts: Parts, placement: Placement) -> Handle:
    """The trainer's ranks where --placement and --trainer-host put them."""
    perf, config = parts.config.perf, parts.config
    if perf.placement == "local" and perf.trainer_host == "thread":
        os.environ.update(placement.environment)
        if config.checkpoint.save or config.checkpoint.load:  # trainer and engine import it: one would see half of it
            import torch.distributed.checkpoint  # noqa: F401

        hooks = bind.bind(selected, config, "trainer")
        bind.check_roles_apart([parts.driver, parts.rollout, hooks])
        return ThreadHost("trainer", hosted_trainer_part, selected, config, Rank(), hooks)
    bind.check_roles_apart([parts.driver, parts.rollout])
    if perf.placement == "local":
        threads = perf.threads or max(1, cpus() // (perf.actor_num_nodes * perf.actor_num_gpus_per_node))
        config = with_values(config, "CPUs / ranks", perf__threads=threads)
    return placement.trainer(proven_trainer_part, digest.proof(selected), selected, config)


def sampling(config: RunConfig, dataset: dict | None = None) -> SamplingParams:
    """Sampling parameters of training, or of an eval dataset: its own, else [eval]'s, else [rollout]'s."""
    rollout = config.rollout

    def value(name: str) -> Any:
        own = None if dataset is None else dataset.get(name, getattr(config.eval, f"eval_{name}"))
        return getattr(rollout, f"rollout_{name}") if own is None else own

    return SamplingParams(
        temperature=value("temperature"), top_p=value("top_p"), top_k=value("top_k"),
        max_new_tokens=value("max_response_len"), min_new_tokens=value("min_new_tokens"),
        stop=tuple(rollout.rollout_stop), stop_token_ids=tuple(rollout.rollout_stop_token_ids),
        skip_special_tokens=rollout.rollout_skip_special_tokens, ignore_eos=rollout.rollout_ignore_eos)


def _generator(parts: Parts, engine: Engine, params: SamplingParams, stream: str, samples: int) -> Callable:
    config, hooks, tokenizer = parts.config, parts.rollout, parts.tokenizer
    how, context = hooks.generate[config.rollout.generate], config.rollout.rollout_max_context_len
    columns = Columns(hooks.columns() if hooks.columns else ())
    vocabulary = vocabulary_of(config)

    def decode(ids, skip_special_tokens):
        return tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    async def generate(asked: Prompt, begun: Sequence[Sample] = (), recall: CancelHandle | None = None,
                       engine: Engine = engine) -> Group:
        prompt = hooks.prepare_prompt(asked) if hooks.prepare_prompt else asked
        if isinstance(prompt, Drop):
            return Group(asked, [Sample(asked, 0, status=Status.FAILED, metadata={"drop": asdict(prompt)})])
        ask = hooks.generate_request or (lambda request, prompt: request)
        room = min(params.max_new_tokens, context - len(prompt.token_ids))
        generation = Generation(
            engine=engine, sampling=replace(params, max_new_tokens=room), samples=samples,
            key=lambda index, turn: rng.key(config.rollout.rollout_seed, stream, prompt.uid, index, turn),
            decode=decode, timeout=config.rollout.rollout_timeout, begun=begun, recall=recall or CancelHandle(),
            columns=columns, vocabulary=vocabulary, tokenizer=tokenizer, hooks=hooks,
            on_request=lambda request, shown=prompt: ask(request, shown),
            on_response=hooks.generate_response or (lambda sample, response: sample))
        who = f"generator {config.rollout.generate!r}, {stream} prompt {prompt.uid}"
        answer = await attended(how(prompt, generation), generation, who)
        if not isinstance(answer, list) or {*map(type, answer)} != {Sample} or len({*map(id, answer)}) < len(answer):
            raise HookError("a generator must return a non-empty list of samples", code="generator-returns-no-samples",
                            got=repr(answer)[:100], who=who, fix="return one Sample object for each answer")
        group = Group(prompt, answer)
        for sample in group.samples:
            columns.check(sample)
        return group

    return generate


def _scoring(parts: Parts, key: str, own: str | None = None) -> Scoring:
    """The run's scorers; of an eval dataset that names one the sole scorer."""
    rollout, hooks = parts.config.rollout, parts.rollout
    weights = {own: 1.0} if own else dict(zip(rollout.rm_type, rollout.rm_weights, strict=True))
    return Scoring({name: hooks.reward[name] for name in weights}, weights,
                   hooks.combine_rewards[rollout.combine_rewards], rollout.rm_timeout, key)


def _datasets(parts: Parts, engine: Engine) -> list[Dataset]:
    config, datasets = parts.config, []
    for dataset in config.eval.every:
        rows = rows_of(config, dataset)
        samples = dataset.get("n_samples") or config.eval.n_samples_per_eval_prompt
        generate = _generator(parts, engine, sampling(config, dataset), rows.stream, samples)
        key = config.eval.eval_reward_key or config.rollout.reward_key
        prompts = RowPrompts(rows, parts.read(rows.path), parts.tokenizer)
        scoring = _scoring(parts, key, dataset.get("rm_type"))
        datasets.append(Dataset(dataset["name"], prompts, generate, scoring))
    return datasets


def with_context(config: RunConfig) -> RunConfig:
    """Fill rollout_max_context_len from the checkpoint's config.json, or what transformers has where that is silent.

    Raises:
        CheckpointError: --hf-checkpoint is missing or has no readable config.json.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    folder, constants = Path(config.checkpoint.hf_checkpoint), config_json(config)[1] or {}
    who = f"--hf-checkpoint {folder}"
    most = constants.get("max_position_embeddings")
    if most is None and constants.get("model_type") in CONFIG_MAPPING:  # Gemma 3's files leave it out
        with reading(who, CheckpointError):
            most = getattr(AutoConfig.from_pretrained(folder).get_text_config(), "max_position_embeddings", None)
    if not isinstance(most, int):
        what = "config.json cannot be read, or has no max_position_embeddings"
        raise CheckpointError(what if folder.is_dir() else "the folder does not exist", code="model-config-unusable",
                              got=most, who=who, fix="name a model's folder; hf download --local-dir makes one")
    most = max(most, config.surface("server").get("context_length") or 0)  # which the servers are told too
    wanted = config.rollout.rollout_max_context_len
    if wanted is not None and wanted > most:
        raise ConfigError("rollout_max_context_len exceeds the model's max_position_embeddings",
                          code="context-above-model", got=wanted, who=who, fix=f"use at most {most}")
    return with_values(config, "config.json", rollout__rollout_max_context_len=wanted or most)


def load_tokenizer(config: RunConfig) -> Any:
    """The checkpoint's tokenizer, with --chat-template-path's template where given.

    Raises:
        DataError: no tokenizer there, or no such template file.
    """
    from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedTokenizerFast

    folder, constants = config.checkpoint.hf_checkpoint, config_json(config)[1] or {}
    kind = AutoTokenizer if constants.get("model_type") in CONFIG_MAPPING else PreTrainedTokenizerFast
    try:
        tokenizer = kind.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the Rust half of a tokenizer raises what it likes
        raise DataError("the tokenizer cannot be loaded", code="tokenizer-unloadable",
                        got=(str(error).splitlines() or [type(error).__name__])[0], who=f"--hf-checkpoint {folder}",
                        fix="the folder must contain tokenizer.json and tokenizer_config.json") from error
    if template := config.rollout.chat_template_path:
        try:
            tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError("the chat template cannot be read", code="chat-template-unreadable",
                            got=getattr(error, "strerror", None) or error, who=f"--chat-template-path {template}",
                            fix="pass the path of a Jinja file") from None
    return tokenizer


class Untrained:
    """Stands in for the trainer under --debug-rollout-only: keeps the batch, and has no weights to save."""

    async def load(self) -> Resume:
        return Resume(0, None, "--hf-checkpoint, in the engine alone (--debug-rollout-only)")

    async def restore_plugins(self, saved: dict, drop: Sequence[str]) -> list[str]:
        return []

    async def take_batch(self, batch: Batch) -> None:
        self.batch = batch

    async def score(self) -> dict[str, Any]:
        return {}

    advantage = plugin_state = score

    async def end_batch(self) -> Batch:
        return self.batch

    async def close(self, *_trained: object) -> None:
        """Nothing was trained, and nothing is held."""

    save = saved = export = close


class NoEngine:
    """Stands in for the engine, and for the weight sync where one of the two sides is not there."""

    version = 0

    async def generate(self, request):
        raise ConfigError("a generator asks for answers of the model, and the run has no engine",
                          code="run-without-engine", who="--debug-train-only", fix="leave it out")

    async def sync(self, trainer, engine, version) -> dict:
        self.version = version
        return {"tensors": 0, "bytes": 0}
