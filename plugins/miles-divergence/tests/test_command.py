"""`miles diff --across`: what it prints, its exit codes, and what it refuses."""

import json

import pytest
from click.testing import CliRunner

from miles_core.cli import cli
from miles_core.errors import MilesError
from miles_core.record.replay import save_batch

pytestmark = pytest.mark.xdist_group("divergence")


@pytest.fixture
def diff(sides, tmp_path):
    """(flags of side B, *more) -> (exit code, output)."""
    batch = save_batch(str(tmp_path / "saved-{rollout_id}"), sides.batch)

    def call(flags, *more, model="Qwen3", batch=batch):
        argv = ["diff", str(sides.run_file(model)), "--across", flags, *more]
        argv += ["--batch", str(batch)] if batch else []
        result = CliRunner().invoke(cli, argv, catch_exceptions=True)
        if isinstance(result.exception, MilesError):
            raise result.exception
        return result.exit_code, result.output

    return call


def test_json_has_every_tensor_and_the_verdict(sides, diff):
    code, output = diff(f"--trainer fsdp --plugin {sides.defects} --defects.plant projection-stale", "--json")
    verdict = json.loads(output)
    assert code == 1 == verdict["exit_code"]
    assert verdict["modules"] == ["model.layers.2.self_attn.o_proj"]
    assert verdict["weights"] == ["model.layers.2.self_attn.o_proj.weight"]
    assert verdict["first"]["what"] == "output" and verdict["first"] in verdict["rows"]


@pytest.mark.full
def test_the_table_shows_the_first_and_what_is_around_it(sides, diff):
    code, output = diff(f"--trainer fsdp --plugin {sides.defects} --defects.plant rope-base")
    assert code == 1 and "first divergence: model.layers.0.self_attn" in output
    assert "model.layers.0.self_attn.v_proj" in output and "model.layers.3" not in output


@pytest.mark.full
def test_equal_sides_exit_with_0(diff):
    code, output = diff("--trainer fsdp", "--b-on-cpu", "--both", "--lr 1e-4")
    assert code == 0 and "the same but for rounding" in output


def test_without_a_batch_it_says_how_to_record_one(diff):
    with pytest.raises(MilesError) as error:
        diff("--trainer fsdp", batch=None)
    assert error.value.code == "across-without-batch" and "--save-debug-rollout-data" in error.value.fix


def test_a_side_that_is_refused_is_refused_before_anything_computes(diff):
    with pytest.raises(MilesError) as error:
        diff("--trainer fsdp --tensor-model-parallel-size 2")
    assert error.value.code == "fsdp-megatron-options"


@pytest.mark.full
def test_models_of_other_sizes_are_no_sides(sides, diff):
    with pytest.raises(MilesError) as error:
        diff(f"--hf-checkpoint {sides.run_file('Llama 2').parent}", model="Llama 3")
    assert error.value.code == "across-sizes-differ" and "k_proj" in error.value.who
