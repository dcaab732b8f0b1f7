from miles_testing import plugin_contract

TestContract = plugin_contract("verifiers", without=["generate:verifiers", "read_rows:verifiers"])
