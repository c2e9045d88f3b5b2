# Two commands for a fresh machine with python3, pip and make; each does all its own set-up.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python

.PHONY: quickstart test test-slow lint docs clean

quickstart: $(VENV)/installed
	$(RUN) -m jaxtrain.main --config configs/quickstart.toml run.overwrite=true

test: $(VENV)/installed-test lint
	$(RUN) -m pytest -n 2

test-slow: $(VENV)/installed-test
	$(RUN) -m pytest -n 2 -m slow

lint: $(VENV)/installed-test
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .

docs: $(VENV)/installed
	$(RUN) -m jaxtrain.main docs > docs/config.md

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/installed-test: pyproject.toml $(VENV)/installed
	$(RUN) -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) runs build *.egg-info
