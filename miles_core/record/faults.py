"""What befell a run, in words: for the terminal, the page and the log alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def _blocked(event: Mapping[str, object]) -> str:
    whose = f"plugin {event['plugin']}, hook {event['hook']}, " if event["plugin"] else ""
    return (f"the event loop has been blocked for {event['seconds']:.0f} s by {whose}{event['where']}; meanwhile "
            "nothing else goes on. Move blocking code into a thread (await asyncio.to_thread(...)). To end the run, "
            "send SIGTERM or Ctrl-C twice")


FAULTS: dict[str, Callable[[Mapping], tuple[str, str]]] = {
    "restart": lambda e: ("warning", f"restart {e['count']} of {e['most']} from the " + (
        f"last checkpoint in {e['resumes']}" if e["resumes"] else "start of the run") + f": {e['culprit']}"),
    "engine_lost": lambda e: ("warning", f"{e.get('engine')} is lost: {e.get('why')}"),
    "engine_compiles": lambda e: ("info", f"{e.get('engine')} does not answer while kernels are compiled "
                                          f"({e.get('what')}); it is waited for, up to {e.get('limit'):g} s"),
    "engine_stale": lambda e: ("warning", f"{e.get('engine')} answers from version {e.get('says')} and not from "
                                          f"{e.get('expected')}; it is not used until it has that one"),
    "engine_restarted": lambda e: ("warning", f"{e.get('engine')} serves again, restart {e.get('restarts')}"),
    "engine_recovered": lambda e: ("warning", f"a restarted engine has weight version {e.get('version')}"),
    "reader_lost": lambda e: ("warning", f"{e.get('reader')} is lost and is started again: {e.get('why')}"),
    "router_lost": lambda e: ("warning", f"the router is lost: {e.get('why')}"),
    "router_restarted": lambda e: ("warning", "the router serves again"),
    "loop_blocked": lambda e: ("warning", _blocked(e)),
    "request_failed": lambda e: ("warning", f"request {e.get('request')}, attempt {e.get('attempt')}: {e.get('why')}"),
}  # fmt: skip
"""Kind of event -> level and sentence."""
