"""`miles plugins manifest`: for those who write plugins."""

from __future__ import annotations

from pathlib import Path

import click


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
    from miles_core.plugins.manifest import FILE, of_source, to_toml
    from miles_core.plugins.scan import GROUP

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
                                    fix=f"miles plugins manifest --write {project}")
