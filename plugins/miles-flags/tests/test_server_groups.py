"""--sglang-config of Miles: groups of one model are sizes, and what would make two kinds of answers is refused."""

import pytest
import yaml
from miles_flags.server_groups import sizes_of

from miles_core.config.flags import Given
from miles_core.errors import ConfigError, DataError

GROUPS = [{"worker_type": "prefill", "num_gpus": 8, "num_gpus_per_engine": 8, "overrides": {"dp_size": 8}},
          {"worker_type": "decode", "num_gpus": 24, "num_gpus_per_engine": 8}]


def given(tmp_path, document):
    path = tmp_path / "servers.yaml"
    path.write_text(yaml.safe_dump(document))
    return Given("--sglang-config", (str(path),))


def test_prefill_and_decode_of_one_model_are_engines_that_do_both(tmp_path):
    notes = []
    sizes = sizes_of(given(tmp_path, {"sglang": [{"name": "default", "server_groups": GROUPS}]}), notes)
    assert sizes == {"perf.rollout_num_gpus": 32, "perf.rollout_num_gpus_per_engine": 8}
    assert len(notes) == 1 and "not used" in notes[0]


@pytest.mark.parametrize("models", [
    [{"server_groups": GROUPS}, {"server_groups": GROUPS}], [{"model_path": "m", "server_groups": GROUPS}],
    [{"update_weights": False, "server_groups": GROUPS}], [{"server_groups": [GROUPS[0], {"num_gpus": 4}]}],
    [{"server_groups": GROUPS}, *[{"update_weights": False, "model_path": "m", "server_groups": GROUPS[1:]}] * 2],
    [{"server_groups": [GROUPS[0], GROUPS[1] | {"overrides": {"kv_cache_dtype": "fp8_e4m3"}}]}],
    [{"server_groups": [GROUPS[1] | {"worker_type": "encoder"}]}],
], ids=["two", "another", "frozen", "unequal", "two rewards", "precision", "kind"])
def test_what_would_answer_differently_is_refused(tmp_path, models):
    with pytest.raises(ConfigError) as caught:
        sizes_of(given(tmp_path, {"sglang": models}), [])
    assert "--sglang-config" in caught.value.who


def test_what_all_groups_override_alike_is_the_run_s(tmp_path):
    alike = [group | {"overrides": {"context_length": 64, "dp_size": size}} for size, group in enumerate(GROUPS)]
    notes = []
    sizes = sizes_of(given(tmp_path, {"sglang": [{"server_groups": alike}]}), notes)
    assert sizes == {"perf.rollout_num_gpus": 32, "perf.rollout_num_gpus_per_engine": 8, "server.context_length": 64}
    assert "context_length" in notes[0]


def test_a_model_that_is_never_updated_is_the_reward_model(tmp_path):
    reward = {"name": "reward", "model_path": "rm", "update_weights": False, "options": {"class_index": 1},
              "server_groups": [{"num_gpus": 2, "num_gpus_per_engine": 1, "overrides": {"mem_fraction_static": 0.5}}]}
    sizes = sizes_of(given(tmp_path, {"sglang": [{"server_groups": GROUPS}, reward]}), [])
    assert sizes == {
        "perf.rollout_num_gpus": 32, "perf.rollout_num_gpus_per_engine": 8, "reward-model.reward_model_path": "rm",
        "reward-model.reward_num_gpus": 2, "reward-model.reward_num_gpus_per_engine": 1,
        "reward-model.server_args": ["--mem-fraction-static", "0.5"], "reward-model.class_index": 1}


def test_a_reward_group_without_a_model_is_refused(tmp_path):
    judge = {"name": "judge", "update_weights": False, "server_groups": GROUPS[1:]}
    with pytest.raises(ConfigError) as caught:
        sizes_of(given(tmp_path, {"sglang": [{"server_groups": GROUPS}, judge]}), [])
    assert caught.value.code == "reward-group-without-model" and caught.value.got == "judge"


@pytest.mark.parametrize("document", ["text", {"sglang": [{"server_groups": [{}]}]}, {}])
def test_a_file_that_says_something_else(tmp_path, document):
    with pytest.raises(DataError):
        sizes_of(given(tmp_path, document), [])
