"""Load: import what the plan names, and nothing else; compare the code with what its manifest stated."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

from miles_core.config.options import Option, options_of
from miles_core.errors import ManifestError, PluginError
from miles_core.plugins.manifest import Manifest, Offer


def load(manifest: Manifest) -> type:
    """The plugin's class, which is what its manifest states.

    Raises:
        PluginError: its module fails to import; names plugin, module and cause.
        ManifestError: the class does not have what the manifest states.
    """
    kind = imported(manifest)
    compare(manifest, kind)
    return kind


def imported(manifest: Manifest) -> type:
    """The plugin's class.

    Raises:
        PluginError: its module fails to import, or has no such class.
    """
    where, _, name = manifest.plugin.rpartition(":")
    try:
        module = import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
        return getattr(module, name)
    except (Exception, SystemExit) as error:
        raise PluginError(f"plugin {manifest.name!r} cannot be imported", code="plugin-import-failed",
                          got=f"{type(error).__name__}: {error}", who=where,
                          fix=f"install what it needs, or remove --plugin {manifest.name}") from error


def compare(manifest: Manifest, kind: type) -> None:
    """
    Raises:
        ManifestError: the class does not have the hooks and options that the manifest states.
    """
    offers = {Offer(hook, part or manifest.name, method) for method, (hook, part, _) in marked(kind).items()}
    differ = sorted(f"{o.hook}:{o.name}" for o in offers ^ set(manifest.offers))
    made = options_class(kind)
    code = {} if made is None else options_of(manifest.name, made)
    for name in [*manifest.options, *(code.keys() - manifest.options.keys())]:
        stated, has = (_declaration(options.get(name)) for options in (manifest.options, code))
        if stated != has:
            differ.append(f"option {name}: {stated} in the manifest, {has} in the code")
    if differ:
        raise ManifestError(f"plugin {manifest.name!r} does not match its manifest", code="manifest-out-of-date",
                            got="; ".join(differ), who=manifest.plugin,
                            fix="run `miles plugins manifest --write` in its project")


def options_class(kind: type) -> type | None:
    """What the constructor's argument `options` is annotated with; only this annotation is looked up, as others may
    name types that are imported for checkers alone."""
    begin = inspect.getattr_static(kind, "__init__")
    annotation = getattr(begin, "__annotations__", {}).get("options")
    return begin.__globals__[annotation] if isinstance(annotation, str) else annotation


def _declaration(option: Option | None) -> str:
    """All that a manifest says of an option, but its help."""
    if option is None:
        return "nothing"
    flags = " ".join(["", *option.flags, *option.off])
    return f"{ast.unparse(ast.parse(option.type))} = {_plain(option.default)!r}{flags}"


def _plain(value: object) -> object:
    """As a manifest's TOML has it."""
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def marked(kind: type | None) -> dict[str, tuple[str, str | None, tuple[str, ...]]]:
    """Method name -> (hook, offered name, refused marker arguments) of a plugin class."""
    members = {name: getattr(kind, name, None) for name in dir(kind)} if kind is not None else {}
    return {name: item.miles_hook for name, item in members.items() if hasattr(item, "miles_hook")}


def import_file(path: Path) -> ModuleType:
    """Import a single file under a name of its own, once."""
    name = f"miles_plugin_file_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
