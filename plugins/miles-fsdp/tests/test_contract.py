from miles_testing import plugin_contract, trainer_contract

OPTIONS = {"perf.trainer": "fsdp"}

TestContract = plugin_contract("fsdp", options=OPTIONS)


def test_the_trainer_keeps_its_contract():
    trainer_contract("fsdp", plugins=["fsdp"], options=OPTIONS)
