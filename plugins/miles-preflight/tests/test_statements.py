"""What the words of manifests' `provides` ask of a run: estimators that compare, scorers, labels, folders."""

import json

import pytest

from miles_core.errors import ConfigError, DataError
from miles_core.plugins import bind


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline"])
def test_one_answer_has_nothing_to_be_compared_with(plan, estimator):
    with pytest.raises(ConfigError, match=f"{estimator} compares the answers to one prompt"):
        plan("--advantage-estimator", estimator, "--n-samples-per-prompt", 1)
    plan("--advantage-estimator", estimator, "--n-samples-per-prompt", 2)


@pytest.mark.parametrize("flags", [
    ("--advantage-estimator", "reinforce_plus_plus"), ("--disable-rewards-normalization",),
    ("--num-rollout", 0, "--save", "x"),
    ("--debug-rollout-only",), ("--use-opd", "--opd-teacher-load", "x"),
])
def test_where_nothing_is_compared_one_answer_is_enough(plan, flags):
    changes = {'"grpo"': ""} if flags[0] == "--advantage-estimator" else {}
    plan(*flags, "--n-samples-per-prompt", 1, **changes)


def test_answers_are_scored_and_labels_are_read(plan, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"input": "1+1=", "label": "2"}) + "\n")
    data, nobody = ("--prompt-data", path), {'rm_type = ["math"]': ""}
    with pytest.raises(ConfigError, match="nobody scores the answers"):
        plan(*data, **nobody)
    with pytest.raises(ConfigError, match="'math' compares with labels, and none are read"):
        plan(*data)
    plan(*data, "--label-key", "label")
    plan(*data, "--rm-type", "format")
    plan(**nobody)  # the prompts are elsewhere: a plan, not yet a run


@pytest.mark.parametrize("flags", [
    ("--rm-url", "reward.py"), ("--rm-url", "http://a/b"), ("--rm-type", "remote_rm"), ("--rm-type", "custom"),
    ("--loss-type", "custom_loss"), ("--plugin", "ppo"), ("--lora-dropout", "0.1"),
    ("--plugin", "dapo-filter", "--n-samples-per-prompt", 1, "--disable-rewards-normalization"),
    ("--plugin", "sft", "--loss-type", "sft_loss"), ("--use-tis", "--tis-clip", "0.9"),
    ("--use-rollout-routing-replay", "--engine", "sglang", "--no-sglang-enable-return-routed-experts"),
])
def test_plugins_refuse_when_they_are_made(plan, flags):
    """That is with the plan, of those that have a hook of it, and before anything is loaded of the others."""
    with pytest.raises(ConfigError) as caught:
        made = plan(*flags)
        bind.bind(made.selected, made.config, "driver")
    assert caught.value.who and caught.value.fix


def test_an_eval_dataset_may_have_a_scorer_of_its_own(plan, tmp_path):
    """It enables its plugin, and only its own rows need what it compares with."""
    train, held_out = tmp_path / "train.jsonl", tmp_path / "choices.jsonl"
    train.write_text(json.dumps({"input": "1+1=", "label": "2"}) + "\n")
    held_out.write_text("".join(json.dumps({"input": "A or B?", "label": label}) + "\n" for label in ("", "B")))
    table = f'[eval]\neval_interval = 1\n[[eval.datasets]]\nname = "a"\npath = "{held_out}"\n'

    def planned(own):
        return plan("--prompt-data", train, "--label-key", "label", "--n-samples-per-prompt", 4,
                    **{"[optimizer]": f"{table}{own}\n[optimizer]"})

    with pytest.raises(DataError, match="'math' needs the answer of every row"):
        planned("")
    with pytest.raises(DataError, match="'f1' needs the answer of every row"):
        planned('rm_type = "f1"')
    made = planned('rm_type = "gpqa"')
    assert "rewards" in {one.manifest.name for one in made.selected}
    assert ("reward", "gpqa") in {(choice.hook, choice.name) for choice in made.choices}


SIZES = {"vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4,
         "num_experts_per_token": 2, "moe_intermediate_size": 32, "layer_group_size": 2}  # fmt: skip
OLMO, LING = {"model_type": "olmo3", **SIZES}, {"model_type": "bailing_hybrid", **SIZES}
MISTRAL = {"model_type": "mistral3", "text_config": {"model_type": "mistral4", **SIZES}}
SERVERS = ("--engine", "sglang")


@pytest.mark.parametrize(("release", "keys", "flags", "oldest"), [
    ("5.12.1", OLMO, (), "5.13"),
    ("5.13.0", OLMO, (), None),
    ("5.12.1", OLMO, SERVERS, None),
    ("5.12.1", OLMO, ("--generate", "sft", "--loss-type", "sft_loss", "--n-samples-per-prompt", "1"), None),
    ("5.12.1", OLMO, (*SERVERS, "--trainer", "fsdp"), "5.13"),
    ("5.14.1", MISTRAL, (), "5.15"),
    ("5.15.0", MISTRAL, (), None),
    ("5.19.0", LING, SERVERS, "5.20"),
    ("5.20.0", LING, SERVERS, None),
])
def test_a_transformers_that_would_compute_another_model_is_refused(release, keys, flags, oldest, plan, tmp_path,
                                                                    monkeypatch):
    """Where the run leaves the model to it; the trainer megatron and servers have their own. Families that the run does
    not enable, as the trainer fsdp needs none, say so as well."""
    folder, metadata = tmp_path / "model", tmp_path / "site" / f"transformers-{release}.dist-info"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(keys))
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {release}\n")
    monkeypatch.syspath_prepend(metadata.parent)
    changes = {"num_layers = 2": ""} if "fsdp" in flags else {}
    if oldest is None:
        plan("--hf-checkpoint", folder, *flags, **changes)
        return
    with pytest.raises(ConfigError) as caught:
        plan("--hf-checkpoint", folder, *flags, **changes)
    assert caught.value.code == "transformers-too-old" and caught.value.got == release
    assert str(folder) in caught.value.who and f"transformers>={oldest}" in caught.value.fix
