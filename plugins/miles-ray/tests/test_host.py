"""Calls of hosts in Ray actors, without a Ray."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import ray
from miles_ray.host import RayHost

from miles_core.errors import TrainError
from miles_core.hosts import RankGroup


@pytest.mark.parametrize("error", ["ObjectStoreFullError", "OutOfDiskError"])
def test_an_object_store_that_is_full_is_named_and_no_actor_is_said_to_have_died(monkeypatch, error):
    """Of a group it was Ray's own error, without a remedy, and of one host the death of its actor."""
    def put(value):
        raise getattr(ray.exceptions, error)("no room")

    monkeypatch.setattr(ray, "put", put)
    nothing = SimpleNamespace(remote=lambda *args: None)
    host = RayHost("trainer rank 0", SimpleNamespace(make=nothing, ask=nothing), dict, ())
    for handle in (host, RankGroup("trainer", [host])):
        with pytest.raises(TrainError) as caught:
            asyncio.run(handle.call("take_batch", np.zeros(10)))
        assert caught.value.code == "ray-object-store-full" and caught.value.who == "trainer rank 0"
