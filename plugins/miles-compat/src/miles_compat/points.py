"""Every extension point of Miles, in the order of its documentation, and what there is here in its place."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import MappingProxyType

SUPPORTED, TAKEN, REPLACED, NOT_HERE = "supported", "taken", "replaced", "not here"

HOOKS = MappingProxyType({
    "custom_generate_function_path": ("generate",),
    "data_source_path": ("prompt_source",),
    "buffer_filter_path": ("select_from_buffer",),
    "dynamic_sampling_filter_path": ("filter_group",),
    "rollout_sample_filter_path": ("shape_rewards",),
    "rollout_all_samples_process_path": ("filter_group", "shape_rewards"),
    "custom_rm_path": ("reward",),
    "custom_reward_post_process_path": ("shape_rewards",),
    "rollout_data_postprocess_path": ("train_step",),
    "custom_loss_function_path": ("policy_loss",),
    "custom_tis_function_path": ("token_weights",),
    "custom_pg_loss_reducer_function_path": ("reduction",),
    "custom_megatron_init_path": ("megatron_init",),
    "custom_megatron_before_log_prob_hook_path": ("log_prob", "microbatch"),
    "custom_megatron_before_train_step_hook_path": ("train_step",),
    "custom_megatron_post_save_hook_path": ("metrics", "finish"),
    "custom_rollout_log_function_path": ("metrics",),
    "custom_eval_rollout_log_function_path": ("metrics",),
    "custom_advantage_function_path": ("advantage",),
    "rollout_function_path": ("prompt_source", "generate", "reward"),
    "eval_function_path": ("generate", "combine_rewards"),
    "custom_agent_function_path": ("generate",),
    "session_sample_picker_path": ("generate",),
    "session_sample_postprocessor_path": ("generate",),
    "generate_tool_specs_path": ("generate",),
    "generate_execute_tool_function_path": ("generate",),
    "rollout_sample_hook_path": ("generate",),
    "custom_convert_samples_to_train_data_path": ("shape_rewards",),
    "custom_model_provider_path": ("build_model",),
    "custom_update_weight_post_write_path": ("megatron_init",),
})
"""Option of this plugin -> the hooks that call its function."""


@dataclass(frozen=True, slots=True)
class Point:
    """One extension point.

    Args:
        number: its number among Miles's 36; None for slime's own.
        names: its flags, or what it is called.
        status: SUPPORTED (functions are called), TAKEN (a file or a value is), REPLACED (something else does it) or
            NOT_HERE (and the sentence says why).
        more: what else to say; for a point without a flag, all there is to say.
    """

    number: int | None
    names: tuple[str, ...]
    status: str
    more: str = ""

    @property
    def option(self) -> str:
        """The option of this plugin that a supported point has."""
        return self.names[0].removeprefix("--").replace("-", "_")


POINTS = (
    Point(1, ("--rollout-function-path",), SUPPORTED, "and Miles's own: its default, sft_rollout and "
          "fully_async_rollout"),
    Point(2, ("--eval-function-path",), SUPPORTED, "on the run's eval datasets"),
    Point(3, ("--custom-generate-function-path",), SUPPORTED, "with `--generate custom`"),
    Point(4, ("--custom-agent-function-path",), SUPPORTED, "on the endpoint of plugin tools, with "
          "`--apply-chat-template`"),
    Point(5, ("--generate-tool-specs-path", "--generate-execute-tool-function-path"), SUPPORTED, "with "
          "`generate_execute_tool_function_path` and calls in Qwen's format"),
    Point(6, ("--data-source-path",), SUPPORTED, "with `--prompt-source custom`"),
    Point(7, ("--custom-async-data-buffer-path",), REPLACED),
    Point(8, ("--buffer-filter-path",), SUPPORTED, "with `--partial-rollout`"),
    Point(9, ("--dynamic-sampling-filter-path",), SUPPORTED),
    Point(10, ("--rollout-sample-filter-path",), SUPPORTED),
    Point(11, ("--rollout-all-samples-process-path",), SUPPORTED),
    Point(12, ("--custom-rm-path",), SUPPORTED, "with `--rm-type custom`"),
    Point(13, ("--custom-reward-post-process-path",), SUPPORTED),
    Point(14, ("--custom-convert-samples-to-train-data-path",), SUPPORTED, "for rewards and loss masks"),
    Point(15, ("--rollout-data-postprocess-path",), SUPPORTED),
    Point(16, ("--custom-loss-function-path",), SUPPORTED, "with `--loss-type custom_loss`; not with Miles's arguments "
          "`(args, batch, logits, sum_of_sample_mean)`, as those logits never exist at once"),
    Point(17, ("--custom-tis-function-path",), SUPPORTED, "without `--use-tis`"),
    Point(18, ("--custom-pg-loss-reducer-function-path",), SUPPORTED, "with `--reduction custom`"),
    Point(19, ("--custom-megatron-init-path",), SUPPORTED),
    Point(20, ("--custom-megatron-before-log-prob-hook-path",), SUPPORTED),
    Point(21, ("--custom-megatron-before-train-step-hook-path",), SUPPORTED),
    Point(22, ("--custom-megatron-post-save-hook-path",), SUPPORTED, "with `--save`"),
    Point(23, ("--custom-model-provider-path",), SUPPORTED, "for a model that is built here and changed"),
    Point(24, ("--spec",), TAKEN, "The files of Miles's own families (`miles_plugins.models.*`, "
          "`slime_plugins.models.*`) are taken: the model type of config.json decides on the layers."),
    Point(25, ("--custom-rollout-log-function-path",), SUPPORTED),
    Point(26, ("--custom-eval-rollout-log-function-path",), SUPPORTED),
    Point(27, ("--custom-update-weight-post-write-path",), SUPPORTED, "with `--weight-sync disk` or `disk-delta`"),
    Point(28, ("--sglang-custom-pull-weights-pre-read-hook",), NOT_HERE),
    Point(29, ("--session-message-matcher",), TAKEN, "Its three names, or a function `same(old, new) -> bool`."),
    Point(30, ("--session-sample-picker-path",), SUPPORTED, "several samples with `--agent-conversations`"),
    Point(31, ("--session-sample-postprocessor-path",), SUPPORTED),
    Point(32, ("--multi-lora-backend-path",), NOT_HERE),
    Point(33, ("--multi-lora-http-server-path",), NOT_HERE),
    Point(34, ("parse_args(add_custom_arguments=...)",), TAKEN, "Options that a function declares by its "
          "`add_arguments(parser)` are attributes of `args` with their defaults, and `--custom-config-path` sets them; "
          "flags are a plugin's: fields of a dataclass."),
    Point(35, ("--custom-config-path",), TAKEN, "Its keys are attributes of `args`; one that is an option of the run "
          "is that option, too."),
    Point(36, ("--eval-config",), TAKEN, "Its YAML file is read as the tables [[eval.datasets]] of a run file."),
    Point(None, ("--custom-advantage-function-path",), SUPPORTED, "with `--advantage-estimator custom`"),
    Point(None, ("--rollout-sample-hook-path",), SUPPORTED, "several, one after the other"),
)


def table() -> list[str]:
    """Rows of Markdown: all points."""
    rows = ["| | Miles | | here |", "|---|---|---|---|"]
    for point in POINTS:
        names = ", ".join(f"`{name}`" for name in point.names)
        rows.append(f"| {point.number or 'slime'} | {names} | {point.status} | {said(point).replace('|', '/')} |")
    return rows


def counts() -> list[str]:
    """A sentence: how many of Miles's points carry over."""
    by_status = Counter(point.status for point in POINTS if point.number)
    works = by_status[SUPPORTED] + by_status[TAKEN]
    return [f"Of the {sum(by_status.values())} points of Miles's documentation {works} carry over: of "
            f"{by_status[SUPPORTED]} the functions are called, of {by_status[TAKEN]} the file or value is taken; "
            f"{by_status[REPLACED]} are replaced by something else, and {by_status[NOT_HERE]} are not here."]


def options() -> list[str]:
    """Rows of Markdown: what this plugin calls, and how."""
    from miles_compat.paths import HOOKED, SHAPES

    rows = ["| option | called as | by the hook |", "|---|---|---|"]
    texts = {name: f"`{shape.text}`" for name, shape in SHAPES.items()} | {
        "generate_tool_specs_path": "a list of tools in OpenAI's form", "rollout_sample_hook_path": f"`{HOOKED}`"}
    return rows + [f"| `{name}` | {text} | {', '.join(f'`{hook}`' for hook in HOOKS[name])} |"
                   for name, text in texts.items()]


def said(point: Point) -> str:
    """What there is in its place."""
    if point.status == SUPPORTED:
        return f"`{point.option}`" + (f", {point.more}" if point.more else "")
    return point.more or advice(point.names[0])


def advice(flag: str) -> str:
    """What `miles run` says of a flag that it does not take.

    Raises:
        KeyError: there is no such flag in the lists, or it is taken.
    """
    from miles_flags.table import refusal
    from miles_megatron.flags import megatron_lm_flags

    return refusal(flag) or megatron_lm_flags()[flag].text
