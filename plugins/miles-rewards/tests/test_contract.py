from miles_testing import plugin_contract

SCORERS = ["deepscaler", "gemma_math", "dapo", "boxed_dapo", "f1", "boxed_f1", "gpqa", "boxed_gpqa", "random",
           "deterministic_random"]  # fmt: skip

TestContract = plugin_contract("rewards", options={"rollout.rm_type": SCORERS},
                               without=["reward:ifbench", "reward:boxed_ifbench"])  # test_rewards_plugin.py calls them
