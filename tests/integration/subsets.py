"""Random sets of the official plugins: what is drawn, what their manifests say of it, and what a run of it is given.

A draw is a set of plugins in some order, a model that one of them builds, the named parts that they offer and some of
their switches. Nothing else is set but what a plugin's refusal names; `settle` reads the option off the message.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from miles_megatron.testing.parity import TINY, Case, cases, random_model
from miles_testing.tiny import CONSTANTS, run_file, tiny_checkpoint

from miles_core.errors import MilesError
from miles_core.plugins.bind import bind
from miles_core.plugins.manifest import Manifest
from miles_core.plugins.plan import Plan, prepare
from miles_core.plugins.scan import DEFAULTS, KNOWN
from miles_core.plugins.select import select

ROOT = Path(__file__).parents[2]
CHOSEN_BY = {
    "advantage": "algorithm.advantage_estimator", "policy_loss": "algorithm.policy_loss",
    "reduction": "algorithm.reduction", "generate": "rollout.generate", "weight_sync": "perf.weight_sync",
    "reward": "rollout.rm_type",
}  # fmt: skip
"""The key that chooses a named part."""
BUILT_IN = ("qwen3", "qwen3_moe")
UNDECODED = ("glm_moe_dsa", "deepseek_v32")
"""Families whose sequences the local engine computes anew for each token, which would take a drawn run too long."""


DRAWN = sorted(set(KNOWN) - set(DEFAULTS))
"""What a run names; the others are in every run."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Some plugins, and a run of them.

    Args:
        seed: what it was drawn from.
        plugins: in the order of the run.
        model: the case of a model family; those of BUILT_IN have the sizes of testing/tiny.py.
        settings: "TABLE.OPTION" -> value.
    """

    seed: int
    plugins: tuple[str, ...]
    model: Case
    settings: Mapping[str, object]

    def __str__(self) -> str:
        return f"seed {self.seed}: {', '.join(self.plugins)}; {self.model}; {dict(self.settings)}"


def manifests(plugins: Sequence[str]) -> list[Manifest]:
    """What official plugins state; none is imported."""
    return [_manifest(name) for name in plugins]


@functools.cache
def _manifest(name: str) -> Manifest:
    return select([(name, "a draw")], ())[0].manifest


def draw(seed: int) -> Draw:
    """A set of 1 to all plugins, as many small ones as large ones by their logarithm.

    Each hook of named parts is taken by the first plugin, in an order of its own, that offers one, or by the core.
    """
    chance = random.Random(seed)
    size = round(len(DRAWN) ** chance.random())
    plugins = chance.sample(DRAWN, size)
    offers = [offer for one in manifests(chance.sample(plugins, size)) for offer in one.offers]
    settings: dict[str, object] = {}
    for hook, key in CHOSEN_BY.items():
        mine = [offer.name for offer in offers if offer.hook == hook]
        if mine and chance.random() < 0.8:
            # Beside a scorer that random answers earn, or a filter would have nothing to keep.
            settings[key] = [*mine[:chance.choice([1, 1, 2])], "toy"] if hook == "reward" else mine[0]
    for one in manifests(sorted(plugins)):
        for option in one.options.values():
            if option.type == "bool" and option.default is False and chance.random() < 0.2:
                settings[f"{one.name}.{option.name}"] = True
    families = [offer.name for offer in offers
                if offer.hook == "model_spec" and offer.name not in UNDECODED] or BUILT_IN
    if "r3" in plugins:  # it refuses models without experts, which would leave hardly a set with it to run
        families = [family for family in families if any(map(_sparse, models(family)))] or BUILT_IN[1:]
    cases = models(chance.choice(families))
    return Draw(seed, tuple(plugins), chance.choice([case for case in cases if _sparse(case)] or cases
                                                    if "r3" in plugins else cases), settings)


def _sparse(case: Case) -> bool:
    text = case.config.get("text_config", case.config)
    return any(text.get(key) for key in ("num_experts", "n_routed_experts", "num_local_experts"))


def models(family: str) -> list[Case]:
    """Tiny models of a family: the cases that its plugin is tested with."""
    return [case for case in _every_case() if case.family == family]


@functools.cache
def _every_case() -> list[Case]:
    paths = [ROOT / "plugins/miles-megatron/tests/parity.toml", *sorted(ROOT.glob("plugins/*/tests/parity.toml"))]
    return [case for path in paths for case in cases(path)]


def write_model(case: Case, folder: Path) -> None:
    """A random checkpoint with the tokenizer and the prompts of testing/tiny.py. Imports torch."""
    tiny_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    words = {key: CONSTANTS[key] for key in ("vocab_size", "eos_token_id", "pad_token_id")}
    text = case.config.get("text_config", case.config)
    # With linear attention the fourth layer has the other kind, and layers that share keys are behind those that have
    # them; in the other families one has experts.
    stated = (TINY | text)["num_hidden_layers"]
    if text.get("num_kv_shared_layers"):
        layers = stated
    else:
        layers = 4 if "linear_key_head_dim" in text else int(text.get("first_k_dense_replace", 1)) + 1
    sizes = {"num_hidden_layers": layers, "bos_token_id": None}
    sizes |= {key: each[:layers] for key, each in text.items() if isinstance(each, list) and len(each) == stated}
    if "moe_intermediate_size" in text:
        sizes["moe_intermediate_size"] = 32  # divides into groups of int4
    if "floor_scale" in text:  # the local engine says that it does not decode Llama 4's queries once they grow
        sizes["floor_scale"] = 8192
    if "vocab_size_per_layer_input" in text:
        sizes["vocab_size_per_layer_input"] = words["vocab_size"]
    text = TINY | text | words | sizes
    whole = case.config | {"text_config": text} if "text_config" in case.config else text
    random_model(dataclasses.replace(case, config=whole)).save_pretrained(folder)


FUNCTIONS = (ROOT / "plugins/miles-compat/tests/contract_functions.py").read_text(encoding="utf-8") + '''

def agent(base_url, api_key, messages):
    import json
    import urllib.request

    request = urllib.request.Request(base_url + "/chat/completions", json.dumps({"messages": messages}).encode(),
                                     {"Authorization": "Bearer " + api_key})
    with urllib.request.urlopen(request, timeout=20) as answer:
        json.load(answer)
    return 0.5
'''
"""What launch scripts name by path, and an agent."""


class Service(BaseHTTPRequestHandler):
    """A reward service that likes short answers, and a teacher that finds every token alike."""

    def do_POST(self) -> None:
        """Answer."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "input_ids" in asked:
            scored = [[None if at == 0 else -5.0, token, None] for at, token in enumerate(asked["input_ids"])]
            answer: object = {"meta_info": {"input_token_logprobs": scored}}
        else:
            rewards = [1 / (1 + len(one["response"])) for one in asked.get("samples", [asked])]
            answer = rewards if "samples" in asked else rewards[0]
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        """Nothing on the terminal."""


@contextmanager
def served() -> Iterator[str]:
    """The address of a Service."""
    http = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        http.server_close()


def needs(folder: Path, url: str, model: Path) -> dict[str, object]:
    """What an option is given where a refusal names it."""
    path = folder / "functions.py"
    path.write_text(FUNCTIONS, encoding="utf-8")
    return {
        "compat.custom_rm_path": f"{path}:reward", "compat.custom_advantage_function_path": f"{path}:advantage",
        "compat.custom_loss_function_path": f"{path}:loss",
        "compat.custom_pg_loss_reducer_function_path": f"{path}:reducer",
        "remote-rm.rm_url": url, "opd.opd_teacher_urls": [url], "opd.opd_teacher_load": str(model),
        "tools.agent": f"{path}:agent", "tools.tools": ["calc"], "lora.lora_rank": 2,
        "dapo-filter.overlong_buffer_len": 4,
    }


def declared(said: str, plugins: Sequence[str], who: str | None = None) -> str:
    """What the plugins of a run declare that an error states, or which of them states it; "" for nothing.

    Args:
        said: an error's text.
        who: whom the error names.
        plugins: the official ones of the run.
    """
    stated = manifests(plugins)
    for one in stated:
        for word in one.conflicts:
            if f"{one.name!r} conflicts with {word!r}" in said:
                return f"{one.name} conflicts with {word}"
        for word in one.requires:
            if f"{one.name!r} requires {word!r}" in said:
                return f"{one.name} requires {word}"
    stating = next(filter(None, (look(said, stated) for look in (_kept, _compared, _understood, _owned, _implied))), "")
    return stating or _refused(who or "", said, stated)


def _kept(said: str, stated: Sequence[Manifest]) -> str:
    found = re.search(r"the generator '(.+?)' cannot go on with", said)
    keeps = [one.name for one in stated for offer in one.offers if offer.hook == "unfinished"]
    if found and keeps and not any(f"resumes:{found[1]}" in one.provides for one in stated):
        return f"{keeps[0]}: the generator does not provide resumes:{found[1]}"
    return ""


def _compared(said: str, stated: Sequence[Manifest]) -> str:
    found = re.search(r"(\w+) compares the answers to one prompt", said)
    who = [one.name for one in stated if found and f"compares:{found[1]}" in one.provides]
    return f"{who[0]} provides compares:{found[1]}" if who else ""


def _understood(said: str, stated: Sequence[Manifest]) -> str:
    found = re.search(r"the weight sync '(.+?)' does not support the engine", said)
    who = [one.name for one in stated for word in one.provides if found and word.startswith(f"weight_sync:{found[1]}:")]
    return f"{who[0]} states what engine its weight sync {found[1]} needs" if who else ""


def _owned(said: str, stated: Sequence[Manifest]) -> str:
    found = re.search(r"two plugins offer the (\w+) '(.+?)'", said)
    who = [one.name for one in stated for offer in one.offers if found and (offer.hook, offer.name) == found.groups()]
    return f"{' and '.join(who)} offer {found[1]} {found[2]}" if len(who) > 1 else ""


def _implied(said: str, stated: Sequence[Manifest]) -> str:
    found = re.search(r"set ([\w.-]+) to different values", said)
    who = [one.name for one in stated if found and found[1] in one.implies]
    return f"{' and '.join(who)} imply {found[1]}" if len(who) > 1 else ""


def _refused(who: str, said: str, stated: Sequence[Manifest]) -> str:
    for one in stated:
        parts = "|".join(re.escape(name) for name in sorted({one.name, *(offer.name for offer in one.offers)}))
        named = re.search(rf"(?<![\w-]){re.escape(one.name)}(?![\w-])", who)
        if named or re.search(rf"\b(plugin|generator|scorer|estimator) '?({parts})'? (?!and |conflicts |set )", said):
            return f"{one.name} refuses"
    return ""


def mended(one: Draw, said: str, given: Mapping[str, object], chance: random.Random) -> Draw | None:
    """The draw with one of the options that a refusal names given or left out; None where it names none of them."""
    ways = []
    for key in CHOSEN_BY.values():
        if told := re.search(rf"Fix: (?:write )?--{key.partition('.')[2].replace('_', '-')} ([\w-]+)", said):
            ways.append({**one.settings, key: told[1]})
    for key in sorted({*given, *one.settings}):
        table, _, option = key.partition(".")
        if not re.search(rf"(?<!\w){re.escape(option).replace('_', '[_-]')}(?![\w-])", said):
            continue
        if key in one.settings:
            ways.append({name: value for name, value in one.settings.items() if name != key})
        elif table in one.plugins:
            ways.append({**one.settings, key: given[key]})
    return replace(one, settings=chance.choice(ways)) if ways else None


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of a draw before it runs.

    Args:
        path: the run file.
        plan: None where it is refused.
        said: the last refusal, and `why`: what of the manifests it states, "" where it states nothing of them.
    """

    draw: Draw
    path: Path
    plan: Plan | None
    said: str = ""
    why: str = ""


def settle(one: Draw, path: Path, model: Path, given: Mapping[str, object], refused: str = "",
           patience: int = 20) -> Settled:
    """Write the run file, and mend what a plugin refuses by the options that it names, until there is a plan.

    Args:
        given: what `needs` gives.
        refused: what a plugin has refused of this draw in its run, which is mended first.
        patience: how often something is mended; two plugins may want the opposite.
    """
    chance, base = random.Random(one.seed), {"rollout": {"num_rollout": 2}, "optimizer": {"lr": 1e-3}}
    one = mended(one, refused, given, chance) or one
    said = why = ""
    for _ in range(patience):
        run_file(path, one.plugins, base, one.settings, checkpoint=model)
        try:
            plan = prepare(path)
            for role in ("driver", "rollout", "trainer"):
                bind(plan.selected, plan.config, role)
            return Settled(one, path, plan)
        except MilesError as error:
            said, why = str(error), declared(str(error), one.plugins, error.who)
        if not why or (better := mended(one, said, given, chance)) is None:
            break
        one = better
    return Settled(one, path, None, said, why)
