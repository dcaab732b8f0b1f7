from miles_testing import plugin_contract

TestContract = plugin_contract("wandb", without=("begin",))  # test_wandb.py opens runs
