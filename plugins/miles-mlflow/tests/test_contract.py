from miles_testing import plugin_contract

TestContract = plugin_contract("mlflow", without=("begin",))  # test_mlflow.py opens runs
