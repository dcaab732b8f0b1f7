"""What pyproject.toml cannot say: the template of plugin projects lies at the top and ships inside the package."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["miles_core*"]), "miles_core.template"],
    package_dir={"miles_core.template": "cookiecutter"},
)
