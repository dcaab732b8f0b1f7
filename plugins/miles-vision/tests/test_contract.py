import atexit
import json
import shutil
import tempfile
from pathlib import Path

from miles_testing import plugin_contract, tiny_checkpoint


def checkpoint():
    """What a plan looks at of a model that reads images."""
    folder = Path(tempfile.mkdtemp(prefix="miles-vision-")) / "model"
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    shutil.copytree(tiny_checkpoint(), folder)
    said = json.loads((folder / "config.json").read_text()) | {"image_token_id": 261, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(said))
    (folder / "preprocessor_config.json").write_text("{}")
    return folder


TestContract = plugin_contract(
    "vision", flags=["--trainer", "fsdp", "--multimodal-keys", '{"image": "pictures"}'], checkpoint=checkpoint(),
    without=["generate_request"])  # it loads the model's processor
