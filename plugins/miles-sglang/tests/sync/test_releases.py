"""What a sync says is understood by every release whose words are in releases.json, as their sources declare them.

There a request's fields are in order, with "!" behind one that has to be there; what does not change is not said again.
"""

import base64
import json
import pickle
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from miles_sglang.server_extension import miles_weights
from miles_sglang.sync import releases
from miles_sglang.sync.servers import LOADER, Reports, Target, describe, load, plain
from stand_in import asked, reply, served

from miles_core.errors import SyncError

CHANGES = json.loads(Path(__file__).with_name("releases.json").read_text())
FACTS = {version: {path: words for past in list(CHANGES)[: count + 1] for path, words in CHANGES[past].items()}
         for count, version in enumerate(CHANGES)}
"""release -> request -> its fields."""


class Server:
    """Takes what one release does: unknown fields are passed over, missing ones are refused, and so are tensors
    outside of a session where the release has these."""

    def __init__(self, version):
        self.facts, self.info = FACTS[version], {"version": version, "custom_weight_loader": [LOADER]}
        self.model, self.bodies, self.open = torch.nn.Linear(2, 2), [], False

    def take(self, path, body):
        """(status, answer)."""
        if path == "server_info":
            return 200, self.info
        if path not in self.facts:
            return 404, {"detail": "Not Found"}
        fields = self.facts[path].split()
        if missing := [one[:-1] for one in fields if one.endswith("!") and one[:-1] not in body]:
            return 422, {"detail": f"missing {missing}"}
        self.bodies.append({key: value for key, value in body.items() if key in {one.rstrip("!") for one in fields}})
        if path == "begin_weight_update":
            if self.open:
                return 400, {"success": False, "message": "a weight-update session is already open"}
            self.open = True
        if path == "update_weights_from_tensor":
            if "begin_weight_update" in self.facts and not self.open:
                return 400, {"success": False, "message": "must run between begin_weight_update() and the end"}
            miles_weights.load(self.model, pickle.loads(base64.b64decode(body["serialized_named_tensors"][0])))
        return 200, {"success": True}


@contextmanager
def serving(version):
    server = Server(version)

    def answer(handler, path):
        reply(handler, *server.take(path.strip("/"), asked(handler)))

    with served(answer) as url:
        yield server, Target("engine 0", url)


@pytest.mark.parametrize("version", FACTS)
def test_a_server_that_was_looked_at_takes_tensors_also_when_another_sender_looked_before(version):
    with serving(version) as (server, target):
        for _ in range(2):
            _, names = describe(Reports([target], 5), target, 5)
            assert names == {"weight", "bias"}
        assert server.open == ("begin_weight_update" in FACTS[version])


def test_tensors_outside_of_a_session_are_refused_where_a_release_has_these():
    with serving("0.5.23") as (_, target), pytest.raises(SyncError, match="must run between"):
        load(target, plain({}), timeout=5)


@pytest.mark.parametrize("version", FACTS)
@pytest.mark.parametrize("draft", [True, False])
def test_a_draft_gets_tensors_only_where_it_is_meant_to(version, draft):
    with serving(version) as (server, target):
        describe(Reports([target], 5), target, 5)
        load(target, plain({}), timeout=5, draft=draft)
    said = server.bodies[-1]
    assert said.get("selector") == ("all" if draft else "target") or said["disable_draft_model"] is not draft


@pytest.mark.parametrize("version", FACTS)
def test_adapters_have_the_fields_of_the_release(version):
    server = Server(version)
    fields = releases.adapter_fields(server.info, "packed", 2)
    status, _ = server.take("load_lora_adapter_from_tensors", {"lora_name": "a", "config_dict": {}, **fields})
    assert status == 200 and server.bodies[-1].keys() == {"lora_name", "config_dict", *fields}


@pytest.mark.parametrize(("said", "release"), [
    ({"version": "0.5.21"}, (0, 5, 21)), ({"version": "0.5.9.post1"}, (0, 5, 9)), ({}, releases.OLDEST)])
def test_a_release_is_what_a_server_says(said, release):
    assert releases.release(said) == release
