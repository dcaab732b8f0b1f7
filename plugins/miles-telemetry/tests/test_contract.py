from miles_testing import plugin_contract

TestContract = plugin_contract("telemetry", options={"port": 0})
