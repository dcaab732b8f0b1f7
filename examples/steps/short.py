"""A scorer of one file: 1 for an empty answer, 0 for one of 8 tokens or more."""

from miles_core import hookimpl


class Short:
    """Rewards short answers."""

    @hookimpl(name="short")
    def reward(self, sample):
        return max(0.0, 1 - sample.response_length / 8)
