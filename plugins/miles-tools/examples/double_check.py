"""An agent that asks, asks once more whether that is right, and rewards each right answer.

It speaks HTTP by itself; any OpenAI client does as well: OpenAI(base_url=base_url, api_key=api_key).
"""

import json
import re
import urllib.request


def double_check(base_url, api_key, messages, label):
    """The reward and a figure: whether the second answer differs from the first."""

    def ask():
        request = urllib.request.Request(
            f"{base_url}/chat/completions", json.dumps({"model": "miles", "messages": messages}).encode(),
            {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            messages.append(json.load(answer)["choices"][0]["message"])
        return re.findall(r"\d+", messages[-1]["content"])[-1:]

    first = ask()
    messages.append({"role": "user", "content": "sure?"})
    second = ask()
    return {"reward": ((first == [label]) + (second == [label])) / 2, "changed": first != second}
