# make demo    ask a small model one question through the real server (downloads about 100 MB once)
# make serve   the same model behind an OpenAI-compatible API with a chat page; ARGS="--port 9000" adds options
# make test    lint, then all tests that need no GPU, on all cores (up to 4); ARGS="-n 0 tests/cpu/ops" changes that
# make setup   only the installation, into .venv
#
# PYTHON names the Python to use (3.11 to 3.13), TORCH_SPEC the torch to install.

PYTHON ?= python3
ARGS ?=
export PYTHON TORCH_SPEC

DEMO_MODEL = smollm2-135m
TEST_MODELS = smollm2-135m gemma3-270m

.PHONY: help setup demo serve test docs clean

help:
	@sed -n 's/^# //p' Makefile

setup:
	@sh scripts/setup.sh demo

demo: setup
	@.venv/bin/python -m offroad.cli.demo $(DEMO_MODEL)

serve: setup
	@.venv/bin/offroad pull $(DEMO_MODEL) >/dev/null
	@exec .venv/bin/offroad serve $(DEMO_MODEL) --device cpu $(ARGS)

test:
	@sh scripts/setup.sh demo,test
	@for model in $(TEST_MODELS); do .venv/bin/offroad pull $$model || exit 1; done
	.venv/bin/ruff check .
	.venv/bin/python -m pytest -n auto $(ARGS)

docs: setup
	.venv/bin/python scripts/cli_docs.py

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
