from miles_core.testing import plugin_contract

TestContract = plugin_contract("sglang")
