"""What is read of the runs that are compared, for anything that a model may answer."""

import orjson
from miles_testing.kill_resume import trained


def test_an_answer_may_have_any_character(tmp_path):
    """Some end a line for str.splitlines, and stand in JSON as they are."""
    lines = [orjson.dumps({"prompt_uid": uid, "response": "\u0085 \u2028 \u2029 \x0b"}) for uid in (3, 4)]
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples/rollout_0000000.jsonl").write_bytes(b"\n".join([*lines, b""]))
    assert trained(tmp_path) == [[3, 4]]
