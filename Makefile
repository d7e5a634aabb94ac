# Each command starts from a fresh clone: it makes .venv itself.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test quick check faults bench evidence pages docs clean

demo: .venv/lab
	$(BIN)/gomuon race --seeds 0 --out demo

test: .venv/test check
	$(BIN)/python -m pytest -n 2 --dist worksteal

# What to run every few minutes: one process, no ranks, no lab, nothing slow. Under 90 s on 2 cores.
quick: .venv/test
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -n 2 --dist worksteal -q -m "not slow" tests/functional tests/parameters \
	  tests/capture tests/geometry tests/methods tests/checkpoints tests/test_*.py

check: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Every campaign of faults, whole: about an hour. `make test` runs a few cases of each.
faults: .venv/test
	$(BIN)/python -m tests.faults --save
	$(BIN)/python -m tests.faults.page

# The optimizers that the targets name, measured in a run of their own with more cycles.
TARGETS := --no-scaling --no-tokens --out runs/targets --arms newton-schulz,muon,muon-fast,go-muon-4,go-muon-4-fast,go-muon-fast

# Measured in runs/bench and runs/targets, where a stopped one continues; the committed files stay until all is done.
# What other code measured there is in the way: make bench BENCH=--fresh drops it.
bench: .venv/bench
	$(BIN)/gomuon bench $(BENCH)
	$(BIN)/gomuon bench $(TARGETS),torch-muon --models paper --cycles 16
	$(BIN)/gomuon bench $(TARGETS) --models gpt2,conv,overhead --cycles 6
	$(BIN)/gomuon bench $(TARGETS) --models wide,resnet,mlp-2048 --cycles 2
	mkdir -p results/bench results/targets
	for run in bench targets; do \
	  cp runs/$$run/bench.json runs/$$run/report.md runs/$$run/bench*.svg results/$$run/ || exit 1; done
	$(BIN)/gomuon bench --page > docs/.speed.part
	mv docs/.speed.part docs/speed.md

# From the files under results alone: nothing is run.
evidence: .venv/lab
	$(BIN)/python -m tools.evidence

# The pages of docs/ that code makes. Written aside first: a failure must not leave half a page.
pages: .venv/lab
	$(BIN)/gomuon methods --markdown > docs/.methods.part
	mv docs/.methods.part docs/methods.md
	$(BIN)/gomuon bench --page > docs/.speed.part
	mv docs/.speed.part docs/speed.md
	$(BIN)/gomuon plan --markdown docs/scaling.md
	$(BIN)/python -m tools.site.pictures

# The site, in site/index.html. Warnings are errors, and so are links that lead nowhere.
docs: .venv/docs
	$(BIN)/python -m sphinx -E -W --keep-going -q -b html -d build/doctrees docs site
	$(BIN)/python -m tools.site.links site

# An extra is installed again whenever the files that declare it change.
.venv/%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable '.[$*]'
	touch $@

clean:
	rm -rf .venv demo site build/doctrees
