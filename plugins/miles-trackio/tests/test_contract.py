from miles_testing import plugin_contract

TestContract = plugin_contract("trackio", without=("begin",))  # test_trackio.py opens runs
