"""What pyproject.toml cannot say: two folders ship that are no packages.

The template of plugin projects lies at the top; `served` is put on the path of SGLang's servers as it is.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["miles_core*"]), "miles_core.template", "miles_core.backends.sglang.served"],
    package_dir={"miles_core.template": "cookiecutter"},
    options={"editable_wheel": {"mode": "compat"}},  # a path file; type checkers do not follow setuptools' finder
)
