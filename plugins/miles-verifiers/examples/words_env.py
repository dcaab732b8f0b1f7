"""An environment of verifiers: say how many letters a word has. `words-env` is its id, as this file's name is.

A dictionary is a tool, served to each episode by a process of its own: a first answer may look a word up.
"""

import verifiers.v1 as vf

__all__ = ["Words"]
WORDS = ("apple", "bee", "cherry", "dog", "elephant", "fox", "giraffe", "hat")


class Word(vf.TaskData):
    word: str
    """What is asked for."""


class Dictionary(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def letters(self, word: str) -> str:
        """How many letters a word has."""
        return str(len(word))


class WordTaskConfig(vf.TaskConfig):
    dictionary: vf.ToolsetConfig | None = None
    """Of the tool; without, there is none."""


class CountLetters(vf.Task[Word, vf.State, WordTaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(str(len(self.data.word)) in (trace.last_reply or ""))

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))

    @classmethod
    def toolsets(cls, config: WordTaskConfig) -> list[vf.Toolset]:
        return [] if config.dictionary is None else [Dictionary(config.dictionary)]


class WordsConfig(vf.TasksetConfig):
    task: WordTaskConfig = WordTaskConfig()
    words: list[str] = list(WORDS)


class Words(vf.Taskset[CountLetters, WordsConfig]):
    def load(self):
        for word in self.config.words:
            yield CountLetters(Word(prompt=f"How many letters has {word}?", word=word), self.config.task)


if __name__ == "__main__":
    Dictionary.run()
