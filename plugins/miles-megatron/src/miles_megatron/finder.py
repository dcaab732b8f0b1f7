"""The way into `megatron.core`: whoever imports it first, a plugin or the trainer, gets it as patched by cpu.py.

Light, so that the plugin's module can install it before the run's other plugins are imported: cpu.py, with torch, is
imported along with the first module of megatron.core.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str):
        from miles_megatron import cpu

        if fullname == "megatron.core":
            cpu.install()  # its warnings about CUDA do not matter on a CPU
        path = self.get_filename(fullname)
        source = importlib.util.decode_source(self.get_data(path))
        source_patched = cpu.patched(fullname, source)
        # An untouched module may use its cache; a patched one must never be written to it.
        if source_patched == source:
            return super().get_code(fullname)
        return compile(source_patched, path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if not name.startswith("megatron.core"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def installed() -> bool:
    """Whether imports of megatron.core go this way."""
    return any(isinstance(one, _Finder) for one in sys.meta_path)


def install() -> None:
    """Let imports of megatron.core go this way; what was imported before stays what it is."""
    if not installed() and "megatron.core" not in sys.modules:
        sys.meta_path.insert(0, _Finder())
