from pathlib import Path

from miles_testing import plugin_contract

FILE = f"{Path(__file__).with_name('contract_functions.py')}:"

TestContract = plugin_contract("compat", flags=[
    "--custom-rm-path", FILE + "reward", "--buffer-filter-path", FILE + "select",
    "--dynamic-sampling-filter-path", FILE + "keep", "--rollout-sample-filter-path", FILE + "mark",
    "--rollout-all-samples-process-path", FILE + "process", "--custom-rollout-log-function-path", FILE + "log",
    "--custom-eval-rollout-log-function-path", FILE + "eval_log",
    "--rollout-data-postprocess-path", FILE + "postprocess",
    "--custom-reward-post-process-path", FILE + "post_process", "--rewards-normalization",
    "--custom-advantage-function-path", FILE + "advantage", "--loss-type", "custom_loss",
    "--custom-loss-function-path", FILE + "loss", "--reduction", "custom",
    "--custom-pg-loss-reducer-function-path", FILE + "reducer"])  # fmt: skip
