"""Manifests: what a plugin states about itself, known without importing it.

A packaged plugin carries the statement as `miles-plugin.toml` beside its top-level package; a single file and the
core's own parts are read from their source by AST. Both give the same Manifest, and a test holds them together.
"""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from miles_core.config.options import Option, words_of
from miles_core.errors import ManifestError
from miles_core.reading import reading

FILE = "miles-plugin.toml"
LISTS = ("flags", "off", "within")
"""What an option has beside type, default and help."""
WORDS = ("provides", "requires", "conflicts", "called_for")
"""Tuples of words in a plugin's class body."""
STATED = ("implies", "precision", "presets")
"""Tables there."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One hook implementation: the hook, for named hooks the name offered, and the method that does it.

    Args:
        help: of commands and conversions, the line that `miles --help` and `miles convert --help` show.
        line: of the method, where it was read from its source.
    """

    hook: str
    name: str
    method: str
    help: str = field(default="", compare=False)
    line: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Manifest:
    """What a plugin is.

    Args:
        name: entry-point name = option table = state key.
        plugin: "module:Class", or "path/to/file.py:Class".
        api: the plugin API it was written for.
        provides, requires, conflicts: capabilities, for checks before anything is imported.
        called_for: of official plugins, what enables them without a word of the user: "quantization_config.METHOD", or
            the dotted key of an option that is set.
        hookspecs: the module in which the package declares hooks of its own; imported for a plan, so it is light.
        default: of official plugins, whether they take part in every run where they are installed.
        implies: dotted key -> value that the run gets with the plugin, unless somebody says otherwise.
        presets: name -> what `--preset NAME` stands for; see plugins/presets.py.
        precision: row of the plan's table of precision -> what the plugin makes of it, or several texts, of which the
            first counts whose words in braces are all set.
    """

    name: str
    plugin: str
    summary: str = ""
    api: int = 1
    offers: tuple[Offer, ...] = ()
    options: dict[str, Option] = field(default_factory=dict)
    provides: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    called_for: tuple[str, ...] = ()
    hookspecs: str = ""
    default: bool = False
    implies: dict[str, object] = field(default_factory=dict)
    precision: dict[str, str | list[str]] = field(default_factory=dict)
    presets: dict[str, dict] = field(default_factory=dict)


def of_source(path: Path, *, name: str | None = None, module: str | None = None) -> Manifest:
    """Read a plugin's class, hooks, names and options from its source, which is not executed.

    The plugin is the one class of the file that has methods marked with `hookimpl`.

    Raises:
        ManifestError: no such file, a syntax error, no plugin class or several, options that are not literals.
    """
    with reading(str(path), ManifestError):  # nested so deep that Python gives up, or no text at all
        try:
            return _of_source(path.read_text(encoding="utf-8"), path, name, module)
        except OSError as error:
            raise ManifestError("the plugin file cannot be read", got=error.strerror, who=str(path),
                                fix="check the path", code="plugin-file-unreadable") from None


@functools.cache
def _of_source(text: str, path: Path, name: str | None, module: str | None) -> Manifest:
    try:
        tree = ast.parse(text, str(path))
    except SyntaxError as error:
        raise ManifestError("the plugin file is not valid Python", got=f"line {error.lineno}: {error.msg}",
                            code="plugin-file-not-python", who=str(path), fix="correct the syntax error") from None
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    plugins = [node for node in classes.values() if any(_marker(f) is not None for f in _functions(node))]
    if len(plugins) != 1:
        raise ManifestError("a plugin file needs exactly one class with methods marked @hookimpl",
                            code="plugin-class-count", got=", ".join(p.name for p in plugins) or "none", who=str(path),
                            fix="mark the methods of one class with miles_core.hookimpl")
    node = plugins[0]
    constants = {ast.unparse(t): s.value for s in node.body if isinstance(s, ast.Assign | ast.AnnAssign)
                 for t in (s.targets if isinstance(s, ast.Assign) else [s.target])}
    name = str(name or _literal(constants.get("name"), path) or path.stem.replace("_", "-"))
    words = {key: words_of(_literal(constants.get(key), path) or ()) for key in WORDS}
    tables = {key: dict(_literal(constants.get(key), path) or {}) for key in STATED}
    return Manifest(
        name=name, plugin=f"{module or path}:{node.name}",
        summary=(ast.get_docstring(node) or ast.get_docstring(tree) or "").partition("\n")[0],
        api=_literal(constants.get("api"), path) or 1, hookspecs=_literal(constants.get("hookspecs"), path) or "",
        default=bool(_literal(constants.get("default"), path)),
        offers=tuple(_offer(f, _marker(f), name, path) for f in _functions(node) if _marker(f) is not None),
        options=_options(name, node, classes, path), **words, **tables)


def of_package(module: str, name: str, *, editable: bool = False) -> Manifest:
    """Read the miles-plugin.toml of an installed plugin without importing any of it.

    Args:
        module: the entry point's "package.module:Class".
        editable: it is installed from a checkout: a module that was edited since the manifest was written is read
            itself.

    Raises:
        ManifestError: the package or its manifest is missing or malformed.
    """
    where = module.partition(":")[0]
    package = where.partition(".")[0]
    if (folder := folder_of(package)) is None:
        raise ManifestError(f"the package {package!r} of plugin {name!r} is missing", code="plugin-package-missing",
                            fix=f"reinstall it: pip install --force-reinstall miles-{name}")
    path = folder / FILE
    source = folder.joinpath(*where.split(".")[1:]).with_suffix(".py")
    if editable and source.is_file() and path.is_file() and source.stat().st_mtime_ns > path.stat().st_mtime_ns:
        return of_source(source, name=name, module=where)
    try:
        return of_toml(path.read_text(encoding="utf-8"))
    except OSError:
        raise ManifestError(f"plugin {name!r} has no manifest", code="manifest-missing", who=str(path),
                            fix="run `miles plugins manifest --write` in its project") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ManifestError(f"the manifest of plugin {name!r} cannot be read", code="manifest-unreadable",
                            got=str(error), who=str(path),
                            fix="run `miles plugins manifest --write` in its project") from None


def mentions(module: str, word: str) -> bool:
    """Whether the manifest of an installed plugin has a word in it; takes a tenth of the time of reading it."""
    folder = folder_of(module)
    path = None if folder is None else folder / FILE
    return path is not None and path.is_file() and word in path.read_text(encoding="utf-8", errors="replace")


def folder_of(module: str) -> Path | None:
    """The folder of the top-level package of a "package.module:Class"; None where there is none. Imports nothing."""
    spec = importlib.machinery.PathFinder.find_spec(module.partition(":")[0].partition(".")[0])
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


@functools.cache
def of_toml(text: str) -> Manifest:
    """The Manifest that a miles-plugin.toml states."""
    data = tomllib.loads(text)
    options = {key: Option(data["name"], key, o["type"], o.get("default"), o["help"],
                           **{name: tuple(o.get(name, ())) for name in LISTS})
               for key, o in data.get("options", {}).items()}
    offers = tuple(Offer(o["hook"], o["name"], o["method"], o.get("help", "")) for o in data.get("offers", ()))
    words = {key: tuple(data.get(key, ())) for key in WORDS}
    tables = {key: dict(data.get(key, {})) for key in STATED}
    return Manifest(data["name"], data["plugin"], data.get("summary", ""), data["api"], offers, options,
                    hookspecs=data.get("hookspecs", ""), default=data.get("default", False), **words, **tables)


def _functions(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]


def _marker(function: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.expr | None:
    return next((one for one in function.decorator_list
                 if ast.unparse(getattr(one, "func", one)).rpartition(".")[2] == "hookimpl"), None)


def _offer(function: ast.FunctionDef | ast.AsyncFunctionDef, marker: ast.expr, plugin: str, path: Path) -> Offer:
    hook, name = function.name, None
    if isinstance(marker, ast.Call):
        keywords = {k.arg: _literal(k.value, path) for k in marker.keywords}
        hook = _literal(marker.args[0], path) if marker.args else keywords.get("spec") or hook
        name = keywords.get("name")
    about = (ast.get_docstring(function) or "").partition("\n")[0] if hook in ("commands", "convert") else ""
    return Offer(hook, name or plugin, function.name, about, function.lineno)


def _options(table: str, node: ast.ClassDef, classes: dict[str, ast.ClassDef], path: Path) -> dict[str, Option]:
    """The options class is what the constructor's `options` parameter is annotated with."""
    argument = next((a for f in _functions(node) if f.name == "__init__" for a in f.args.args
                     if a.arg == "options"), None)
    if argument is None:
        return {}
    kind = argument.annotation.id if isinstance(argument.annotation, ast.Name) else None
    if kind not in classes:
        raise ManifestError(f"{node.name}.__init__ should annotate `options` with a dataclass of the same file",
                            code="options-not-annotated", got=kind, who=str(path),
                            fix="declare it there, with fields made by miles_core.option")
    options = {}
    for item in classes[kind].body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            call = item.value
            if not (isinstance(call, ast.Call) and call.args and len(call.args) == 2):
                raise ManifestError(f"option {item.target.id!r} should be declared as option(default, help)",
                                    code="option-not-declared", who=str(path),
                                    fix="for example option(0.2, 'One sentence.', flags=('--eps',))")
            default, text = (_literal(arg, path) for arg in call.args)
            more = {k.arg: words_of(_literal(k.value, path)) for k in call.keywords}
            options[item.target.id] = Option(table, item.target.id, ast.unparse(item.annotation), default, text, **more)
    return options


def _literal(node: ast.expr | None, path: Path) -> object:
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ManifestError("a plugin's hooks, names and options must be literals", code="declaration-not-literal",
                            got=ast.unparse(node), who=f"{path}, line {node.lineno}",
                            fix="write a literal: the file is read without being run") from None
