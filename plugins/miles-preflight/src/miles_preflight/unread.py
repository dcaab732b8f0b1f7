"""Options that somebody set and that no enabled part of the run reads: one note names them, and nothing is refused."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from miles_core.config.options import Origin
from miles_core.config.tables import RunConfig
from miles_core.plugins.resolve import choices
from miles_core.plugins.select import Selected, all_specs

READERS = {
    "kl_loss_coef use_unbiased_kl": "algorithm.use_kl_loss",
    "reduction_constant": "algorithm.reduction=constant",
    "max_tokens_per_gpu log_probs_max_tokens_per_gpu": "perf.use_dynamic_batch_size",
    "balance_by_flops": "perf.balance_data", "gpu_memory_gib": "perf.trainer=megatron",
    "ray_address placement_*": "perf.placement=ray",
    "update_weight_disk_dir": "perf.weight_sync=disk*", "offload_train offload_rollout": "perf.colocate",
    "apply_chat_template_kwargs chat_template_path": "rollout.apply_chat_template",
    "max_weight_staleness batch_order async_unused_samples_handler": "rollout.max_lag|hook unfinished",
    "eval_interval": "eval.eval_prompt_data|datasets",
    "eval_* n_samples_per_eval_prompt skip_eval_before_train": "eval.eval_interval",
    "min_lr": "optimizer.lr_decay_style=*i*", "lr_decay_iters": "optimizer.lr_decay_style|lr_warmup_fraction=*[i1-9]*",
    "lr_warmup_fraction": "optimizer.lr_warmup_iters=0",
    "save_interval save_hf async_save no_save_optim": "checkpoint.save",
    "drop_plugin_state": "checkpoint.load", "profile_*": "debug.use_pytorch_profiler",
    "tis_*": "tis.use_tis|use_rs", "rs_level rs_*_bound": "tis.use_rs", "opsm_delta": "tis.use_opsm",
    "recompute_method recompute_num_layers distribute_saved_activations": "megatron.recompute_granularity=full",
    "recompute_modules": "megatron.recompute_granularity=selective",
    "optimizer_offload_fraction overlap_cpu_optimizer_* use_torch_optimizer_*": "megatron.optimizer_cpu_offload",
    "offload_modules": "megatron.fine_grained_activation_offloading",
    "num_layers_at_*_in_bf16": "megatron.first_last_layers_bf16",
    "speculative_*": "server.speculative_algorithm",
    "max_lora_rank lora_target_modules": "server.enable_lora|lora_paths",
    "torch_compile_max_bs": "server.enable_torch_compile", "hicache_*": "server.enable_hierarchical_cache",
}
"""Names of a table's options -> what reads them: an option that is set, to a value like that after =, or a hook."""


def unread(config: RunConfig, selected: Sequence[Selected]) -> list[str]:
    """The note, where there is anything to say."""
    set_keys = [key for key, origin in config.origin.items()
                if isinstance(origin, Origin) and origin.kind in ("file", "preset", "flag")]
    idle = {one.manifest.name for one in selected if one.manifest.options and not _called(one, config)}
    hooks = {f"hook {offer.hook}" for one in selected for offer in one.manifest.offers}
    unused = [key for key in set_keys if key.partition(".")[0] in idle or _idle(config, key, hooks)]
    return [f"nothing that is enabled reads {', '.join(unused)}"] if unused else []


def _idle(config: RunConfig, key: str, hooks: set[str]) -> bool:
    table, _, name = key.partition(".")
    if name == "speculative_algorithm" or str(_of(config, table, name)) in ("None", "False") or (
            table == "server" and "lora" in name and config.perf.weight_sync == "adapter"):
        return False  # turned off; or what plugin lora completes where adapters travel alone
    for names, reader in READERS.items():
        place, _, condition = reader.partition(".")
        options, _, wanted = condition.partition("=")
        if place == table and any(fnmatchcase(name, one) for one in names.split()):
            values = [option in hooks or _of(config, place, option) for option in options.split("|")]
            return not any(fnmatchcase(str(value), wanted) if wanted else value for value in values)
    return False


def _of(config: RunConfig, table: str, name: str) -> object:
    others = {**config.surface(table), **config.options.get(table, {})}  # of another program, or a plugin's
    return getattr(getattr(config, table), name, None) if hasattr(config, table) else others.get(name)


def _called(one: Selected, config: RunConfig) -> bool:
    """Whether the run calls any hook of a plugin but `finish`: one that is not named, or a part that was chosen."""
    picked = {(hook, name) for hook, name, _ in choices(config)}
    return any((offer.hook, offer.name) in picked or all_specs()[offer.hook].kind != "named"
               for offer in one.manifest.offers if offer.hook in all_specs() and offer.hook != "finish")
