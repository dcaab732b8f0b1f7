"""A scorer with an option and with state: answers that a prompt has not had before are worth more."""

from dataclasses import dataclass

from miles_core import hookimpl, option


@dataclass(frozen=True, kw_only=True)
class NovelOptions:
    """What an answer is worth."""

    old: float = option(0.0, "Worth of an answer that came before in an earlier turn of its prompt.")


class Novel:
    """1 for an answer that its prompt has not had in an earlier group; a resumed run remembers them.

    It is async so that it runs on the event loop, one call after another, and a whole group is scored at once so that
    the answers of one group do not make each other old.
    """

    state_version = 1

    def __init__(self, options: NovelOptions):
        self.options = options
        self.seen = {}

    @hookimpl(name="novel")
    async def reward(self, samples):
        row = f"{samples[0].prompt.stream}:{samples[0].prompt.row}"
        before = set(self.seen.get(row, ()))
        self.seen[row] = sorted(before | {sample.text for sample in samples})
        return [self.options.old if sample.text in before else 1.0 for sample in samples]

    def state_dict(self):
        return {"seen": {row: list(texts) for row, texts in self.seen.items()}}

    def load_state_dict(self, state):
        self.seen = {row: list(texts) for row, texts in state["seen"].items()}
