"""The README's example is a run: it plans, and its rows are GSM8K's."""

import re
from pathlib import Path

from formats import write

from miles_core.plugins.plan import prepare

README = Path(__file__).parents[1] / "README.md"
ROWS = [{"question": f"What is 6*{n}?", "answer": f"It is 6*{n} = <<6*{n}={6 * n}>>{6 * n}.\n#### {6 * n}"}
        for n in range(64)]


def test_the_example_plans_and_its_labels_are_numbers(read, tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "hub/datasets--openai--gsm8k"
    for split in ("train", "test"):
        write(home / f"snapshots/{'0' * 40}/main/{split}-00000-of-00001.parquet", ROWS)
    (home / f"snapshots/{'0' * 40}/README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n"
        "  - split: test\n    path: main/test-*\n---\n")
    (home / "refs").mkdir()
    (home / "refs/main").write_text("0" * 40)
    [text] = re.findall(r"```toml\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "gsm8k.toml").write_text(text)
    made = prepare(tmp_path / "gsm8k.toml", ["--plan-without-weights"])
    assert ("read_rows", "dataset", "datasets") in {(one.hook, one.name, one.plugin) for one in made.choices}
    assert any("evaluation prompts are trained on" in note for note in made.notes), "the rows were looked at"
    rollout, options = made.config.rollout, made.config.options["datasets"]
    rows = read(rollout.prompt_data, label_key=rollout.label_key, **options)
    assert [row[rollout.label_key] for row in rows] == [str(6 * n) for n in range(64)]
