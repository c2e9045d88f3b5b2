# Two commands for a fresh machine with python3, pip and make; each does all its own set-up.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
# A file's tests stay together, so that its fixtures and compilations are made once; who is done
# first takes half of what the other has left.
SPREAD = -n 2 --dist worksteal
SLOW = slow
TIER = not slow and not thorough

# Half of what a short process does is to compile the Python of jax, torch and transformers: what one
# has compiled is kept for the next, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart rl dpo dflash test test-slow test-thorough test-kernels lint style types docs notebooks site clean

quickstart: $(VENV)/installed
	$(RUN) -m jaxtrain.main --config configs/quickstart.toml run.overwrite=true

# Reinforcement learning with the sampler in the process: a short warm-up, then GRPO.
rl: $(VENV)/installed
	$(RUN) -m jaxtrain.main --config configs/rl_calculator_warmup.toml run.overwrite=true
	$(RUN) -m jaxtrain.main --config configs/rl_calculator.toml run.overwrite=true

# Preferences: the same warm-up, then DPO on right answers against wrong ones.
dpo: $(VENV)/installed
	$(RUN) -m jaxtrain.main --config configs/rl_calculator_warmup.toml run.overwrite=true
	$(RUN) -m jaxtrain.main --config configs/dpo_calculator.toml run.overwrite=true

# A draft model for the quickstart's model, and what it saves in decoding.
dflash: $(VENV)/installed quickstart
	$(RUN) -m jaxtrain.main --config configs/dflash_quickstart.toml run.overwrite=true
	$(RUN) -m jaxtrain.main speculate runs/quickstart dataset.split=test \
		--draft runs/dflash_quickstart/model --input builtin:calculator --most 200 --rows 16

test: $(VENV)/installed-test style
	$(RUN) -m pytest $(SPREAD)

test-slow: $(VENV)/installed-test
	$(RUN) -m pytest $(SPREAD) -m "$(SLOW)"

# Further families, meshes, dtypes and repetitions, and whole benchmarks: every night, not in .ci/run.
test-thorough: $(VENV)/installed-test
	$(RUN) -m pytest $(SPREAD) -m thorough

# The Hopper kernels and their interpreter need one jax, which needs Python 3.12:
# make test-kernels PYTHON=python3.12 VENV=.venv-3.12
test-kernels: $(VENV)/installed-kernels
	$(RUN) -m pytest $(SPREAD) -m "$(TIER)" tests/kernels

lint: style types

style: $(VENV)/installed-test
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .

types: $(VENV)/installed-test
	$(VENV)/bin/basedpyright --pythonpath $(RUN)

# docs/notebooks/*.ipynb, of the Markdown beside them.
notebooks: $(VENV)/installed-test
	$(RUN) scripts/make_notebooks.py

# The generated pages of docs/.
docs: $(VENV)/installed
	$(RUN) scripts/make_reference.py
	$(RUN) scripts/make_tree.py

# The documentation as a site, in build/site.
site: $(VENV)/installed-docs
	$(RUN) -m sphinx -q -W --keep-going -b html docs build/site
	@echo build/site/index.html

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --no-compile --disable-pip-version-check -e .
	touch $@

$(VENV)/installed-test: pyproject.toml $(VENV)/installed
	$(RUN) -m pip install --quiet --no-compile --disable-pip-version-check -e '.[test]'
	touch $@

$(VENV)/installed-kernels: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --no-compile --disable-pip-version-check -e '.[test-kernels]'
	touch $@

$(VENV)/installed-docs: pyproject.toml $(VENV)/installed
	$(RUN) -m pip install --quiet --no-compile --disable-pip-version-check -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) runs build *.egg-info
