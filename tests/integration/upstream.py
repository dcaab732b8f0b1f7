"""Example functions of Miles and slime that a test runs unmodified, each in a whole run of a tiny model.

    python tests/integration/upstream.py docs/coming-from-miles.md     writes the page's table of them anew
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).with_name("upstream.json")

EXPERIMENTAL = "examples.experimental"


@dataclass(frozen=True)
class Example:
    """Functions of one example.

    Args:
        folder: on PYTHONPATH, below the checkout; the checkout's `examples` is always found.
        flags: which name them, as the example's launch script does.
        row: of the data; the key prompt may be text.
        search: a search service has to listen on port 8000, which the test starts.
        needs: modules that it imports and that nothing here brings.
    """

    repository: str
    name: str
    flags: tuple[str, ...]
    folder: str = ""
    row: str = "{}"
    search: bool = False
    needs: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.repository}: {self.name}"


MILES, SLIME = "radixark/miles", "THUDM/slime"
LABELLED = json.dumps({"label": {"ground_truth": {"target": ["Paris"]}}})
SEARCH = ("--custom-generate-function-path", "generate_with_search.generate", "--custom-rm-path",
          "generate_with_search.reward_func", "--no-apply-chat-template")
FILTERS = "rollout.filter_hub.dynamic_sampling_filters"
MIS = "train_infer_mismatch_helper"
DISTILL = "examples.on_policy_distillation.qwen3_5_35b_selfdistill.rm"
TOOLS = "examples.retool_v2.tool_sandbox"

EXAMPLES = (
    Example(MILES, "retool_v2: tools, their execution, reward", (
        "--custom-generate-function-path", "miles.rollout.generate_hub.multi_turn.generate",
        "--generate-tool-specs-path", f"{TOOLS}.tool_specs", "--generate-execute-tool-function-path",
        f"{TOOLS}.execute_tool", "--generate-tool-call-parser", "qwen25", "--custom-rm-path", f"{TOOLS}.reward_func")),
    Example(SLIME, "retool: generate, reward", (
        "--custom-generate-function-path", "generate_with_retool.generate", "--custom-rm-path",
        "generate_with_retool.reward_func", "--no-apply-chat-template"), "examples/retool"),
    Example(MILES, "search-r1: generate, reward", SEARCH, "examples/experimental/search-r1", LABELLED, True),
    Example(SLIME, "search-r1: generate, reward", SEARCH, "examples/search-r1", LABELLED, True),
    Example(MILES, "multi_agent: generate", (
        "--custom-generate-function-path",
        f"{EXPERIMENTAL}.multi_agent.rollout_with_multi_agents.generate_with_multi_agents", "--rm-type", "random")),
    Example(SLIME, "multi_agent: generate", (
        "--custom-generate-function-path", "examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents",
        "--rm-type", "random")),
    Example(MILES, f"{MIS}: correction, its settings", (
        "--use-tis", "--custom-config-path", f"examples/infra_features/{MIS}/mis.yaml", "--custom-tis-function-path",
        f"examples.infra_features.{MIS}.mis.compute_mis_weights_with_cp")),
    Example(SLIME, f"{MIS}: correction, its settings", (
        "--use-tis", "--custom-config-path", f"examples/{MIS}/mis.yaml", "--custom-tis-function-path",
        f"examples.{MIS}.mis.compute_mis_weights_with_cp")),
    Example(MILES, "DrGRPO: reducer", (
        "--reduction", "custom", "--custom-pg-loss-reducer-function-path",
        f"{EXPERIMENTAL}.DrGRPO.custom_reducer:get_pg_loss_reducer")),
    Example(MILES, "geo3k_vlm: generate, on text", (
        "--custom-generate-function-path", "examples.geo3k_vlm.rollout.generate")),
    Example(MILES, "selfdistill: reward", ("--custom-rm-path", f"{DISTILL}.reward_func")),
    Example(MILES, "selfdistill: reward of pure distillation", ("--custom-rm-path", f"{DISTILL}.reward_func_pure_opd")),
    Example(MILES, "over-sampling with check_no_aborted", (
        "--over-sampling-batch-size", "6", "--dynamic-sampling-filter-path", f"miles.{FILTERS}.check_no_aborted")),
    Example(SLIME, "over-sampling with check_reward_nonzero_std", (
        "--over-sampling-batch-size", "6", "--dynamic-sampling-filter-path",
        f"slime.{FILTERS}.check_reward_nonzero_std")),
    Example(MILES, "partial rollout with pop_first of the data source", (
        "--partial-rollout", "--over-sampling-batch-size", "6", "--dynamic-sampling-filter-path",
        f"miles.{FILTERS}.check_reward_nonzero_std", "--buffer-filter-path", "miles.rollout.data_source.pop_first")),
    Example(MILES, "generate_hub.single_turn", (
        "--custom-generate-function-path", "miles.rollout.generate_hub.single_turn.generate")),
    Example(MILES, "strands_sglang: generate, reward", (
        "--custom-generate-function-path", f"{EXPERIMENTAL}.strands_sglang.generate_with_strands.generate",
        "--custom-rm-path", f"{EXPERIMENTAL}.strands_sglang.generate_with_strands.reward_func",
        "--no-apply-chat-template"), needs=("camel", "strands", "strands_sglang")),
)

SERVICES = (
    ("tau-bench, of both", "a user whom another model plays, behind an API key"),
    ("eval, fully_async/external_eval_fn", "an evaluation service, and servers of its own"),
    ("formal_math", "a server of the prover Lean"),
    ("swe-agent-harbor-docker, coding_agent_rl, openenv, hud, nemo-gym, verifiers", "sandboxes or environments of a "
     "service"),
    ("strands_sglang, of slime", "the packages of the other, and servers that it asks by an HTTP client of its own"),
    ("geo3k_vlm_multi_turn, of both", "images"),
    ("fully_async, of slime", "a worker that samples between rollouts: `--max-lag` does that"),
    ("random_async", "a vocabulary of 151,643 tokens, contexts of 60,000, and a worker that samples between rollouts"),
)
"""Examples that no test here runs, and what they need."""

PART = re.compile(r"(<!-- upstream examples -->\n).*?(<!-- end of upstream examples -->)", re.DOTALL)


def page(text: str) -> str:
    """A page with its table of examples as it should be."""
    return PART.sub(lambda part: f"{part[1]}{chr(10).join(table())}\n{part[2]}", text)


def table() -> list[str]:
    """Which examples ran when they were last run, by RESULTS."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    commits = ", ".join(f"{name} {commit[:7]}" for name, commit in results["commits"].items())
    ran = sum(word == "runs" for word in results["examples"].values())
    lines = [f"{ran} of {len(EXAMPLES)} run ({commits}).", "", "| example | |", "|---|---|"]
    lines += [f"| {one.id} | {results['examples'].get(one.id, 'not run yet')} |" for one in EXAMPLES]
    return [*lines, "", "| not run here | needs |", "|---|---|", *(f"| {name} | {needs} |" for name, needs in SERVICES)]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(page(Path(name).read_text(encoding="utf-8")), encoding="utf-8")
