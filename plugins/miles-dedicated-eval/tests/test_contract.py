from miles_testing import plugin_contract

TestContract = plugin_contract("dedicated-eval")
