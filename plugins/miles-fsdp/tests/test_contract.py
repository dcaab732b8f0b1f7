import pytest
from miles_testing import plugin_contract, trainer_contract

OPTIONS = {"perf.trainer": "fsdp"}

TestContract = plugin_contract("fsdp", options=OPTIONS)


@pytest.mark.parametrize("beside", [False, True], ids=["sync", "async"])
def test_the_trainer_keeps_its_contract(beside):
    trainer_contract("fsdp", plugins=["fsdp"], options=OPTIONS | {"checkpoint.async_save": beside})
