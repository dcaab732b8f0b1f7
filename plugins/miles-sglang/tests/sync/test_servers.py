"""Whatever a server does, the sender ends in time with an error that names it."""

import json
import threading
import time
from contextlib import contextmanager, suppress

import pytest
import torch
import torch.distributed as dist
from miles_sglang.server_extension import miles_sums, miles_weights
from miles_sglang.sync.servers import Reports, Target, describe, for_all, post
from stand_in import reply, served

from miles_core.errors import SyncError


@contextmanager
def server(answer):
    """A target whose every request `answer(handler, path)` takes."""
    with served(answer) as url:
        yield Target("engine 2", url)


def says(status, body):
    return lambda handler, _path: reply(handler, status, body)


def silent(handler, _path):
    """Until whoever asked has gone."""
    with suppress(OSError):
        while handler.connection.recv(4096):
            continue


@pytest.mark.parametrize(("answer", "words"), [
    (says(400, {"success": False, "message": "no such tensor"}), "refused /x.*no such tensor"),
    (says(200, {"success": False, "message": "not now"}), "refused /x.*not now"),
    (lambda handler, _path: handler.connection.close(), "connection to engine 2 was lost in /x"),
    (silent, "did not answer /x within 0.3 s"),
])
def test_what_a_server_does_wrong_is_said_with_its_name(answer, words):
    with server(answer) as target, pytest.raises(SyncError, match=words):
        post(target, "x", timeout=0.3 if "within" in words else 20)


def test_a_request_is_said_to_be_on_its_way_before_the_answer():
    sent = threading.Event()
    with server(lambda handler, path: says(200, {"early": sent.wait(5)})(handler, path)) as target:
        assert post(target, "x", timeout=10, sent=sent.set) == {"early": True}


def test_the_first_error_is_raised_when_all_have_answered():
    done = []

    def ask(target):
        if target.name == "a":
            raise SyncError("a fails")
        time.sleep(0.1)
        done.append(target.name)

    with pytest.raises(SyncError, match="a fails"):
        for_all([Target("a", ""), Target("b", "")], ask)
    assert done == ["b"]


def test_a_server_without_our_loader_is_refused_before_anything_is_sent():
    with server(says(200, {"custom_weight_loader": []})) as target:
        reports = Reports([target], 5)
        with pytest.raises(SyncError, match="started without --custom-weight-loader miles_weights.load"):
            describe(reports, target, 5)


def test_a_rank_that_says_nothing_is_named():
    with server(says(200, {"success": True})) as target:
        reports = Reports([target], 5)
        with pytest.raises(SyncError, match="rank 0 of engine 2 did not report"):
            reports.ask(target, 5)


class Model(torch.nn.Module):
    """What a server would hold."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float32), requires_grad=False)
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("computed", torch.ones(2), persistent=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)


def loaded(model, reports, tensors, **request):
    """What the loader reports after it was handed these tensors."""
    flat = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in tensors.values()] or [torch.empty(0).byte()])
    entries, start = [], 0
    for name, tensor in tensors.items():
        entries.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start])
        start += tensor.numel() * tensor.element_size()
    wanted = reports.request()
    plan = {"tensors": entries, "report": {**wanted, **request}}
    miles_weights.load(model, [(json.dumps(plan), flat)])
    return reports.read(Target("engine 2", "http://127.0.0.1:1"), wanted)[0]


def test_the_loader_reports_parameters_and_what_a_checkpoint_would_hold():
    reports, model = Reports([Target("engine 2", "http://127.0.0.1:1")], 5), Model()
    assert loaded(model, reports, {}, names_only=True)["names"] == ["weight"]
    sent = torch.tensor([1.5, -2.0, 3.0, 0.25]).bfloat16()
    found = loaded(model, reports, {"weight": sent}, dtype="bfloat16")
    assert model.weight.tolist() == sent.tolist() and found["names"] == ["weight", "kept"]
    assert found["sums"] == sums_of(sent, model.kept), "the weight is cast back to what was sent"
    assert found["changed"] == []
    model.kept += 1
    assert loaded(model, reports, {}, dtype="bfloat16")["changed"] == [1]


def sums_of(*tensors):
    return miles_sums.sums(tensors).numpy().tobytes().hex()


def test_a_parameter_that_was_replaced_or_moved_is_seen_in_the_next_report():
    reports, model = Reports([Target("engine 2", "http://127.0.0.1:1")], 5), Model()
    loaded(model, reports, {})
    model.weight = torch.nn.Parameter(torch.tensor([1.0, 2, 3, 4]), requires_grad=False)
    assert loaded(model, reports, {})["sums"] == sums_of(model.weight, model.kept)
    model.weight.data, model.kept = torch.full((4,), 5.0), torch.ones(3)
    assert loaded(model, reports, {})["sums"] == sums_of(model.weight, model.kept)
    model.child = torch.nn.Linear(2, 2)
    found = loaded(model, reports, {})
    assert found["names"] == ["weight", "kept", "child.weight", "child.bias"] and found["changed"] == [0, 1, 2, 3]


def test_what_is_tied_is_held_once_under_the_names_that_torch_gives():
    model = torch.nn.Sequential(Model(), torch.nn.Sequential(Model(), torch.nn.BatchNorm1d(2)), Model())
    model[1][0].weight, model[2].kept = model[0].weight, model[0].kept
    model.append(model[1])
    found = miles_sums.Held(model, (None, {}, {}))
    wanted = dict(model.named_parameters()) | {name: one for name, one in model.named_buffers() if "comp" not in name}
    assert found.tensors.keys() == wanted.keys() and all(found.tensors[name] is wanted[name] for name in wanted)
    assert dict(zip(found.names, found.sums().arrived().tolist(), strict=True)) == {
        name: miles_sums.sums([one])[0].tolist() for name, one in wanted.items()}


def test_what_a_model_holds_is_looked_for_again_only_after_it_has_changed():
    model, asked = torch.nn.Sequential(Model(), torch.nn.BatchNorm1d(2)), (None, {}, {})
    changes = {
        "a value": lambda: model[0].weight.data.fill_(7),
        "a parameter": lambda: setattr(model[0], "weight", torch.nn.Parameter(torch.ones(4))),
        "its memory": lambda: setattr(model[0].weight, "data", torch.ones(4)),
        "a buffer": lambda: setattr(model[0], "kept", torch.ones(2)),
        "a module": lambda: model.__setitem__(1, torch.nn.BatchNorm1d(2)),
        "one more": lambda: model[0].register_buffer("more", torch.ones(1)),
    }
    for what, change in changes.items():
        kept = miles_sums.Held(model, asked)
        assert kept.same() and kept.lasts()
        change()
        assert (kept.same() and kept.lasts()) == (what == "a value"), what
        assert kept.lasts() == (what != "its memory"), "what was replaced may still be read"


def test_a_connection_to_the_sender_that_was_lost_is_replaced(monkeypatch):
    """A sender that starts anew may get the port of the one before."""
    made, connect = [], dist.TCPStore

    def counted(*args, **kwargs):
        made.append(connect(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(miles_weights, "_stores", {})
    store = connect("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(dist, "TCPStore", counted)
    address = ("127.0.0.1", store.port)
    for key in "ab":
        miles_weights.connected(address, key).queue_push(key, key)
    assert [store.queue_pop(key, False) for key in "ab"] == [b"a", b"b"] and len(made) == 1
    del store
    store = connect(*address, is_master=True, wait_for_workers=False)
    miles_weights.connected(address, "c").queue_push("c", "c")
    assert store.queue_pop("c", False) == b"c" and len(made) == 2 and len(miles_weights._stores) == 1


def test_an_error_in_the_server_is_kept_for_the_report_and_ends_nothing():
    reports, model = Reports([Target("engine 2", "http://127.0.0.1:1")], 5), Model()
    with pytest.raises(SyncError, match="could not load the weights.*rank 0: AttributeError"):
        loaded(model, reports, {"nowhere": torch.ones(1)})
    assert loaded(model, reports, {})["error"] is None, "said once"
