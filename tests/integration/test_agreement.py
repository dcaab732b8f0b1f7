"""Whole runs: engine and trainer agree on every token, first ratio and KL are exact, weights arrive intact."""

import pytest
from miles_testing.forked import miles
from safetensors.numpy import load_file

from miles_core.record.events import read


def go(argv, folder):
    outcome = miles(["run", *argv, "--no-live", "--run-dir", "runs/a"], folder)
    assert outcome.code == 0, outcome.err
    return list(read(folder / "runs/a/events.jsonl"))


@pytest.mark.parametrize(("family", "coefficient"), [
    pytest.param("qwen3", "0", marks=pytest.mark.full), ("qwen3", "0.1"),
    pytest.param("qwen3_moe", "0.1", marks=pytest.mark.full)])
def test_log_probs_ratio_and_kl_of_a_run(run_file, tmp_path, family, coefficient):
    """Each rollout has one step, so its first ratio is 1; the reference is the initial policy, so its first KL is 0."""
    events = go([run_file(family), "--use-kl-loss", "--kl-loss-coef", coefficient], tmp_path)
    metrics = [event["metrics"] for event in events if event["event"] == "metrics"]
    assert len(metrics) == 3
    for one in metrics:
        assert 0 <= one["train/train_rollout_logprob_abs_diff_max"] <= 1e-5
        assert one["train/train_rollout_logprob_abs_diff"] <= 1e-5
        assert one["train/ppo_kl"] == 0.0 and one["train/pg_clipfrac"] == 0.0
    assert metrics[0]["train/kl_loss"] == 0.0
    assert metrics[1]["train/kl_loss"] != 0.0 and metrics[2]["train/kl_loss"] != 0.0
    print(family, "max |trainer - engine|", [one["train/train_rollout_logprob_abs_diff_max"] for one in metrics])


def test_one_weight_sync_before_the_first_rollout_and_one_after_each(run_file, tmp_path):
    order = [(event["event"], event.get("version", event.get("rollout_id")))
             for event in go([run_file()], tmp_path) if event["event"] in ("weight_sync", "metrics")]
    assert order == [("weight_sync", 1)] + [one for i in range(3) for one in (("weight_sync", i + 2), ("metrics", i))]


WATCHED = '''
"""The local engine, writing down its weights before the first sync and after each."""
from miles_core import hookimpl


class Watched:
    """Offers the engine "watched"."""

    @hookimpl("engine", name="watched")
    def watched(self, config, tokenizer):
        from pathlib import Path

        import torch
        from safetensors.torch import save_file

        from miles_local.engine import LocalEngine

        class Engine(LocalEngine):
            def dump(self):
                tensors = {name: place.clone().contiguous() for name, (place, _) in self._weights.slots().items()}
                save_file(tensors, f"engine_{self.version}.safetensors")

            async def update_weights(self, weights, version):
                if version == 1:
                    self.dump()
                await super().update_weights(weights, version)
                self.dump()

        return Engine(Path(config.checkpoint.hf_checkpoint), dtype=torch.float32, tokenizer=tokenizer,
                      max_context=config.rollout.rollout_max_context_len, random_init=True)
'''


@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.full)])
def test_the_engine_starts_from_random_weights_and_then_has_the_trainers_bits(run_file, tiny, tmp_path, family):
    """Nothing of the engine's own weights is left, and each sync brings what the trainer exports, bit for bit."""
    (tmp_path / "watched.py").write_text(WATCHED)
    go([run_file(family), "--plugin", tmp_path / "watched.py", "--engine", "watched", "--num-rollout", "2", "--save",
        "ck", "--save-interval", "1", "--save-hf", "hf_{rollout_id}"], tmp_path)
    engine = {version: load_file(tmp_path / f"engine_{version}.safetensors") for version in range(4)}
    exported = [load_file(path / "model.safetensors") for path in (tiny / family, tmp_path / "hf_1", tmp_path / "hf_2")]
    for version, trained in enumerate(exported, 1):
        assert engine[version].keys() == trained.keys()
        for name, tensor in trained.items():  # the engine repeats the norms of q and k for each head
            assert (engine[version][name] == tensor).all(), f"version {version}, {name}"
    matrices = [name for name, tensor in exported[0].items() if tensor.ndim > 1]
    assert all((engine[0][name] != exported[0][name]).mean() > 0.99 for name in matrices), "started from the checkpoint"
    assert all((exported[0][name] != exported[2][name]).any() for name in matrices), "nothing was trained"
