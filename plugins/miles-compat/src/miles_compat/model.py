"""Model providers of Miles: they are asked for the model that the trainer builds, and may change it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from miles_core.errors import HookError

if TYPE_CHECKING:
    import torch

    from miles_compat.args import Args

WHO = "custom_model_provider_path"
CHUNK: ContextVar[Any] = ContextVar("the part of a model that a provider is asked for")


def provided(function: Callable[..., Any], args: Args, chunk: torch.nn.Module) -> torch.nn.Module:
    """The part of a model that a provider gives: the one that is built here, changed.

    Raises:
        HookError: another model, whose head and weights the trainer does not know.
    """
    token = CHUNK.set(chunk)
    try:
        where: Any = chunk
        named = {"pre_process": where.pre_process, "post_process": where.post_process}
        if "vp_stage" in inspect.signature(function).parameters:
            named["vp_stage"] = getattr(where, "vp_stage", None)
        found: torch.nn.Module = function(**named)
    finally:
        CHUNK.reset(token)
    if not isinstance(found, type(chunk)):
        raise HookError("the provider should give the model that is built here, changed or wrapped by a subclass",
                        code="model-provider-return",
                        got=type(found).__name__, who=WHO, fix="begin with miles.backends.megatron_utils."
                        "model_provider.get_model_provider_func(args)(...); an architecture is the hook model_spec")
    return found


def get_model_provider_func(args: object, role: str = "actor") -> Callable[..., Any]:
    """A provider that gives the model as it is built here.

    Raises:
        HookError: it is called by something else than a provider that the run calls.
    """
    def provider(*given: object, **named: object) -> Any:
        chunk = CHUNK.get(None)
        if chunk is None:
            raise HookError("models are built by the trainer", code="model-provider-in-driver",
                            who="get_model_provider_func",
                            fix="call it in the function of --custom-model-provider-path")
        return chunk
    return provider
