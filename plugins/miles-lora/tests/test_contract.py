from miles_testing import plugin_contract

TestContract = plugin_contract("lora", options={"lora_rank": 2})
