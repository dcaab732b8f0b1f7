"""Claude Code as the agent of a run: it asks the policy as it would ask Anthropic's service, and uses its own tools.

    npm install -g @anthropic-ai/claude-code
    miles run plugins/miles-tools/examples/claude_code.toml
"""

import json
import os
import subprocess
import tempfile

ALLOWED = "Bash(expr:*)"
"""What it may run without being asked. Its tools run on this machine, outside of any sandbox: allow with care."""


def claude_code(base_url, api_key, messages, label):
    """1 where its last word has the right number, and how many turns it took."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "HOME": folder, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                       "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": api_key}
        done = subprocess.run(
            ["claude", "-p", messages[-1]["content"], "--model", "miles", "--output-format", "json",
             "--system-prompt", "Answer with a number.", "--tools", "Bash", "--allowedTools", ALLOWED],
            cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    return {"reward": float(label in answer["result"]), "turns_counted": answer["num_turns"]}
