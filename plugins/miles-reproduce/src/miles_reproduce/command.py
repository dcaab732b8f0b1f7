"""miles reproduce NAME: run a recipe again, and say whether the outcome is the claimed one."""

from __future__ import annotations

import datetime
import json
import platform
import statistics
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from miles_core.errors import ConfigError
from miles_reproduce import claim as claims
from miles_reproduce import runs
from miles_reproduce.claim import Claim, Curve, Measured
from miles_reproduce.plot import svg

RUN_FILE, LOCK, CLAIM, PICTURE = "recipe.toml", "recipe.lock", "claim.toml", "curve.svg"


def _names(_context: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """For shell completion."""
    return [CompletionItem(name) for name in _recipes() if name.startswith(incomplete)]


@click.command("reproduce")
@click.argument("name", shell_complete=_names)
@click.option("--seeds", type=click.IntRange(1, 10), default=1, show_default=True, help="Runs, with as many seeds.")
@click.option("--first-seed", type=click.IntRange(0), default=0, show_default=True,
              help="The seeds are this one and those after it. A claim is of seeds 0, 1, ...: others test more.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Folder for the runs; default: runs/reproduce/NAME/TIME.")
@click.option("--write-claim", is_flag=True, help="Make what comes out the claim: claim.toml, recipe.lock, curve.svg.")
def reproduce(name: str, seeds: int, first_seed: int, out: Path | None, write_claim: bool) -> None:
    """Run recipes/NAME, or the recipe in a folder of that name, and compare the outcome with its claim.

    The exit status is 0 inside the claim's band and 1 outside. A run file's paths are relative to where you are: stand
    in the repository's root.
    """
    folder = _folder(name)
    claim = claims.read(folder / CLAIM)
    if write_claim and (seeds < 2 or first_seed):
        raise click.UsageError("a claim needs --seeds of 2 or more, the first of which is 0")
    if not write_claim and claim.measured is None:
        raise ConfigError("nobody has measured this recipe: there is nothing to compare with",
                          code="claim-not-measured", who=str(claim.path),
                          fix=f"miles run {folder / RUN_FILE}, or --seeds 5 --write-claim")
    out = out or Path("runs/reproduce", folder.name, f"{datetime.datetime.now():%Y%m%d-%H%M%S}")
    for number, one in enumerate(claim.prepare):
        runs.prepare(one, out / f"prepare-{number}.log")
    lock = _lock(folder / RUN_FILE)
    if not write_claim:
        _versions(folder / LOCK, lock)
    curves, cpu_seconds = _curves(claim, folder / RUN_FILE, range(first_seed, first_seed + seeds), out)
    if write_claim:
        values = [claim.at_step(curve) for curve in curves]
        claim.write(Measured(values, curves, _about(lock, cpu_seconds)))
        (folder / LOCK).write_text(lock, encoding="utf-8")
        (folder / PICTURE).write_text(svg(claims.read(folder / CLAIM)), encoding="utf-8")
        click.echo(f"wrote {folder / CLAIM}, {LOCK}, {PICTURE}")
    elif claim.measured is not None:
        inside = _judge(claim, claim.measured, curves, out)
        if first_seed < (measured := len(claim.measured.values)):
            click.echo(f"The claim is of seeds 0 to {measured - 1}, so this says that its numbers come again: "
                       f"--first-seed {measured} asks for others.")
        if not inside:
            raise SystemExit(1)


def _folder(name: str) -> Path:
    """
    Raises:
        ConfigError: there is no such recipe.
    """
    for folder in (Path(name), Path("recipes", name)):
        if (folder / RUN_FILE).is_file():
            return folder
    names = _recipes()
    here = f"name one of recipes/: {', '.join(names)}" if names else "change to the repository's root"
    raise ConfigError("there is no such recipe", code="recipe-unknown", got=name, who="miles reproduce",
                      fix=f"{here}; or give a folder with {RUN_FILE}")


def _recipes() -> list[str]:
    return sorted(path.parent.name for path in Path("recipes").glob(f"*/{RUN_FILE}"))


def _lock(run_file: Path) -> str:
    from miles_core.plugins import lock
    from miles_core.plugins.plan import prepare

    return lock.text(lock.of(prepare(run_file, [])))


def _versions(path: Path, now: str) -> None:
    """Say so where the claim is of something else than what runs now."""
    from miles_core.plugins import lock

    if changes := lock.differences(lock.read(path), json.loads(now)):
        more = f", and {len(changes) - 3} more" if len(changes) > 3 else ""
        click.echo(f"The claim is of another version of Miles than this one: {'; '.join(changes[:3])}{more}.")


def _curves(claim: Claim, run_file: Path, seeds: range, out: Path) -> tuple[list[Curve], float]:
    curves, spent = [], 0.0
    for seed in seeds:
        folder = out / f"seed-{seed}"
        seconds = runs.run(run_file, seed, folder)
        curves.append(runs.curve(folder, claim.metric))
        value = claim.at_step(curves[-1])
        band = f"  {claims.verdict(value, claim.measured.band())}" if claim.measured else ""
        click.echo(f"seed {seed}  {claim.metric} {value:.4f}{band}  {seconds:.0f} CPU s")
        spent += seconds
    return curves, spent / len(seeds)


def _judge(claim: Claim, measured: Measured, curves: list[Curve], out: Path) -> bool:
    """Say it, draw it; whether the mean of the runs is inside."""
    mean = statistics.mean(claim.at_step(curve) for curve in curves)
    low, high = measured.band(len(curves))
    verdict = claims.verdict(mean, (low, high))
    picture = out / PICTURE
    picture.write_text(svg(claim, curves), encoding="utf-8")
    click.echo(f"{verdict}: {claim.metric} is {mean:.4f} at step {claim.step}, {low:.4f} to {high:.4f} was claimed for "
               f"{'one seed' if len(curves) == 1 else f'the mean of {len(curves)} seeds'} ({picture})")
    return verdict == "inside"


def _about(lock: str, cpu_seconds: float) -> dict[str, object]:
    packages = json.loads(lock)["packages"]
    return {"date": f"{datetime.date.today()}", "cpu_seconds": round(cpu_seconds), "miles": packages["miles-core"],
            "torch": packages["torch"], "python": platform.python_version(), "machine": platform.machine()}


command = reproduce
