"""`miles plugins check | why | graph | lock | diff`: what a run is composed of, from the words of `miles run`."""

from __future__ import annotations

from pathlib import Path

import click

from miles_core.cli.run import split
from miles_core.errors import PluginError, UnknownKeyError

_RUN = {"ignore_unknown_options": True, "allow_extra_args": True}
_WORDS = "[RUN_FILE] [FLAGS]..."


@click.command("check", context_settings=_RUN)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar=_WORDS)
def check(words: tuple[str, ...]) -> None:
    """Whether a run's plugins fit each other: owners, requirements, options; then every hook is bound for every role.

    \b
      miles plugins check examples/moe.toml --plugin r3 --plugin fp8
    """
    from miles_core.hookspecs import ROLES
    from miles_core.plugins import bind
    from miles_core.plugins.plan import prepare

    plan = prepare(*split(words))
    bind.check_roles_apart([bind.bind(plan.selected, plan.config, role) for role in ROLES])
    names = [one.manifest.name for one in plan.selected if not one.ours]
    click.echo(f"{len(names)} plugins fit each other: {', '.join(names) or 'none beside the core'}")
    for note in plan.notes:
        click.echo(f"note: {note}")


@click.command("why", context_settings=_RUN)
@click.argument("key")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar=_WORDS)
def why(key: str, words: tuple[str, ...]) -> None:
    """Who set KEY (table.name, or a name that one table has), from the default to the last word.

    \b
      miles plugins why rollout.num_rollout examples/demo.toml --num-rollout 5
      miles plugins why lr examples/demo.toml
    """
    import difflib

    from miles_core.config.load import declared, load
    from miles_core.plugins.plan import prepare

    run_file, flags = split(words)
    plan = prepare(run_file, flags)
    stated = plan.to_json()
    values, origins = stated["options"], stated["origins"]
    if key not in values:
        name = key.removeprefix("--").replace("-", "_")
        meant = [one for one in values if one.rpartition(".")[2] == name]
        near = meant or difflib.get_close_matches(key, values, 1, 0.5)
        if len(meant) != 1:
            fix = f"did you mean {' or '.join(near)}?" if near else "`miles run --plan` lists the keys that are set"
            raise UnknownKeyError(f"the run has no key {key!r}", code="composition-key-unknown", fix=fix)
        key = meant[0]
        click.echo(key)
    assigned = load(run_file, flags).assigned.get(key, [])
    table, _, name = key.partition(".")
    option = declared(plan.selected).get(table, {}).get(name)
    default = None if option is None else option.default  # another program's, whose default is its own
    chain = [(default, "default"), *((value, str(origin)) for value, origin in assigned)]
    if origins[key] not in {origin for _, origin in chain}:
        chain.append((values[key], f"derived: {origins[key]}"))
    width = max(len(repr(value)) for value, _ in chain)
    for number, (value, origin) in enumerate(chain):
        click.echo(f"{'->' if number == len(chain) - 1 else '  '} {value!r:<{width}}  {origin}")


@click.command("graph", context_settings=_RUN)
@click.option("--dot", is_flag=True, help="As a graph for Graphviz.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar=_WORDS)
def graph(dot: bool, words: tuple[str, ...]) -> None:
    """Hooks in call order, by role: who implements each, and which named parts the run picked.

    \b
      miles plugins graph examples/demo.toml
      miles plugins graph examples/demo.toml --dot | dot -Tsvg > hooks.svg
    """
    from miles_core.hookspecs import ROLES
    from miles_core.plugins.plan import prepare
    from miles_core.plugins.select import all_specs

    plan = prepare(*split(words))
    order = plan.to_json()["order"]
    picked: dict[str, list[str]] = {}
    for choice in plan.choices:
        picked.setdefault(choice.hook, []).append(f"{choice.plugin} ({choice.name})")
    edges = [(spec.role, name, spec.kind, picked.get(name, []) if spec.kind == "named" else order.get(name, []))
             for name, spec in all_specs().items()]
    if dot:
        click.echo("digraph hooks {\n  rankdir=LR; node [shape=box];")
        for role, name, _, who in edges:
            for number, one in enumerate(who):
                label = f' [label="{number + 1}"]' if len(who) > 1 else ""
                click.echo(f'  "{role}" -> "{name}" -> "{one}"{label};')
        click.echo("}")
        return
    for role in ("every", *ROLES):
        click.echo(f"{role} role")
        for owner, name, kind, who in edges:
            if owner == role and who:
                click.echo(f"  {name:<20}{kind:<9}{' -> '.join(who) if kind != 'named' else ', '.join(who)}")


@click.command("lock", context_settings=_RUN)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Default: print it.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar=_WORDS)
def lock(out: Path | None, words: tuple[str, ...]) -> None:
    """Write what a run is made of: versions and digests of its plugins, their order, owners, every value.

    \b
      miles plugins lock examples/demo.toml --out plugins.lock
      miles run examples/demo.toml --locked plugins.lock
    """
    from miles_core.plugins import lock as locks
    from miles_core.plugins.plan import prepare

    text = locks.text(locks.of(prepare(*split(words))))
    if out is None:
        click.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
        click.echo(f"wrote {out}")


@click.command("diff")
@click.argument("first", type=click.Path(exists=True, path_type=Path))
@click.argument("second", type=click.Path(exists=True, path_type=Path))
def diff(first: Path, second: Path) -> None:
    """How two locks, or what two runs were made of, differ; the exit status is 2 where they do.

    \b
      miles plugins diff plugins.lock runs/demo
    """
    from miles_core.plugins import lock as locks

    differences = locks.differences(locks.read(first), locks.read(second))
    for line in differences:
        click.echo(line)
    if differences:
        raise PluginError(f"{len(differences)} difference{'s'[:len(differences) != 1]}", code="compositions-differ",
                          who=f"{first}, {second}")
    click.echo("the same")
