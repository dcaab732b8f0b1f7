"""What pyproject.toml cannot say: a folder ships that is no package, the template of plugin projects."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["miles_core*"]), "miles_core.template"],
    package_dir={"miles_core.template": "cookiecutter"},
    options={"editable_wheel": {"mode": "compat"}},  # a path file; type checkers do not follow setuptools' finder
)
