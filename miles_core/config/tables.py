"""The core's options: the eight argument groups of Miles as tables, and [debug].

Every key is a flag (`--rollout-batch-size`, `rollout_batch_size = 32`). Defaults are those of today's Miles where both
have the option; the clip band is asymmetric, as in DAPO. The trainer's own fields need no entry here: [model], [perf]
and [optimizer] take them too, as the surface of its package knows them (surfaces.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from miles_core.config.options import option


@dataclass(frozen=True, kw_only=True)
class Model:
    """Architecture. Constants come from the checkpoint's config.json; one given here that disagrees is an error."""

    model_name: str | None = option(None, "Architecture to build; default: model_type of the checkpoint's config.json.")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Where weights come from and go to."""

    hf_checkpoint: str | None = option(None, "Hugging Face directory: tokenizer, config.json and first weights.")
    ref_load: str | None = option(
        None, "Reference checkpoint (Hugging Face or torch_dist); also the warm start when --load is empty.")
    load: str | None = option(None, "Checkpoint directory to resume from; usually the same as --save.")
    save: str | None = option(None, "Checkpoint directory to write to; saves at the end and every --save-interval.")
    save_interval: int | None = option(None, "Rollouts between checkpoints; needs --save.", within=(1,))
    save_trigger_sentinel: str | None = option(None, "File that asks for a checkpoint after the rollout; is removed.")
    save_hf: str | None = option(
        None, "Hugging Face export at each save; may contain {rollout_id} and, like other paths, {run_dir}.")
    async_save: bool = option(False, "Train on while a checkpoint is written, from a copy in host memory.")
    no_save_optim: bool = option(False, "Leave the optimizer out of checkpoints: smaller, but no exact resume.")
    drop_plugin_state: list[str] = option(
        [], "Plugins, or the prompt source, whose state in --load is discarded; an enabled one starts afresh.")
    run_dir: str | None = option(None, "Plan, events, samples and logs of the run; default: runs/NAME-OF-RUN-FILE.")
    sample_tokens: int = option(2**18, "Response tokens that samples/ has of a rollout; 0: no samples.", within=(0,))


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Where prompts come from and how much flows."""

    prompt_data: str | None = option(
        None, "Prompts: a file, read by its ending (.jsonl, one object a line); PATH@[a:b] takes a slice.")
    prompt_source: str = option("rows", "Which prompt source.")
    input_key: str = option("input", "Key of the prompt: text, or a list of chat messages.")
    label_key: str | None = option(None, "Key of the ground truth that scorers compare with.")
    metadata_key: str = option("metadata", "Key of an object that is passed to generators and scorers.")
    apply_chat_template: bool = option(False, "Render prompts with the tokenizer's chat template.")
    apply_chat_template_kwargs: dict[str, object] | None = option(None, "JSON object of template arguments.")
    chat_template_path: str | None = option(None, "Jinja file that replaces the tokenizer's template.")
    rollout_shuffle: bool = option(False, "Shuffle the prompts again in each epoch.")
    rollout_seed: int = option(42, "Seed of the prompts' order and of every random draw of the rollout.")
    num_rollout: int | None = option(None, "Total number of rollouts; this or --num-epoch.", within=(0,))
    num_epoch: int | None = option(None, "Passes over the prompts; ignored when --num-rollout is given.", within=(1,))
    start_rollout_id: int | None = option(None, "First rollout; default: the checkpoint's next one.")
    rollout_batch_size: int | None = option(None, "Prompts drawn per rollout.", within=(1,))
    n_samples_per_prompt: int = option(1, "Answers sampled per prompt: the group.", within=(1,))
    global_batch_size: int | None = option(None, "Samples per optimizer step.", within=(1,))
    num_steps_per_rollout: int | None = option(
        None, "Optimizer steps per rollout; default: 1, unless --global-batch-size is given.", within=(1,))
    over_sampling_batch_size: int | None = option(
        None, "Prompts in flight, to make up for filtered groups; default: --rollout-batch-size.")
    max_over_sampling_waves: int = option(
        32, "Waves of --over-sampling-batch-size prompts for one rollout before the run ends with an error.")
    max_lag: int = option(
        0, "Rollouts that sampling may run ahead of training; 0 is synchronous and on-policy.", within=(0,))
    max_weight_staleness: int | None = option(
        None, "Largest age of a group's oldest token when it is trained on, in weight versions.", within=(0,))
    async_max_concurrent_samples: int | None = option(
        None, "Maximum number of samples in flight, in whole groups; default: as many as the buffer has room for.")
    async_unused_samples_handler: Literal["drop", "retry"] = option(
        "drop", "What to do with aborted and too stale groups: drop and count them, or sample their prompts again.")
    batch_order: Literal["started", "window"] = option(
        "started", "Order of groups in batches: as started, or (window) finished ones overtake those that can wait.")
    heartbeat_interval: float = option(30.0, "Seconds between heartbeat events of the rollout; 0 is off.")
    engine: str | None = option(None, "Which engine; default: sglang on a GPU with SGLang installed, else local.")
    engine_dtype: Literal["float32", "bfloat16"] | None = option(None, "Engine's dtype; default: the trainer's.")
    engine_max_batch: int = option(256, "Requests that the local engine decodes at once.")
    generate: str = option("single-turn", "Which generator turns a prompt into samples.")
    rollout_temperature: float = option(
        1.0, "Sampling temperature; log-probs are scaled by it on both sides.", within=(0,))
    rollout_top_p: float = option(1.0, "Nucleus sampling; ratios still use the full distribution.", within=(0, 1))
    rollout_top_k: int = option(-1, "Top-k sampling; -1 is off.")
    rollout_max_response_len: int = option(1024, "Maximum number of response tokens.", within=(1,))
    rollout_min_new_tokens: int = option(0, "Stop tokens are not drawn before this many tokens.")
    rollout_ignore_eos: bool = option(False, "Continue after end-of-sequence and stop ids; for benchmarks.")
    rollout_max_prompt_len: int | None = option(None, "Drop longer prompts; default: what the context allows.")
    rollout_max_context_len: int | None = option(None, "Prompt and response together; default: the model's.")
    rollout_stop: list[str] = option([], "Strings that end a response.")
    rollout_stop_token_ids: list[int] = option([], "Token ids that end a response.")
    rollout_skip_special_tokens: bool = option(False, "Leave special tokens out of the text that scorers read.")
    rollout_timeout: float = option(
        600.0, "Seconds allowed for one engine call, and for everything a generator does between two calls.")
    pause_generation_mode: Literal["retract", "in_place", "abort"] = option(
        "retract", "What happens to requests in flight while weights change.")
    rm_type: list[str] = option([], "Scorers by name; several are combined.")
    rm_weights: list[float] = option([], "One weight per scorer; default: 1 each.")
    combine_rewards: str = option("weighted-sum", "How the scores of a sample become its reward.")
    reward_key: str = option("score", "Key of the reward in a scorer's dict; its other numbers are metrics.")
    rm_timeout: float = option(60.0, "Seconds allowed for scoring one group.")


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Evaluation; settings that are not given here are those of [rollout]."""

    eval_interval: int | None = option(
        None, "Rollouts between evaluations; also evaluates once before and once after training.", within=(1,))
    eval_prompt_data: list[str] = option([], "NAME PATH pairs; a single PATH is named by its file.")
    datasets: list[dict[str, object]] = option(
        [], "In a run file: [[eval.datasets]] tables with name, path and their own sampling options.")
    skip_eval_before_train: bool = option(False, "No evaluation before the first rollout.")
    eval_input_key: str | None = option(None, "Key of the prompt.")
    eval_label_key: str | None = option(None, "Key of the ground truth.")
    n_samples_per_eval_prompt: int = option(1, "Answers per prompt; above 1, pass@k is reported.", within=(1,))
    eval_temperature: float | None = option(None, "Sampling temperature.", within=(0,))
    eval_top_p: float | None = option(None, "Nucleus sampling.", within=(1e-09, 1))
    eval_top_k: int | None = option(None, "Top-k sampling.")
    eval_max_response_len: int | None = option(None, "Maximum number of response tokens.", within=(1,))
    eval_max_prompt_len: int | None = option(None, "Drop longer prompts.")
    eval_reward_key: str | None = option(None, "Key of the reward in a scorer's dict.")
    eval_min_new_tokens: int | None = option(None, "Stop tokens are not drawn before this many tokens.")

    @property
    def every(self) -> list[dict[str, Any]]:
        """Every eval dataset as a table of `datasets`, those of `eval_prompt_data` first."""
        words = self.eval_prompt_data
        if len(words) == 1:
            words = [Path(re.split("[@:]", words[0])[0]).stem, *words]
        return [*({"name": name, "path": path} for name, path in zip(words[::2], words[1::2])), *self.datasets]


@dataclass(frozen=True, kw_only=True)
class Perf:
    """Parallelism, memory and hosts. Megatron-core's ModelParallelConfig and recompute fields belong here too."""

    trainer: str = option("megatron", "Which trainer.", flags=("--train-backend",))
    trainer_host: Literal["thread", "process"] | None = option(
        None, "Run the trainer of --placement local in a thread or in processes; default: a thread for one rank.")
    trainer_timeout: float = option(3600.0, "Seconds allowed for one call of the trainer: a pass, a step, a save.")
    placement: str = option("local", "Where ranks and servers run: processes of this machine (local), or Ray (ray).")
    placement_timeout: float = option(120.0, "Seconds to wait for the hardware of --placement ray to become free.")
    placement_labels: list[str] = option([], "KEY=VALUE labels that a Ray node must have to be used.")
    placement_rack_label: str | None = option(None, "Label of Ray nodes that names their rack: ranks go rack by rack.")
    placement_spares: int = option(0, "GPUs that --placement ray holds for a restart, where the cluster has them.")
    ray_address: str | None = option(None, "Ray cluster to use; default: RAY_ADDRESS, else one that the run starts.")
    colocate: bool = option(False, "Trainer and engine share their GPUs and take turns; needs --max-lag 0.")
    offload_train: bool | None = option(None, "Offload the trainer while engines sample; default: as --colocate.")
    offload_rollout: bool | None = option(None, "Offload the engines during training; default: as --colocate.")
    weight_sync: str | None = option(
        None, "How weights reach the engine: in-process, shared-memory, ipc, broadcast, disk, disk-delta; default: "
        "chosen by engine and placement.")
    update_weight_buffer_size: int = option(
        512 * 1024**2, "Maximum size in bytes of a bucket of tensors in a weight sync.", within=(1,))
    update_weight_disk_dir: str | None = option(None, "Folder that trainer and engines share, for disk and disk-delta.")
    check_weight_update_equal: bool = option(
        False, "At the first sync: overwrite the engine's weights, send, and compare with the originals.")
    weight_sync_timeout: float = option(600.0, "Seconds allowed for one weight sync.")
    actor_num_nodes: int = option(1, "Nodes of the trainer.", within=(1,))
    actor_num_gpus_per_node: int = option(1, "Ranks of the trainer on each node; processes, on a CPU.", within=(1,))
    rollout_num_gpus: int | None = option(None, "GPUs of all engines; default: one engine, or with --colocate the "
                                          "trainer's GPUs.", within=(1,))
    rollout_num_gpus_per_engine: int = option(1, "GPUs of one engine: its tensor-parallel size.", within=(1,))
    num_gpus_per_node: int = option(8, "GPUs of a node, for engines that span several.", within=(1,))
    gpu_memory_gib: float | None = option(
        None, "Memory of a GPU for the plan's estimate; default: detected on this machine.")
    mfu_peak_tflops: float | None = option(None, "Dense bf16 TFLOP/s of a GPU; default: its data sheet's.", within=(0,))
    max_restarts: int = option(0, "How often a run whose trainer died is restarted from its last checkpoint.")
    bf16: bool = option(True, "Train in bfloat16 with float32 master weights; --no-bf16 trains in float32.")
    use_dynamic_batch_size: bool = option(False, "Pack by --max-tokens-per-gpu instead of --micro-batch-size.")
    max_tokens_per_gpu: int | None = option(None, "Maximum number of tokens of a packed micro-batch.", within=(1,))
    log_probs_max_tokens_per_gpu: int | None = option(
        None, "The same for passes without gradient; default: --max-tokens-per-gpu.", within=(1,))
    log_probs_chunk_size: int = option(1024, "Rows of logits in memory at once; -1: all.", within=(-1,))
    skip_zero_advantages: bool = option(
        False, "Skip samples whose advantages are all 0 in the steps where their gradient is 0; "
        "means under train/ are over the others.")
    micro_batch_size: int = option(1, "Samples of a micro-batch, unless --use-dynamic-batch-size is on.", within=(1,))
    balance_data: bool = option(True, "Deal micro-batches to data-parallel ranks by load; off: in turn.")
    balance_by_flops: bool = option(False, "Measure that load in floating-point operations instead of tokens.")
    threads: int | None = option(None, "Threads of torch in each process; default: the CPUs of this process.")


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """The objective. A swap of algorithm changes one word, because these options belong to the core."""

    advantage_estimator: str = option("grpo", "Which advantage estimator.")
    policy_loss: str | None = option(None, "Which policy loss; default: the estimator's namesake, else clip.")
    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = option(
        "policy_loss", "sft_loss comes with plugin sft; custom_loss (--custom-loss-function-path) with plugin compat.")
    rewards_normalization: bool = option(
        True, "Subtract the mean reward of the group; for estimators that compare within it.",
        off=("--disable-rewards-normalization",))
    std_normalization: bool = option(
        True, "Divide by the group's standard deviation too; off is the Dr. GRPO estimator.",
        off=("--disable-grpo-std-normalization",))
    normalize_advantages: bool = option(False, "Whiten the advantages over all trained tokens of the rollout.")
    gamma: float = option(1.0, "Discount per token, for estimators with returns.", within=(0, 1))
    lambd: float = option(1.0, "Lambda of generalised advantage estimation.", within=(0, 1))
    kl_coef: float = option(
        0.0, "Weight of the KL divergence to the reference in the reward of each token.", within=(0,))
    reduction: str | None = option(None, 'Which reduction: "sample" (default), "token" or "constant".')
    calculate_per_token_loss: bool = option(False, 'Miles\'s name for --reduction token.')
    reduction_constant: float | None = option(
        None, "Divisor of each rollout for --reduction constant; default: --rollout-max-response-len.", within=(1e-9,))
    eps_clip: float = option(0.2, "Lower width of the clip band; if given alone, also the upper one.", within=(0,))
    eps_clip_high: float = option(0.28, "Upper width of the clip band; default: --eps-clip, if given.", within=(0,))
    eps_clip_c: float | None = option(None, "Dual-clip constant, above 1.")
    use_kl_loss: bool = option(False, "Load the reference model and report the KL divergence to it.")
    kl_loss_coef: float = option(0.0, "Weight of the KL divergence in the loss; 0 only reports it.", within=(0,))
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = option(
        "k1", "Estimator of the KL divergence, in the loss and in the reward.")
    use_unbiased_kl: bool = option(False, "Multiply the KL term of the loss by policy / old policy, with gradient.")
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.")
    observe_training_entropy: bool = option(False, "Report the entropy although its coefficient is 0.")
    use_rollout_logprobs: bool = option(False, "Use the engine's log-probs as the old policy's; no pass computes them.")
    skip_actor_forward_only: bool = option(
        False, "Skip the pass for old log-probs: the ratio is 1. Needs one optimizer step per rollout.")
    fp32_lm_head: bool = option(
        False, "Do not round logits to bf16, in the trainer and in SGLang, which brings their log-probs closer.")
    true_on_policy_mode: bool = option(
        False, "Engine and trainer agree bit for bit, or the run ends: on a CPU, or fsdp and SGLang on GPUs.")

    @property
    def needs_reference(self) -> bool:
        """Whether the reference model scores the rollouts: for the KL term of the loss, or the KL in the reward."""
        return self.use_kl_loss or self.kl_coef != 0


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Megatron-core's optimizer and schedule; its OptimizerConfig fields belong here too."""

    optimizer: Literal["adam", "muon", "dist_muon"] = option("adam", "Muon: with AdamW for all but matrices.")
    lr: float = option(1e-6, "Learning rate.", within=(0, 0.1))
    min_lr: float = option(0.0, "Learning rate at the end of a decay.", within=(0,))
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = option("constant", "Schedule.")
    lr_warmup_iters: int = option(0, "Optimizer steps of linear warm-up.", within=(0,))
    lr_warmup_fraction: float = option(0.0, "The same as a share of the decay's steps.", within=(0, 1))
    lr_decay_iters: int | None = option(None, "Optimizer steps of the decay; default: all of the run.", within=(1,))
    weight_decay: float = option(0.0, "Decoupled weight decay.", within=(0,))
    adam_beta1: float = option(0.9, "Decay of the first moment.", within=(0, 1))
    adam_beta2: float = option(0.95, "Decay of the second moment.", within=(0, 1))
    adam_eps: float = option(1e-8, "Added to the denominator.", within=(0,))
    clip_grad: float = option(1.0, "Largest gradient norm; 0 is off.", within=(0,))
    clip_gradients: str = option("norm", "How gradients are clipped; the default is by their global norm.")
    seed: int = option(1234, "Seed of weights and dropout.")


@dataclass(frozen=True, kw_only=True)
class Debug:
    """Run one side alone, replay rollouts, print samples, check determinism."""

    debug_rollout_only: bool = option(False, "Sample and score; no trainer. The engine serves --hf-checkpoint.")
    debug_train_only: bool = option(False, "Start no engine: train on saved rollouts, or on rows' own answers.")
    save_debug_rollout_data: str | None = option(None, "Folder to save each rollout in; contains {rollout_id}.")
    load_debug_rollout_data: str | None = option(None, "Folder to replay; implies --debug-train-only.")
    debug_determinism: bool = option(False, "Record hashes of every weight and batch column, for `miles diff`.")
    debug_rollout_print_every: int | None = option(None, "Print a sample of every N-th rollout.")
    debug_exit_after_rollout: int | None = option(None, "Stop after N rollouts of this start.")
    strict_trackers: bool = option(False, "End the run when a tracker fails; otherwise it is a warning.")
    plan_without_weights: bool = option(False, "Plan from config.json alone; a run needs the weights.")
    use_pytorch_profiler: bool = option(False, "Write traces of the trainer's phases to profile/ in the run directory.")
    max_first_logprob_diff: float = option(
        0.5, "Largest average difference, in nats per token, between the log-probs of trainer and engine for "
        "tokens of the current weights in the first batch of a start; 0 turns the check off.")
    profile_step_start: int = option(10, "First rollout to trace.")
    profile_step_end: int = option(12, "First rollout after it that is no longer traced.")
    profile_target: list[Literal["train_overall", "train_actor", "train_log_probs"]] = option(
        ["train_overall"], "What to trace: every phase of the trainer, its optimizer steps, its passes for log-probs.")


TABLES: dict[str, type] = {
    "model": Model, "checkpoint": Checkpoint, "rollout": Rollout, "eval": Eval, "perf": Perf,
    "algorithm": Algorithm, "optimizer": Optimizer, "debug": Debug}


@dataclass(frozen=True)
class RunConfig:
    """A whole run, typed and frozen.

    Args:
        plugins: what was named, in order, as written.
        options: plugin name -> its options, typed.
        surfaces: table of the plan -> options of another program that somebody set (config/surfaces.py).
        origin: dotted key -> who set it; what is not in it is a default.
        name: the run file's stem, or "run".
        stated: "HOOK:NAME" of a part -> what its plugin states of it, the words after that in `provides`: of an engine
            what it understands, of a weight sync what it needs of the engine, of a generator no-engine if it asks none,
            of an architecture how to read config.json. `derive` adds "address:KEY" -> HOST:PORT that an option needs.
    """

    model: Model = field(default_factory=Model)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    rollout: Rollout = field(default_factory=Rollout)
    eval: Eval = field(default_factory=Eval)
    perf: Perf = field(default_factory=Perf)
    algorithm: Algorithm = field(default_factory=Algorithm)
    optimizer: Optimizer = field(default_factory=Optimizer)
    debug: Debug = field(default_factory=Debug)
    plugins: tuple[str, ...] = ()
    options: dict[str, dict[str, object]] = field(default_factory=dict)
    surfaces: dict[str, dict[str, object]] = field(default_factory=dict)
    origin: dict[str, object] = field(default_factory=dict)
    name: str = "run"
    stated: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        """Whether answers are sampled and learnt from: not for a demonstration's, nor where one side is left out."""
        return (self.algorithm.loss_type != "sft_loss" and not self.debug.debug_rollout_only
                and not self.debug.debug_train_only and self.rollout.num_rollout != 0)

    @property
    def understood(self) -> frozenset[str]:
        """What the engine understands, nothing where the run has none. One without servers of its own takes a stream of
        tensors: its contract says so.

        servers: it asks --placement for GPUs of its own. external: they run already, on GPUs of others. server_args:
        the fields of [sglang] are its own.
        """
        words = frozenset(self.stated.get(f"engine:{self.rollout.engine or 'local'}", ()))
        whole = words if "servers" in words else words | {"tensors"}
        return frozenset() if self.debug.debug_train_only else whole

    def reaches(self, weight_sync: str) -> bool:
        """Whether the engine understands what a weight sync sends; one that states nothing is not judged."""
        return self.understood.issuperset(self.stated.get(f"weight_sync:{weight_sync}", ()))

    def surface(self, table: str) -> dict[str, Any]:
        """The options of another program that somebody set, by the plan's name of their table; empty where none is."""
        return self.surfaces.get(table, {})

    def with_surface(self, table: str, **values: object) -> RunConfig:
        """A copy in which these options of another program are set, too."""
        return replace(self, surfaces={**self.surfaces, table: {**self.surface(table), **values}})
