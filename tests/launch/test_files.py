"""The other files of launch/ have keys of SkyPilot and KubeRay, commands that are planned, and an image with what
constraints/gpu.txt and docs/install-gpu.md say."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from miles_core.plugins.plan import prepare
from tests.pages import blocks

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
PINS = dict(line.split("==") for line in (ROOT / "constraints/gpu.txt").read_text().splitlines()
            if line and not line.startswith("#"))
IMAGE = "registry.example.com/miles:gpu"
SKY = {"name", "workdir", "num_nodes", "resources", "file_mounts", "envs", "secrets", "setup", "run"}
"""Keys of a SkyPilot task, as its schema of tasks has them."""
JOB = {"entrypoint", "activeDeadlineSeconds", "backoffLimit", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished",
       "rayClusterSpec", "submissionMode", "runtimeEnvYAML", "suspend"}
"""Keys of a RayJob's spec."""
GROUP = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}


def read(name: str) -> dict:
    return yaml.safe_load((LAUNCH / name).read_text(encoding="utf-8"))


def planned(words: list[str], folder: Path):
    """The configuration of a `miles run` whose /shared is this folder, with a recipe for nodes of eight GPUs."""
    assert words[:2] == ["miles", "run"]
    recipe = (ROOT / "recipes/large/dapo-math-qwen3-4b.toml").read_text(encoding="utf-8")
    model = folder / "models/Qwen3-4B"
    shutil.copytree(ROOT / "examples/arithmetic/tiny-qwen3", model)
    constants = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(constants | {"max_position_embeddings": 40960}))
    shutil.copytree(ROOT / "examples/arithmetic", folder / "data", ignore=lambda *_: ["tiny-qwen3-moe-128"])
    for old, new in (("models/", f"{folder}/models/"), ("data/dapo-math-17k.jsonl", f"{folder}/data/train.jsonl")):
        assert old in recipe
        recipe = recipe.replace(old, new)
    (folder / "recipe.toml").write_text(recipe)
    file, *flags = [word.replace("/shared", str(folder)) for word in words[2:]]
    return prepare(Path(file), [*flags, "--plan-without-weights"]).config


def test_the_task_of_skypilot_has_its_keys_and_plans(tmp_path):
    task = read("skypilot.yaml")
    assert task.keys() <= SKY and task["resources"].keys() <= {"accelerators", "image_id", "disk_size"}
    assert task["resources"]["image_id"] == f"docker:{IMAGE}" and task["secrets"] == {"RAY_AUTH_TOKEN": None}
    [command] = re.findall(r"^ *(miles run .*)$", task["run"], re.MULTILINE)
    line = command.replace("$MILES_RUN", task["envs"]["MILES_RUN"]).replace("$head:$port", "10.0.0.1:6379")
    perf = planned(shlex.split(line), tmp_path).perf
    assert (perf.placement, perf.ray_address) == ("ray", "10.0.0.1:6379")
    gpus = int(task["resources"]["accelerators"].partition(":")[2])
    assert (perf.actor_num_nodes, perf.actor_num_gpus_per_node) == (task["num_nodes"], gpus)


def test_the_script_of_skypilot_is_one(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/bash\n" + read("skypilot.yaml")["run"])
    for command in (["bash", "-n"], [Path(sys.executable).with_name("shellcheck"), "--severity=warning"]):
        subprocess.run([*command, script], check=True, timeout=60)


def test_the_job_of_kuberay_has_its_keys_and_plans(tmp_path):
    job = read("kuberay.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob") and job["spec"].keys() <= JOB
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster.keys() <= {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
    assert cluster["rayVersion"] == PINS["ray"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head.keys() <= GROUP and workers.keys() <= GROUP
    for group in (head, workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        assert container["image"] == IMAGE
        assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    config = planned(shlex.split(job["spec"]["entrypoint"]), tmp_path)
    gpus = int(workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert config.perf.placement == "ray" and config.perf.ray_address is None
    assert (config.perf.actor_num_nodes, config.perf.actor_num_gpus_per_node) == (workers["replicas"], gpus)
    assert config.checkpoint.load == config.checkpoint.save, "a second try would begin again"


def requirements(text: str) -> list[str]:
    """What the pip commands of a text install, without options."""
    text = re.sub(r"\\\n\s*", " ", text)
    found = []
    for command in re.findall(r"pip install ([^\n]*)", text):
        command = re.sub(r"\$\(for p in plugins/miles-\*; do echo \"-e ./\$p\"; done\)", "", command.partition("&&")[0])
        words = iter(shlex.split(command))
        found += [word for word in words if word not in ("-e", "--no-build-isolation") and not (
            word == "-c" and next(words) == "constraints/gpu.txt")]
    return found


def test_the_image_installs_what_the_page_says_and_all_of_it_has_a_version():
    text = (LAUNCH / "Dockerfile").read_text(encoding="utf-8")
    installed = requirements(text)
    page = requirements("".join(block.text for block in blocks(ROOT / "docs/install-gpu.md") if "-e" in block.text or
                                "pip install -c constraints/gpu.txt torch" in block.text))
    assert set(page) - {"miles[gpu]"} <= set(installed)
    for word in installed:
        if not word.startswith("."):
            name = Requirement(word).name
            assert name in PINS or name in ("setuptools", "wheel", "ninja", "pybind11"), f"{word} has no version"
    commands = [line for line in re.sub(r"\\\n\s*", " ", text).splitlines() if "pip install" in line]
    assert all("-c constraints/gpu.txt" in line for line in commands) and len(commands) == 4
    cuda = re.search(r"^FROM nvidia/cuda:([\d.]+)-cudnn-devel-ubuntu24\.04$", text, re.MULTILINE)[1]
    stated = (ROOT / "constraints/gpu.txt").read_text(encoding="utf-8").splitlines()[0]
    assert f"CUDA {cuda.rpartition('.')[0]}" in stated and "Python 3.12" in stated and "python3.12-venv" in text


@pytest.mark.parametrize("path", sorted(LAUNCH.iterdir()), ids=lambda path: path.name)
def test_every_file_is_on_the_page(path):
    page = (ROOT / "docs/clusters.md").read_text(encoding="utf-8")
    assert f"launch/{path.name.removesuffix('.dockerignore')}" in page
