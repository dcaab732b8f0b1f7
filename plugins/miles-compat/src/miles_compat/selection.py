"""Functions that select from the buffer of groups that were called back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from miles_compat.sample import groups_lent
from miles_core.errors import HookError
from miles_core.types import Group

if TYPE_CHECKING:
    from miles_compat.args import Args


def selected(function: Callable[..., Any], args: Args, groups: Sequence[Group], rollout_id: int) -> list[Group]:
    """The group that the function picks, as a list; none where it picks none, so that a new prompt is sampled.

    The function is given a copy of the buffer, from which it may take what it returns.

    Raises:
        HookError: it does not answer with a list of lists of samples of the buffer.
    """
    with groups_lent(groups, "buffer_filter_path") as shown:
        of_sample = {id(one): group for group, found in zip(groups, shown, strict=True) for one in found}
        answer = function(args, rollout_id, [list(found) for found in shown], 1)
    try:
        return [of_sample[id(samples[0])] for samples in answer[:1]]
    except (TypeError, KeyError, IndexError):
        raise HookError("the function should return groups of the buffer", got=repr(answer)[:100],
                        who="buffer_filter_path", fix="a list of at most num_samples entries of `buffer`, not copies "
                        "of their samples; an empty list for none", code="buffer-filter-return") from None
