"""Routes are the same however an answer is cut on its way, and as small as their numbers allow."""

import base64

import numpy as np
import pytest
import torch
from miles_sglang.routes import Body, decoded
from miles_sglang.server_extension.routes.miles_routes import narrowed

HEAD, TAIL = b'{"text":"says \\"routed_experts\\":\\"AAAA\\" itself","routed_experts":"', b'","cached_tokens":4}'
ROUTES = np.arange(120, dtype=np.int32)


def encoded(routes):
    return base64.b64encode(routes.tobytes())


@pytest.mark.parametrize("size", [1, 5, 16, 17, 100, 1000])
def test_an_answer_may_be_cut_anywhere(size):
    answer, body = HEAD + encoded(ROUTES) + TAIL, Body()
    for at in range(0, len(answer), size):
        body.feed(answer[at:at + size])
    assert body.rest == HEAD + TAIL and body.routes.tolist() == ROUTES.tolist() and body.routes.dtype == np.uint8


@pytest.mark.parametrize("answer", [b'{"text":"x"}', HEAD + TAIL, HEAD + encoded(ROUTES)], ids=["none", "empty", "cut"])
def test_an_answer_without_routes_has_none(answer):
    body = Body()
    body.feed(answer)
    assert body.routes is None


@pytest.mark.parametrize(("value", "dtype"), [(255, np.uint8), (256, np.int16), (-1, np.int16)])
def test_numbers_are_as_narrow_as_all_of_them_allow(value, dtype):
    """Also where it is one of the last that arrive that needs the room."""
    routes = np.append(ROUTES, np.int32(value))
    assert decoded(encoded(routes)).dtype == dtype
    body = Body()
    for part in (HEAD, encoded(routes)[:400], encoded(routes)[400:] + TAIL):
        body.feed(part)
    assert body.routes.dtype == dtype and body.routes.tolist() == routes.tolist()


@pytest.mark.parametrize("value", [-2, 2**15 - 1, 2**20])
def test_what_no_expert_is_called_is_refused(value):
    with pytest.raises(ValueError, match="no numbers of experts"):
        decoded(encoded(np.append(ROUTES, np.int32(value))))


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
@pytest.mark.parametrize(("last", "dtype", "each"), [(255, np.uint8, 1), (256, np.int16, 2), (-1, np.int16, 2),
                                                     (2**15 - 2, np.int16, 2)])
def test_what_a_server_has_narrowed_is_read_as_it_was(size, last, dtype, each):
    routes = torch.from_numpy(np.append(ROUTES, np.int32(last)))
    text, body = encoded(narrowed(routes.reshape(11, 11)).numpy()), Body()
    assert len(base64.b64decode(text)) == 4 + each * len(routes)
    answer = HEAD + text + TAIL
    for at in range(0, len(answer), size):
        body.feed(answer[at:at + size])
    for read in (body.routes, decoded(text.decode())):
        assert read.dtype == dtype and read.tolist() == routes.tolist()


@pytest.mark.parametrize("value", [-2, 2**15 - 1, 2**20])
def test_a_server_leaves_what_no_expert_is_called_to_its_reader(value):
    with pytest.raises(ValueError, match="no numbers of experts"):
        decoded(encoded(narrowed(torch.from_numpy(np.append(ROUTES, np.int32(value)))).numpy()))
