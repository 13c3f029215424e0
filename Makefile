# make demo: set up and write a text with the small pair.  make test: set up and run the whole test suite.
# make tiny: make the small pair again from nothing, hours of work (examples/tiny/README.md).  make tiny-heads, after it:
# compare the sequential heads at three block lengths.
# Everything lives in .venv; once its packages are installed, demo and test work without a network.

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
BACKEND ?= $(shell if [ "$$(uname)" = Linux ]; then \
	cuda=$$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p'); \
	if [ -z "$$cuda" ]; then echo cpu; elif [ "$$cuda" -ge 13 ]; then echo cuda13; else echo cuda12; fi; fi)
EXTRAS = $(if $(BACKEND),$(BACKEND)$(comma),)test,lint
comma := ,
VENV = .venv
RUN = $(VENV)/bin/python
TINY = build/tiny
TINY_RUN = PYTHONPATH=examples $(RUN) -m
TINY_BUDGET = --minutes 170
TINY_DRAFT = --layers 1 --rank 48 --taps 1,2,4 --anchors 64 --columns 256
TINY_FIRST = --max-length 256 --batch 8 --lr 2e-3 --steps 4000 --seed 1
TINY_SECOND = --max-length 384 --batch 6 --lr 1e-3 --steps 700 --seed 2
TINY_LAST = --max-length 384 --batch 6 --lr 1e-3 --steps 1200 --seed 3
TINY_HEADS = --steps 400
TINY_DOCS =
ASSETS = mlx_dspark/assets/tiny

.PHONY: demo test lint tiny tiny-heads clean clean-tiny

demo: $(VENV)/installed
	$(RUN) -m mlx_dspark.generate --stats --prompt "Write a Python function that adds two numbers."

test: $(VENV)/installed
	$(RUN) -m pytest -n auto --maxprocesses 4 --dist loadfile

lint: $(VENV)/installed
	$(RUN) -m ruff check .
	$(RUN) -m mypy

# A finished step is not repeated and the trainings continue from their checkpoints; make clean-tiny begins anew.
tiny: $(TINY)/temperatures.json
	$(TINY_RUN) tiny.install --out $(TINY) --assets $(ASSETS)

$(TINY)/corpora.done: $(VENV)/installed
	$(TINY_RUN) tiny.corpora --out $(TINY) $(if $(TINY_DOCS),--docs "$(TINY_DOCS)")
	@touch $@

$(TINY)/tokenizer.done: $(TINY)/corpora.done
	$(TINY_RUN) tiny.tokenizer --out $(TINY)
	@touch $@

$(TINY)/target.done: $(TINY)/tokenizer.done
	$(TINY_RUN) tiny.target --out $(TINY) $(TINY_BUDGET)
	$(TINY_RUN) tiny.pack --out $(TINY)
	@touch $@

# The draft reads a quarter of the chat texts: the corpus holds three times as much of them as of code or docs.
$(TINY)/first.done: $(TINY)/target.done
	head -n 10000 $(TINY)/corpus/chat.train.jsonl > $(TINY)/draft-chat.jsonl
	$(RUN) -m mlx_dspark.train --model $(TINY)/target --out $(TINY)/first --data $(TINY)/corpus/code.train.jsonl \
		--data $(TINY)/corpus/docs.train.jsonl --data $(TINY)/draft-chat.jsonl $(TINY_DRAFT) $(TINY_FIRST) \
		$(if $(wildcard $(TINY)/first/training_state.safetensors),--resume)
	@touch $@

$(TINY)/own.done: $(TINY)/target.done
	$(TINY_RUN) tiny.own --out $(TINY) --count 2000
	@touch $@

# Then it goes on, twice, with texts of the target's own and one in ten of the others.
$(TINY)/second.done: $(TINY)/first.done $(TINY)/own.done
	$(call tiny_go_on,first,second,1600,1,$(TINY_SECOND))
	@touch $@

$(TINY)/draft.done: $(TINY)/second.done
	$(call tiny_go_on,second,draft,1700,2,$(TINY_LAST))
	@touch $@

# The draft before, the draft after, how many of the target's own texts, which tenth of the others, settings.
define tiny_go_on
head -n $(3) $(TINY)/own.jsonl > $(TINY)/$(2)-own.jsonl
awk 'NR % 10 == $(4)' $(TINY)/corpus/code.train.jsonl > $(TINY)/$(2)-code.jsonl
awk 'NR % 10 == $(4)' $(TINY)/corpus/docs.train.jsonl > $(TINY)/$(2)-docs.jsonl
$(RUN) -m mlx_dspark.train --model $(TINY)/target --out $(TINY)/$(2) --start $(TINY)/$(1) \
	$(foreach kind,own code docs,--data $(TINY)/$(2)-$(kind).jsonl) $(TINY_DRAFT) $(5) \
	$(if $(wildcard $(TINY)/$(2)/training_state.safetensors),--resume)
endef

$(TINY)/temperatures.json: $(TINY)/draft.done
	rm -rf $(TINY)/packed/draft
	$(RUN) -m mlx_dspark.convert --draft $(TINY)/draft --target $(TINY)/target --mlx-path $(TINY)/packed/draft \
		-q --q-group-size 32
	$(RUN) -m mlx_dspark.calibrate --model $(TINY)/packed/target --draft $(TINY)/packed/draft \
		--data $(TINY)/calibration.jsonl --rounds 4000 --temp 0 --temp 1 --list-only > $(TINY)/temperatures.partial
	mv $(TINY)/temperatures.partial $@

tiny-heads: $(TINY)/first.done
	$(TINY_RUN) tiny.heads --out $(TINY) $(TINY_HEADS)

clean-tiny:
	rm -rf $(TINY)

$(VENV)/installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and none was found: install one, or run make PYTHON=/path/to/python" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[$(EXTRAS)]"
	@touch $@

clean:
	rm -rf $(VENV)
