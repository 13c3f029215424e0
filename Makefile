# make demo: set up and write a text with the small pair.  make test: set up and run the whole test suite.
# Everything lives in .venv; once its packages are installed, both work without a network.

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
BACKEND ?= $(shell if [ "$$(uname)" = Linux ]; then \
	cuda=$$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p'); \
	if [ -z "$$cuda" ]; then echo cpu; elif [ "$$cuda" -ge 13 ]; then echo cuda13; else echo cuda12; fi; fi)
EXTRAS = $(if $(BACKEND),$(BACKEND)$(comma),)test,lint
comma := ,
VENV = .venv
RUN = $(VENV)/bin/python

.PHONY: demo test lint clean

demo: $(VENV)/installed
	$(RUN) -m mlx_dspark.generate --stats --max-tokens 90 --prompt ".. function:: open(path, mode)"

test: $(VENV)/installed
	$(RUN) -m pytest

lint: $(VENV)/installed
	$(RUN) -m ruff check .
	$(RUN) -m mypy

$(VENV)/installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and none was found: install one, or run make PYTHON=/path/to/python" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[$(EXTRAS)]"
	@touch $@

clean:
	rm -rf $(VENV)
