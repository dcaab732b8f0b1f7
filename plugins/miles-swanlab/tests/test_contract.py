from miles_testing import plugin_contract

TestContract = plugin_contract("swanlab", without=("begin",))  # test_swanlab.py opens runs
