"""The configs that come with jaxtrain: by name, copied, and inside of a wheel."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jaxtrain
from jaxtrain.config import load_config
from jaxtrain.config.bundled import find_config, list_recipes
from jaxtrain.errors import UserError
from jaxtrain.main import main

ROOT = Path(__file__).parents[2]


def test_a_config_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    by_name = load_config("quickstart", ["run.max_steps=3"])
    assert by_name == load_config(ROOT / "configs/quickstart.toml", ["run.max_steps=3"])
    assert find_config("tree_ablation/think_tree").is_file()
    # A file of this name comes first, and then says what is wrong with it.
    Path("quickstart").write_text("")
    assert find_config("quickstart") == Path("quickstart")


def test_a_name_that_is_none_is_refused_with_those_that_are():
    with pytest.raises(UserError, match="no config file 'sft_qwen'.*it brings .*sft_qwen3,"):
        load_config("sft_qwen")


def test_init_copies_a_config(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "sft_qwen3"]) == 0
    assert load_config("sft_qwen3.toml") == load_config("sft_qwen3")
    assert "#:schema" not in Path("sft_qwen3.toml").read_text()
    assert main(["init", "sft_qwen3"]) == 2
    assert main(["init", "nothing"]) == 2
    assert main(["init", "quickstart", "--output", "no/such/folder.toml"]) == 2
    output = capsys.readouterr().err
    assert "sft_qwen3.toml is there already" in output and "there is no 'nothing'" in output
    assert "no/such/folder.toml cannot be written: No such file" in output
    assert main(["init"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(list_recipes())
    assert all(len(line.split()) > 2 for line in lines)  # each says what it is for


def test_one_version():
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert jaxtrain.__version__ == package
    assert f"version: {package}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {package} " in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.slow
def test_a_wheel_brings_all_that_it_needs(tmp_path):
    """Built, unpacked and asked in a folder from which nothing of the checkout can be seen."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    sources = tmp_path / "sources"  # a build leaves folders behind
    for name in ("jaxtrain", "jaxtrain_vllm", "kernels", "configs"):
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    subprocess.run([*build, str(sources)], check=True)
    (wheel,) = tmp_path.glob("jaxtrain-*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)

    work = tmp_path / "work"
    work.mkdir()

    def run(*arguments: str) -> str:
        # -P: the working folder is no place for modules; the wheel's comes before the checkout's.
        command = [sys.executable, "-P", "-m", "jaxtrain.main", *arguments]
        env = os.environ | {"PYTHONPATH": str(site)}
        done = subprocess.run(command, env=env, cwd=work, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert [line.split()[0] for line in run("init").splitlines()] == list(list_recipes())
    assert '"max_steps": 200' in run("quickstart", "--print-config")
    where = "import jaxtrain, jaxtrain_kernels as k, jaxtrain_vllm as v; print(jaxtrain, k, v)"
    command = [sys.executable, "-P", "-c", where]
    env = os.environ | {"PYTHONPATH": str(site)}
    shown = subprocess.check_output(command, env=env, cwd=work, text=True)
    assert shown.count(str(site)) == 3
    for page in ("assets/report/page.js", "assets/uplot/LICENSE", "presets/model/tiny.toml"):
        assert (site / "jaxtrain" / page).is_file(), page
