"""Reads the arguments of SGLang and of its routers as syntax trees. `surface` caches what this returns.

    python -m miles_sglang.source SITE-PACKAGES > server_args.toml

writes the bundled list from an environment that has both sglang and smg.
"""

from __future__ import annotations

import ast
import json
import operator
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from miles_core.config.options import brief
from miles_core.errors import ConfigError
from miles_sglang.surface import Field, read, usual, version_of

SCALARS = ("int", "float", "bool", "str")
PARSERS = {"human_readable_int": "int", "_non_negative_int": "int", "int": "int", "float": "float"}
"""Callables that turn a word into a number; any other leaves it a word."""
ARITHMETIC = {ast.Mult: operator.mul, ast.Pow: operator.pow, ast.Add: operator.add}


def server_args(file: Path) -> tuple[dict[str, Field], dict[str, list]]:
    """The fields of ServerArgs that a flag can express, and the old flags that stand for one value of a field.

    A field is declared as `name: A[type, "help" or Arg(...)] = default`, in ServerArgs or, since 0.5.20, in a class of
    arg_groups/fields; add_cli_args has the flags of the few that are not, of all in early versions, and old ones.

    Raises:
        ConfigError: there are no fields where these versions have them.
    """
    tree = _parse(file)
    constants, kind = _constants(tree), _class(tree, "ServerArgs", file)
    fields: dict[str, Field] = {}
    hidden: dict[str, Field] = {}
    for node, known in [*((node, constants) for node in kind.body), *_composed(file.parent / "arg_groups", constants)]:
        if isinstance(node, ast.AnnAssign):
            field, shown = _declared(node, known)
            if field is not None:
                (fields if shown else hidden)[field.name] = field
    if not fields and not hidden:
        raise ConfigError("ServerArgs declares no arguments where Miles looks for them", who=str(file),
                          fix="install sglang 0.5.16", code="server-arguments-missing")
    old: dict[str, list] = {}
    for call, keywords in _add_argument_calls(_method(kind, "add_cli_args", file)):
        flag, *more = map(_flag, call.args)
        names = [word[2:].replace("-", "_") for word in (flag, *more)]
        names = [_evaluate(keywords["dest"], constants)] if "dest" in keywords else names
        name = next((one for one in names if one in hidden), names[0])
        if name in hidden:
            fields[name] = replace(hidden.pop(name), flag=flag, also=tuple(more), help=_help(keywords.get("help")))
        elif name in fields and "const_value" in keywords:
            old[flag] = [name, _word(keywords["const_value"])]
        elif name in fields and "new_flag" in keywords:
            fields[name] = replace(fields[name], also=(*fields[name].also, flag))
    return fields, old


def _composed(groups: Path, constants: Mapping[str, object]) -> Iterator[tuple[ast.stmt, Mapping[str, object]]]:
    """Declarations of arg_groups/fields, each with the names for plain data that it may refer to."""
    choices = groups / "choices.py"
    shared = _constants(_parse(choices)) if choices.is_file() else {}
    for path in sorted(groups.glob("fields/*.py")):
        tree = _parse(path)
        known = {**constants, **shared, **_constants(tree)}
        yield from ((node, known) for kind in tree.body if isinstance(kind, ast.ClassDef) for node in kind.body)


def router_args(file: Path) -> tuple[dict[str, Field], dict[str, list]]:
    """The flags of a router's add_cli_args, without the prefix that they have beside a server's.

    Flags that take a URL and a port each, for prefill and decode servers, are left out.
    """
    tree = _parse(file)
    constants, kind = _constants(tree), _class(tree, "RouterArgs", file)
    defaults = {node.target.id: node.value for node in kind.body if isinstance(node, ast.AnnAssign)}
    fields: dict[str, Field] = {}
    for call, keywords in _add_argument_calls(_method(kind, "add_cli_args", file)):
        flags = [_flag(word) for word in call.args]
        name = flags[0][2:].replace("-", "_")
        action = ast.unparse(keywords["action"]).strip("'\"") if "action" in keywords else ""
        several = "nargs" in keywords
        if flags[0].startswith("--router-") and isinstance(call.args[0], ast.Constant) or (
                action == "append" and several):
            continue
        expression = keywords.get("default", defaults.get(name))
        if isinstance(expression, ast.Attribute):  # RouterArgs.policy
            expression = defaults.get(expression.attr)
        default = _default(expression, constants)
        form = {"store_true": "switch", "append": "repeat"}.get(action, "words")
        form = "pair" if action.endswith("BooleanOptionalAction") else form
        text = "bool" if form in ("switch", "pair") else PARSERS.get(ast.unparse(keywords.get("type", ast.Name("str"))),
                                                                     "str")
        text = _with_choices(text, keywords.get("choices"), constants)
        if several or action in ("append", "extend"):
            text, default = f"list[{text}]", default or []
        elif form != "switch" and (default is None or isinstance(default, list)):  # a list in one word, by commas
            text, default = f"{text} | None", None
        default = bool(default) if form == "switch" else default
        fields[name] = Field(name, text, default, flags[0], form, tuple(flags[1:]), _help(keywords.get("help")))
    return fields, {}


def _declared(node: ast.AnnAssign, constants: Mapping[str, object]) -> tuple[Field | None, bool]:
    """The field of one declaration, and whether its annotation gives it a flag."""
    name, annotation, keywords = node.target.id, node.annotation, {}
    shown = isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "A"
    if shown:
        annotation, *about = annotation.slice.elts
        described = [one for one in about if not isinstance(one, ast.Call) or ast.unparse(one.func) == "Arg"]
        for one in described:
            keywords |= {word.arg: word.value for word in one.keywords} if isinstance(one, ast.Call) else {"help": one}
        shown = "no_cli" not in keywords
    parser = ast.unparse(keywords["type_parser"]) if "type_parser" in keywords else ""
    several = "nargs" in keywords and _evaluate(keywords["nargs"], constants) != "?" or "action_kwargs" in keywords
    kinds = _kinds(annotation, json=parser == "json.loads")
    none = "None" in kinds
    text = " | ".join(kind for kind in kinds if kind != "None")
    if "json" in parser or (parser.startswith("parse_") and not text):
        form = "json"
        text = text if "list" in text else "dict[str, object]"
    elif text == "bool":
        form = "pair" if "action" in keywords else "switch"
    else:
        form = "words"
        text = "list[str]" if several else PARSERS.get(parser, text)
    if not text:
        return None, False
    text = _with_choices(text, keywords.get("choices"), constants)
    flag = _evaluate(keywords["cli_name"], constants) if "cli_name" in keywords else "--" + name.replace("_", "-")
    also = tuple(_evaluate(keywords["aliases"], constants)) if "aliases" in keywords else ()
    field = Field(name, text + " | None" * none, _default(node.value, constants), flag, form, also,
                  _help(keywords.get("help")))
    return field, shown


def _kinds(node: ast.expr, *, json: bool) -> list[str]:
    """The alternatives of an annotation that a word on the command line can be."""
    text = ast.unparse(node)
    if text == "None" or text in SCALARS:
        return [text]
    if not isinstance(node, ast.Subscript):
        return []
    head = ast.unparse(node.value).lower()
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if head == "optional":
        return [*_kinds(inner[0], json=json), "None"]
    if head == "union":
        kinds = [kind for part in inner for kind in _kinds(part, json=json)]
        return list(dict.fromkeys(kinds))[: None if json else 1]
    if head == "literal":
        values = [ast.literal_eval(part) for part in inner]
        return [f"Literal[{', '.join(repr(v) for v in values if v is not None)}]"] + ["None"] * (None in values)
    if head in ("list", "set"):
        kinds = _kinds(inner[0], json=json)
        return [f"list[{kinds[0] if kinds else 'object'}]"]
    return ["dict[str, object]"] if head == "dict" and json else []


def _with_choices(text: str, node: ast.expr | None, constants: Mapping[str, object]) -> str:
    """The type with the choices that argparse is given, where they are plain data."""
    if node is None or not (text == "str" or text.startswith("Literal")):
        return text
    try:
        choices = _evaluate(node, constants)
    except ValueError:
        return text
    words = sorted(choices) if isinstance(choices, set) else choices
    return f"Literal[{', '.join(repr(word) for word in words if word is not None)}]"


def _default(node: ast.expr | None, constants: Mapping[str, object]) -> object:
    """The default as plain data; None where there is none or it is computed."""
    try:
        value = None if node is None else _evaluate(node, constants)
    except ValueError:
        return None
    return list(value) if isinstance(value, tuple) else value


def _evaluate(node: ast.expr, constants: Mapping[str, object]) -> object:
    """The value of an expression of literals, the module's constants and a little arithmetic.

    Raises:
        ValueError: it needs more than that.
    """
    match node:
        case ast.Name(id=name) if name in constants:
            return constants[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            return ARITHMETIC[type(op)](_evaluate(left, constants), _evaluate(right, constants))
        case ast.List(elts=items) if any(isinstance(item, ast.Starred) for item in items):
            return [word for item in items for word in (
                _evaluate(item.value, constants) if isinstance(item, ast.Starred) else [_evaluate(item, constants)])]
        case ast.Subscript(value=base, slice=index):
            return _evaluate(base, constants)[_evaluate(index, constants)]
        case ast.Call(func=ast.Name(id="list"), args=[inner]):
            return list(_evaluate(inner, constants))
        case ast.Call(keywords=[ast.keyword(arg="default_factory", value=factory)]):
            return _evaluate(factory.body, constants) if isinstance(factory, ast.Lambda) else (
                {"list": [], "dict": {}}.get(ast.unparse(factory)))
    return ast.literal_eval(node)


def _constants(tree: ast.Module) -> dict[str, object]:
    """The module's names for plain data, which choices and defaults refer to."""
    constants: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            try:
                constants[node.targets[0].id] = _evaluate(node.value, constants)
            except (ValueError, TypeError):
                continue
    return constants


def _add_argument_calls(method: ast.FunctionDef) -> Iterator[tuple[ast.Call, dict[str, ast.expr]]]:
    for node in ast.walk(method):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            yield node, {keyword.arg: keyword.value for keyword in node.keywords}


def _flag(node: ast.expr) -> str:
    """A flag as written, or `f"--{prefix}policy"` without the prefix."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
    return str(ast.literal_eval(node))


def _word(node: ast.expr) -> object:
    """A constant, or the name of an enum's member, whose value is its name in small letters."""
    return node.attr.lower() if isinstance(node, ast.Attribute) else ast.literal_eval(node)


def _help(node: ast.expr | None) -> str:
    def text(part: ast.expr | None) -> str:
        match part:
            case ast.Constant(value=str() as words):
                return words
            case ast.JoinedStr(values=parts):
                return "".join(text(one) for one in parts)
            case ast.BinOp(left=left, right=right):
                return text(left) + text(right)
        return ""

    return brief(text(node))


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        raise ConfigError("the arguments cannot be read from the source", got=error, who=str(file),
                          fix="install sglang 0.5.16 and smg 1.13.0", code="server-arguments-unreadable") from error


def _class(tree: ast.Module, name: str, file: Path) -> ast.ClassDef:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise ConfigError(f"there is no class {name}", code="source-class-missing", who=str(file),
                      fix="install sglang 0.5.16 and smg 1.13.0")


def _method(kind: ast.ClassDef, name: str, file: Path) -> ast.FunctionDef:
    for node in kind.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise ConfigError(f"{kind.name} has no method {name}", code="source-method-missing", who=str(file),
                      fix="install sglang 0.5.16 and smg 1.13.0")


def bundle(site: Path) -> str:
    """server_args.toml of the packages in `site`."""
    lines = ["# Arguments of SGLang's server and of the router smg, for a Python that has neither. Generated by",
             "# python -m miles_sglang.source SITE-PACKAGES > server_args.toml"]
    for package in ("sglang", "smg"):
        data = read(package, site / package)
        lines += ["", f"[{package}]", f'version = "{version_of(site / package)}"', "", f"[{package}.fields]"]
        lines += [f"{name} = {_entry(entry)}" for name, entry in data["fields"].items()]
        if data["old"]:
            lines += ["", f"[{package}.old]", *(f"{flag} = {json.dumps(pair)}" for flag, pair in data["old"].items())]
    return "\n".join([*lines, ""])


def _entry(entry: Mapping[str, object]) -> str:
    """One field as an inline table, without its help and without what `usual` says."""
    shown = {key: value for key, value in entry.items() if key not in ("name", "help")}
    for key, plain in usual(entry["name"], entry["type"]).items():
        if shown[key] in (plain, ()):
            del shown[key]
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in shown.items()) + " }"


if __name__ == "__main__":
    sys.stdout.write(bundle(Path(sys.argv[1])))
