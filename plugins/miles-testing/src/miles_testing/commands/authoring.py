"""`miles plugins new | update-template | manifest`: for those who write plugins."""

from __future__ import annotations

from pathlib import Path

import click

FAMILY = "seed_oss"
"""A Llama with biases on q, k and v, which transformers knows and no package here builds."""


@click.command("manifest")
@click.argument("projects", nargs=-1, type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--write/--check", default=False, help="Write miles-plugin.toml, or compare it with the code (default).")
def manifest(projects: tuple[Path, ...], write: bool) -> None:
    """Write or check miles-plugin.toml of plugin projects (folders with a pyproject.toml).

    \b
      miles plugins manifest --write plugins/*
    """
    import tomllib

    from miles_core.errors import ManifestError
    from miles_core.plugins.manifest import FILE, of_source
    from miles_core.plugins.scan import GROUP
    from miles_testing.manifests import to_toml

    for project in projects:
        entries = tomllib.loads((project / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
        for name, value in entries.items():
            module = value.partition(":")[0]
            source = project / "src" / Path(*module.split(".")).with_suffix(".py")
            target = project / "src" / module.partition(".")[0] / FILE
            text = to_toml(of_source(source, name=name, module=module))
            if write:
                target.write_text(text)
                click.echo(f"wrote {target}")
            elif not target.is_file() or target.read_text() != text:
                raise ManifestError(f"the manifest of plugin {name!r} is not what its code says", who=str(target),
                                    fix=f"miles plugins manifest --write {project}", code="manifest-differs-from-code")


@click.command("new")
@click.argument("name")
@click.option("--hooks", default="reward", show_default=True, metavar="NAME,NAME...", help="Hooks to start with.")
@click.option("--family", is_flag=False, flag_value=FAMILY, metavar="[MODEL_TYPE]",
              help="A model family for the Megatron trainer instead of hooks, by its model_type in config.json; "
              f"default: {FAMILY}.")
@click.option("--distribution", help="Default: miles-plugin-NAME.")
@click.option("--summary", default="One sentence that describes the plugin.", help="One-sentence summary.")
@click.option("--author", default="Your Name", help="The author.")
@click.option("--part", help="Name under which a run selects the part; default: NAME.")
@click.option("--state", is_flag=True, help="The plugin has state to save in checkpoints.")
@click.option("--gpu-tests", is_flag=True, help="The plugin needs tests on GPUs.")
@click.option("--licence", type=click.Choice(["Apache-2.0", "MIT", "BSD-3-Clause"]), default="Apache-2.0",
              show_default=True)
@click.option("--template", metavar="SRC", help="Another template: a folder or a git repository.")
@click.option("--out", type=click.Path(path_type=Path), help="The project's folder; default: its distribution's name.")
def new(name: str, template: str | None, out: Path | None, **answers: object) -> None:
    """Create a plugin project called NAME: package, manifest, tests, README, workflow. Needs `pip install copier`.

    \b
      miles plugins new my-reward
      miles plugins new my-loss --hooks advantage,policy_loss --licence MIT
      miles plugins new counter --hooks reward --state
      miles plugins new arcee --family arcee

    `cookiecutter SRC` asks for the same values interactively.
    """
    from miles_testing import scaffold

    made = scaffold.new(name, template=template, out=out, answers={
        key: {True: "yes", False: "no"}.get(value, value) for key, value in answers.items() if value is not None})
    click.echo(f"created {made}; next: cd {made} && pip install -e '.[dev]' && pytest")


@click.command("update-template")
@click.argument("project", type=click.Path(exists=True, file_okay=False, path_type=Path), default=".")
@click.option("--template", metavar="SRC", help="New location of the template, if it has moved.")
def update_template(project: Path, template: str | None) -> None:
    """Update a project to the current template; your edits are kept, conflicts are marked.

    \b
      miles plugins update-template my-plugin

    The project must be a git repository without uncommitted changes. The template is that of miles-core (pip downloads
    the older version that the project was made with) or a git repository with tags.
    """
    from miles_testing import scaffold

    click.echo(scaffold.update(project, template))
