import sys
from pathlib import Path

from miles_testing import plugin_contract

MODEL = Path(__file__).parents[3] / "examples" / "arithmetic" / "tiny-qwen3"
SERVER = [sys.executable, str(Path(__file__).with_name("wire_server.py"))]

TestContract = plugin_contract("reward-model", without=["reward"], options={
    "reward_model_path": str(MODEL), "class_index": 0, "server_command": SERVER})
