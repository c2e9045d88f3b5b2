"""What pyproject.toml cannot say: a wheel holds a copy of configs/ inside the package, so that
`jaxtrain quickstart` and `--config NAME` work where it is installed."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """build_py, and then the configs; an editable install reads them where they are."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree("configs", Path(self.build_lib, "jaxtrain/configs"), dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithConfigs})
