"""Take out the files of the other kind of plugin."""

from pathlib import Path

family = "{{ cookiecutter.family }}"
package = Path("src", "{{ cookiecutter.__package }}")
of_a_family = package / "families.py", Path("tests", "parity.toml"), Path("tests", "test_family.py")

for path in [Path("tests", "test_plugin.py")] if family else of_a_family:
    path.unlink()
