"""Folders of a run on this machine: checkpoints that are not there or not to be read, places that cannot be written."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from miles_core.config.load import config_json, quantised, who
from miles_core.config.tables import RunConfig
from miles_core.errors import CheckpointError, ConfigError
from miles_core.types import TRACKER

Note = Callable[[str], None]

OTHERS = ("*.bin", "*.gguf", "*.pth", "*.pt", "*.ckpt", "*.distcp", "*/*.distcp", "*/mp_rank_*", "*.h5", "*.msgpack")
"""Weights of other programs."""
PARTS = ("metadata.json", ".metadata", "common.pt", "*.distcp")
"""Files of one iteration of a checkpoint."""
FOLDER = "name a folder with config.json, tokenizer files and *.safetensors"
_ADDRESS = re.compile(r"[a-z][a-z0-9+]+://")


def astray(path: str) -> bool:
    """Whether nothing is at a path that can only mean this machine: /x, ~/x, ./x, x.jsonl, x in a folder that is here.

    Any other relative path may be planned before it is there.
    """
    location = Path(path)
    here = path.startswith(("/", "~", "./", "../")) or (
        location.parent.is_dir() and bool(len(location.parts) > 1 or re.fullmatch(r"\.[a-z]+", location.suffix)))
    return here and not location.exists()


def check_paths(config: RunConfig, note: Note) -> None:
    """
    Raises:
        CheckpointError: --hf-checkpoint is none, or --load or --ref-load name no place to start from.
        ConfigError: weights that training cannot start from, or a place that cannot be written to.
    """
    _hf_checkpoint(config, note)
    ref_load = config.checkpoint.ref_load
    if not config.debug.debug_rollout_only:
        _resume(config, note)
        if ref_load is not None:
            check_source(ref_load, f"{who(config, 'checkpoint.ref_load')}, {ref_load}")
    if (method := quantised(config)) and _starts_there(config):
        raise ConfigError("training cannot start from quantised weights", got=method, who=str(config_json(config)[0]),
                          code="start-weights-quantised", fix="name the plain checkpoint with --ref-load (make it: "
                          "miles convert fp8-to-hf, int4-to-hf, of MXFP4 hf-to-dist); engines then serve this one")
    _writable(config)
    if config.checkpoint.load is None and (Path(str(config.checkpoint.run_dir)) / "events.jsonl").is_file():
        note(f"--run-dir {config.checkpoint.run_dir} has a run, whose curves and samples this one takes the place of: "
             "another --run-dir keeps both")


def _hf_checkpoint(config: RunConfig, note: Note) -> None:
    name = str(config.checkpoint.hf_checkpoint)
    folder, origin = Path(name), f"--hf-checkpoint {name}"
    if astray(name):
        tilde = "write the whole path: ~ is not expanded here" if name.startswith("~") else FOLDER
        raise CheckpointError("there is no such folder", who=origin, fix=tilde, code="folder-missing")
    if not folder.exists():
        note(f"--hf-checkpoint {name} is not here: what depends on the model is not checked, and a run has to have it")
        return
    if config_json(config)[1] is None:
        inside = sorted(path.parent for below in ("*", "snapshots/*") for path in folder.glob(f"{below}/config.json"))
        raise CheckpointError("config.json cannot be read" if (folder / "config.json").exists() else
                              "the folder has no config.json", who=origin,
                              fix=f"is {inside[0]} meant?" if inside else FOLDER, code="model-config-missing")
    _safetensors(folder, origin)


def _safetensors(folder: Path, origin: str) -> None:
    """
    Raises:
        CheckpointError: the weights are in files of another format, or an adapter's.
    """
    if any(path.name != "adapter_model.safetensors" for path in folder.glob("*.safetensors")):
        return
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError("this is an adapter and no model", who=origin,
                              fix="name the model that it belongs to, or merge the two into one folder",
                              code="adapter-in-place-of-model")
    kind = next((kind for kind in OTHERS if any(folder.glob(kind))), None)
    if kind and not (folder / "model.safetensors.index.json").is_file():
        raise CheckpointError(f"the folder has weights as {kind} files only", who=origin,
                              fix="save them with transformers as *.safetensors; parts of a trainer its program merges",
                              code="weights-not-safetensors")


def check_weights(config: RunConfig, note: Note) -> None:
    """
    Raises:
        CheckpointError: --hf-checkpoint is a model without the weights that the run would start from.
    """
    folder, debug = Path(str(config.checkpoint.hf_checkpoint)), config.debug
    if not (folder / "config.json").is_file() or any(folder.glob("*.safetensors")):
        return
    if debug.plan_without_weights:
        note(f"--hf-checkpoint {folder} holds no weights: they are not checked, and a run has to have them")
    elif (debug.debug_rollout_only and "external" not in config.understood) or _starts_there(config):
        raise CheckpointError("the folder of the model holds no weights", who=f"--hf-checkpoint {folder}",
                              fix="fetch its *.safetensors; a plan from config.json alone: --plan-without-weights",
                              code="weights-missing")


def _starts_there(config: RunConfig) -> bool:
    """Training begins with the weights in --hf-checkpoint."""
    paths, hf = config.checkpoint, config.checkpoint.hf_checkpoint
    saved = paths.load is not None and (Path(paths.load) / TRACKER).is_file()
    return hf in (paths.load, paths.ref_load or hf) and not (saved or config.debug.debug_rollout_only)


def check_source(given: str, origin: str) -> None:
    """
    Raises:
        CheckpointError: there are no weights that a model could start from.
    """
    folder = Path(given)
    if not (astray(given) or folder.exists()):
        return
    if not folder.is_dir():
        raise CheckpointError("there is no such folder", who=origin,
                              fix="name a Hugging Face folder, or one that a run saved into", code="folder-missing")
    if any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        _safetensors(folder, origin)
    elif not (folder / TRACKER).is_file() and not any(folder.glob("iter_*")):
        raise _no_checkpoint(folder, f"neither config.json nor {TRACKER}", origin)


def _resume(config: RunConfig, note: Note) -> None:
    """--load is a folder that a run saved into, or the run's own --save, which may still be empty."""
    load, save = config.checkpoint.load, config.checkpoint.save
    if save and save != load and (Path(save) / TRACKER).is_file():
        note(f"--save {save} holds a checkpoint, and this run begins anew: --load {save} goes on from it")
    if load is None or load == config.checkpoint.hf_checkpoint != save:
        return
    folder, origin, own = Path(load), f"{who(config, 'checkpoint.load')}, {load}", load == save
    if (folder / TRACKER).is_file():
        _tracked(config, folder)
    elif folder.is_file() or astray(load) and not own:
        raise _no_checkpoint(folder, "a file" if folder.is_file() else "nothing", origin)
    elif folder.is_dir():
        entries = [path for path in folder.iterdir() if not path.name.startswith(".")]
        files = own and all(path.is_file() for path in entries)  # its script's
        if entries and not files and not any(path.name.startswith("iter_") for path in entries):
            raise _no_checkpoint(folder, f"no {TRACKER}", origin)


def _no_checkpoint(folder: Path, got: str, origin: str) -> CheckpointError:
    near = next((path.parent for path in (folder.parent / TRACKER, *sorted(folder.glob(f"*/{TRACKER}")))
                 if path.is_file()), None)
    return CheckpointError("this is no checkpoint of a run", got=got, who=origin, fix=(
        f"give {near}: the newest iteration is taken" if near else "give the folder that a run saved into with --save; "
        "to start from a Hugging Face folder name it with --hf-checkpoint, or with --ref-load"),
                           code="not-a-run-checkpoint")


def _tracked(config: RunConfig, folder: Path) -> None:
    """The iteration that a checkpoint's tracker names is there, whole, and not past the end of the run."""
    text, last = (folder / TRACKER).read_text(encoding="utf-8", errors="replace").strip(), config.rollout.num_rollout
    if text == "release":
        return  # weights that another program converted, which the trainer reads
    newest = folder / f"iter_{int(text):07d}" if text.isdecimal() else None
    if newest is None or not newest.is_dir():
        raise CheckpointError(f"the tracker names iteration {text[:40] or 'nothing'}, which is not there",
                              got=", ".join(sorted(path.name for path in folder.glob("iter_*"))[-3:]) or "no iteration",
                              who=str(folder / TRACKER), fix="write the number of one that is there into it",
                              code="load-iteration-missing")
    known = config.perf.trainer == "megatron" or any(newest.glob("*.distcp"))  # other trainers save as they like
    if lost := [name for name in PARTS if known and not any(newest.glob(name))]:
        what = "another trainer's" if [*PARTS] == lost and any(newest.iterdir()) else "incomplete"
        raise CheckpointError(f"iteration {int(text)} is {what}", got=f"no {', '.join(lost)}", who=str(newest),
                              fix=f"name an older one in {folder / TRACKER}, or another folder",
                              code="load-iteration-incomplete")
    resumed = (newest / "miles.json").is_file()  # another program's checkpoint is weights to start from
    if last and resumed and int(text) > last and config.checkpoint.load != config.checkpoint.save:
        raise ConfigError("the checkpoint is past the run's last rollout, so nothing would be trained",
                          got=f"{text} of {last}", who=who(config, "checkpoint.load", "rollout.num_rollout"),
                          fix="raise --num-rollout, which counts those that are done already; to start anew from these "
                          "weights, give the folder as --ref-load", code="load-past-last-rollout")


def _writable(config: RunConfig) -> None:
    """Refuse a place where the run would save and nothing can be written."""
    for key in ("checkpoint.save", "checkpoint.save_hf", "checkpoint.run_dir", "perf.update_weight_disk_dir"):
        table, _, name = key.partition(".")
        if (folder := getattr(getattr(config, table), name)) is None:
            continue
        above = next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.exists())
        root = above == above.parent  # what lies there may be a disk that other machines have
        what = ("this is an address, and nothing is sent" if _ADDRESS.match(folder) else
                f"{above} is a file" if not above.is_dir() else
                f"nothing can be written in {above}" if not root and not os.access(above, os.W_OK) else None)
        if what:
            raise ConfigError(what, got=folder, who=who(config, key),
                              fix="name another folder, on this machine or one that machines share",
                              code="folder-not-writable")
