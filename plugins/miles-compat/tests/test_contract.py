from pathlib import Path

from miles_core.testing import plugin_contract

FILE = f"{Path(__file__).with_name('contract_functions.py')}:"

TestContract = plugin_contract("compat", flags=[
    "--custom-rm-path", FILE + "reward", "--buffer-filter-path", FILE + "select",
    "--custom-reward-post-process-path", FILE + "post_process", "--rewards-normalization",
    "--custom-advantage-function-path", FILE + "advantage", "--loss-type", "custom_loss",
    "--custom-loss-function-path", FILE + "loss", "--reduction", "custom",
    "--custom-pg-loss-reducer-function-path", FILE + "reducer"])  # fmt: skip
