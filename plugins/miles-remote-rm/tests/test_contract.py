from miles_testing import plugin_contract

TestContract = plugin_contract(
    "remote-rm", options={"rm_url": "http://127.0.0.1:9/", "rm_check": False}, without=["reward"])  # fmt: skip
