"""What has to be on this machine before a run: the checkpoint's folder, --load, the prompt files' places. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from miles_core.config.load import config_json, quantised, who
from miles_core.config.tables import RunConfig
from miles_core.errors import CheckpointError, ConfigError
from miles_core.reading import parse_json
from miles_core.types import TRACKER

Note = Callable[[str], None]

OTHERS = ("*.bin", "*.gguf", "*.pth", "*.pt", "*.ckpt", "*.distcp", "*/*.distcp", "*/mp_rank_*", "*.h5", "*.msgpack")
"""Weights of other programs."""
NO_POLICY = re.compile("For(Sequence|Token)Classification|ForQuestionAnswering|ForMaskedLM|RewardModel|Eagle|"
                       "(?<!LMHead)(?<!GLM)Model$")
"""Architectures that give no probabilities of the next token, or, as a draft, none of their own."""
LARGEST = 8 * 1024 * 1024
"""Bytes of a file of constants."""
FOLDER = "name a folder with config.json, tokenizer files and *.safetensors"
_ITERATION = re.compile(r"(iter|global_step|step|checkpoint|rollout)[_-]?\d+")


def astray(path: str) -> bool:
    """Whether nothing is at a path that can only mean this machine: /x, ~/x, ./x, x.jsonl, x in a folder that is here.

    Any other relative path may be planned before it is there.
    """
    location = Path(path)
    here = path.startswith(("/", "~", "./", "../")) or (
        location.parent.is_dir() and bool(len(location.parts) > 1 or re.fullmatch(r"\.[a-z]+", location.suffix)))
    return here and not location.exists()


@lru_cache(maxsize=8)
def _content(path: Path, _changed: int, _size: int) -> object:
    """A file that many rules ask, read once for as long as it stays as it is."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little") if path.suffix == ".safetensors" else LARGEST
        return parse_json(file.read(min(size, LARGEST)))


def found_in(path: Path, keys: Sequence[str]) -> list[Any]:
    """Values of a JSON file, or of the header of a *.safetensors file, along keys; * in a key stands for any text."""
    try:
        status = path.stat()
        here = [_content(path, status.st_mtime_ns, status.st_size)]
    except (OSError, ValueError):
        return []
    for key in keys:
        pairs = [pair for one in here for pair in (
            one.items() if isinstance(one, Mapping) else enumerate(one) if isinstance(one, list) else ())]
        here = [value for name, value in pairs if fnmatchcase(str(name), key)]
    return [value for one in here for value in (one if isinstance(one, list) else [one]) if value is not None]


def check_paths(config: RunConfig, note: Note) -> None:
    """

    Raises:
        CheckpointError: --hf-checkpoint is none, or --load names no place to resume from.
        ConfigError: weights that training cannot start from.
    """
    _hf_checkpoint(config, note)
    _resume(config)
    _reference(config)
    _quantised_start(config)
    _writable(config)
    _replayed(config)


def _hf_checkpoint(config: RunConfig, note: Note) -> None:
    name = str(config.checkpoint.hf_checkpoint)
    folder, origin = Path(name), f"--hf-checkpoint {name}"
    if astray(name):
        tilde = "write the whole path: ~ is not expanded here" if name.startswith("~") else FOLDER
        raise CheckpointError("there is no such folder", who=origin, fix=tilde)
    if not folder.exists():
        note(f"--hf-checkpoint {name} is not here: what depends on the model is not checked, and a run has to have it")
        return
    if not folder.is_dir():
        raise CheckpointError("this is a file, and a checkpoint is a folder", who=origin, fix=FOLDER)
    _constants(folder, origin)
    unread(folder, origin)
    if not any(folder.glob("*.safetensors")) and config.debug.plan_without_weights:
        note(f"--hf-checkpoint {name} holds no weights: they are not checked, and a run has to have them")


def unread(folder: Path, origin: str) -> None:
    """
    Raises:
        CheckpointError: the weights are in files of another format, or an adapter's.
    """
    if any(path.name != "adapter_model.safetensors" for path in folder.glob("*.safetensors")):
        return
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError("this is an adapter and no model", who=origin,
                              fix="name the model that it belongs to, or merge the two into one folder")
    kind = next((kind for kind in OTHERS if any(folder.glob(kind))), None)
    if kind and not (folder / "model.safetensors.index.json").is_file():
        raise CheckpointError(f"the folder has weights as {kind} files only", who=origin,
                              fix="save them with transformers as *.safetensors; parts of a trainer its program merges")


def _constants(folder: Path, origin: str) -> None:
    try:
        constants = parse_json((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        inside = sorted(path.parent.name for path in folder.glob("*/config.json"))
        inside += sorted(str(path.parent.relative_to(folder)) for path in folder.glob("snapshots/*/config.json"))
        fix = f"is {folder / inside[0]} meant?" if inside else FOLDER
        if (folder / "adapter_config.json").is_file():
            unread(folder, origin)
        if (folder / TRACKER).is_file():
            fix = f"give this with --load, and its Hugging Face folder here: {FOLDER}"
        raise CheckpointError("the folder has no config.json", who=origin, fix=fix) from None
    except (OSError, ValueError) as error:
        raise CheckpointError("config.json cannot be read", got=str(error), who=origin, fix=FOLDER) from None
    kinds, name = (constants.get("architectures"), constants.get("model_type")) if (
        isinstance(constants, Mapping)) else (None, None)
    kind = str(kinds[0]) if isinstance(kinds, list) and kinds else None
    if kind and (not isinstance(name, str) or NO_POLICY.search(kind)):
        what, fix = ("config.json has no model_type", "take it from where the weights are from") if (
            not isinstance(name, str)) else (
            "the checkpoint is no language model", "name one whose architecture ends in ForCausalLM")
        raise CheckpointError(what, got=kind, who=origin, fix=fix)
    if not isinstance(constants, Mapping):
        raise CheckpointError("config.json cannot be read", got=f"{type(constants).__name__} in place of an object",
                              who=origin, fix=FOLDER)


def _resume(config: RunConfig) -> None:
    """--load is a folder that a run saved into, or one that is not there yet."""
    load = config.checkpoint.load
    if load is None or config.debug.debug_rollout_only:
        return
    folder, origin = Path(load), f"{who(config, 'checkpoint.load')}, {load}"
    if folder.is_file():
        raise CheckpointError("this is a file, and a checkpoint is a folder", who=origin,
                              fix="give the folder that a run saved into with --save")
    if not folder.exists() and load != config.checkpoint.save and astray(load):
        above = (folder.parent / TRACKER).is_file()
        raise CheckpointError("there is nothing to resume from", who=origin, fix=f"give {folder.parent}: "
                              "the newest is taken" if above else "correct it, or leave it out to start anew; it may "
                              "be missing where it is the run's own --save")
    entries = [path.name for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []
    if (folder / TRACKER).is_file():
        _tracked(config, folder)
    if not entries or (folder / TRACKER).is_file():
        return
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError("this is an adapter, not a checkpoint of a run", who=origin,
                              fix="start from it with the option of the plugin that makes adapters")
    if (folder / "config.json").is_file() and not (folder / "metadata.json").is_file():
        raise CheckpointError("this is a Hugging Face directory, not a torch_dist checkpoint",
                              who=origin, fix="give it as --hf-checkpoint, or as --ref-load to start from its weights")
    if (folder.parent / TRACKER).is_file() or _ITERATION.fullmatch(folder.name) or (folder / "metadata.json").is_file():
        raise CheckpointError("this is one iteration of a checkpoint", who=origin,
                              fix=f"give the folder above it, {folder.parent}: the newest is taken")
    own = load == config.checkpoint.save and all((folder / name).is_file() for name in entries)  # its script's files
    if not own and not any(name.startswith("iter_") for name in entries):
        inside = [str(tracker.parent) for tracker in sorted(folder.glob(f"*/{TRACKER}"))]
        raise CheckpointError("this is not a checkpoint", got=f"no {TRACKER}", who=origin, fix=f"is {inside[0]} meant?"
                              if inside else "give a folder that a run saved into with --save")


def _tracked(config: RunConfig, folder: Path, load: bool = True) -> None:
    """The iteration that a checkpoint's tracker names; `load` if the run goes on from it."""
    text, last = (folder / TRACKER).read_text(encoding="utf-8", errors="replace").strip(), config.rollout.num_rollout
    if text == "release":
        return  # weights that another program converted, which the trainer reads
    iterations = sorted(path.name for path in folder.glob("iter_*"))
    other = "another program saved it: start from a Hugging Face folder of its weights with --ref-load"
    if not text.isdecimal() or f"iter_{int(text):07d}" not in iterations:
        raise CheckpointError(f"the tracker names iteration {text[:40] or 'nothing'}, which is not there",
                              got=", ".join(iterations[-3:]) or "no iteration", who=str(folder / TRACKER),
                              fix="write the number of one that is there into it" if iterations else other)
    newest = folder / f"iter_{int(text):07d}"
    if any(newest.glob("mp_rank_*")):
        raise CheckpointError("this is a checkpoint of Megatron's older format", got="mp_rank_*", who=str(newest),
                              fix="start from a Hugging Face folder of its weights with --ref-load")
    parts = ("metadata.json", ".metadata", "common.pt", "*.distcp")
    known = config.perf.trainer == "megatron" or any(newest.glob("*.distcp"))  # other trainers save as they like
    if lost := [name for name in parts if known and not any(newest.glob(name))]:
        raise CheckpointError(f"iteration {int(text)} is incomplete", got=f"no {', '.join(lost)}", who=str(newest),
                              fix=f"write the number of an older one into {folder / TRACKER}")
    resumed = load and (newest / "miles.json").is_file()
    if last and resumed and int(text) > last and config.checkpoint.load != config.checkpoint.save:
        raise ConfigError("the checkpoint is past the run's last rollout, so nothing would be trained",
                          got=f"{text} of {last}", who=who(config, "checkpoint.load", "rollout.num_rollout"),
                          fix="raise --num-rollout, which counts those that are done already; to start anew from these "
                          "weights, give the folder as --ref-load")


def _reference(config: RunConfig) -> None:
    """--ref-load has weights: a Hugging Face folder, or one that a run or `miles convert` wrote."""
    ref_load = config.checkpoint.ref_load
    if ref_load is None or config.debug.debug_rollout_only:
        return
    folder, origin = Path(ref_load), f"{who(config, 'checkpoint.ref_load')}, {ref_load}"
    check_source(ref_load, origin)
    hugging_face = (folder / "config.json").is_file()
    if hugging_face:
        _constants(folder, origin)
    if not hugging_face and (folder / TRACKER).is_file() and any(map(Path.is_dir, folder.iterdir())):
        _tracked(config, folder, load=False)


def check_source(given: str, origin: str) -> None:
    """
    Raises:
        CheckpointError: there are no weights that a model could start from.
    """
    folder = Path(given)
    if not (astray(given) or folder.exists()):
        return
    usual = "name a Hugging Face folder, or one that a run saved into"
    if not folder.is_dir():
        raise CheckpointError("there is no such folder", who=origin, fix=usual)
    if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
        unread(folder, origin)
        method = found_in(folder / "config.json", ["quantization_config", "quant_method"])
        if method and method[0] != "mxfp4":  # which the trainer reads
            raise CheckpointError("the trainer computes with plain weights, and these weights are quantised",
                                  who=origin, got=method[0], fix="name the checkpoint that they were made from")
    elif not (folder / TRACKER).is_file() and not any(folder.glob("iter_*")):
        above = (folder.parent / TRACKER).is_file()
        raise CheckpointError("the folder is no checkpoint: neither config.json nor " + TRACKER, who=origin,
                              fix=f"give the folder above it, {folder.parent}" if above else usual)


def check_weights(config: RunConfig) -> None:
    """
    Raises:
        CheckpointError: --hf-checkpoint is a model without the weights that the run would start from.
    """
    folder, debug = Path(str(config.checkpoint.hf_checkpoint)), config.debug
    serves = debug.debug_rollout_only and "external" not in config.understood  # engines of others have their own
    if (serves or _starts_there(config)) and (folder / "config.json").is_file() and not (
            debug.plan_without_weights or any(folder.glob("*.safetensors"))):
        raise CheckpointError("the folder of the model holds no weights", who=f"--hf-checkpoint {folder}",
                              fix="fetch its *.safetensors; a plan from config.json alone: --plan-without-weights")


def _starts_there(config: RunConfig) -> bool:
    """Training begins with the weights in --hf-checkpoint."""
    checkpoint = config.checkpoint
    saved = checkpoint.load is not None and (Path(checkpoint.load) / TRACKER).is_file()
    return checkpoint.ref_load in (None, checkpoint.hf_checkpoint) and not (saved or config.debug.debug_rollout_only)


def _quantised_start(config: RunConfig) -> None:
    """
    Raises:
        ConfigError: training would begin with weights that are quantised.
    """
    if (method := quantised(config)) and _starts_there(config):
        raise ConfigError("training cannot start from quantised weights", got=method, who=str(config_json(config)[0]),
                          fix="name the plain checkpoint with --ref-load; engines are then served this one; if its "
                          "weights are plain again, take quantization_config out of config.json")


def _writable(config: RunConfig) -> None:
    """
    Raises:
        CheckpointError, ConfigError: a file is in the place of a folder that the run would write.
    """
    checkpoint, folders = config.checkpoint, (config.checkpoint.run_dir, config.perf.update_weight_disk_dir)
    if checkpoint.save is not None and _file(checkpoint.save):
        raise CheckpointError("checkpoints cannot be written here", got="File exists", who=f"--save {checkpoint.save}",
                              fix=f"{_file(checkpoint.save)} is a file: name another folder")
    keys = [f"checkpoint.{key}" for key in ("hf_checkpoint", "ref_load", "load", "save", "save_hf", "run_dir")]
    for key in (*keys, "rollout.prompt_data", "eval.eval_prompt_data"):
        table, _, name = key.partition(".")
        if re.search(r"(^|')[a-z][a-z0-9+]+://", value := str(getattr(getattr(config, table), name))):
            raise ConfigError("this is an address, and nothing is fetched or sent", got=value, who=who(config, key),
                              fix="name what lies on this machine, or in a folder that machines share")
    for folder in folders:
        if folder is not None and (file := _file(folder)):
            raise ConfigError("a file stands where a folder is needed", who=str(file), fix="name another folder")
    for folder in filter(None, (checkpoint.save, checkpoint.save_hf, *folders)):
        above = next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.is_dir())
        if above != above.parent and not os.access(above, os.W_OK):  # at the root: a disk that other machines have
            raise ConfigError("nothing can be written here", got=folder, who=str(above), fix="name another folder")


def _replayed(config: RunConfig) -> None:
    """
    Raises:
        ConfigError: --load-debug-rollout-data names no rollouts.
    """
    saved = config.debug.load_debug_rollout_data or ""
    folder = saved.partition("{")[0].rpartition("/")[0]
    pattern = re.sub(r"\{[^}]*\}", "*", saved.removeprefix(f"{folder}/"))
    if folder and (astray(folder) or any(Path(folder).glob("*")) and not any(Path(folder).glob(pattern))):
        raise ConfigError("there are no rollouts to replay", got=f"no {pattern} in {folder}",
                          who=who(config, "debug.load_debug_rollout_data"), fix="check the path")


def _file(folder: str) -> Path | None:
    """A file in the place of a folder, or of one above it."""
    return next((path for path in (Path(folder), *Path(folder).parents) if path.exists() and not path.is_dir()), None)
