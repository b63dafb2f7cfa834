# Everything starts from nothing: each target sets up .venv first and is quick when that is done.
# PYTHON=python3.12 chooses the Python, TORCH_INDEX=URL a package index with a CPU build of torch.
SHELL := bash
BIN := .venv/bin
ENGINE_FILES = find engine -name '*.cc' -o -name '*.h'

# $(call pytest,SECONDS): pytest with a time limit. $(OR): its failure is the recipe's, but for the
# exit status 5, with which it says that ARGS choose none of its tests.
pytest = timeout -k 20 $$(($(1) + 60)) $(BIN)/python -m pytest --session-timeout=$(1)
OR = || { code=$$?; [ $$code = 5 ] || status=$$code; }

# Two files at a time, but for the tests that measure networks: these run one after the other.
define quick
$(call pytest,900) -m "not slow and not netns" -n 2 --dist loadfile $(ARGS) $(OR); \
	$(call pytest,600) -m "not slow and netns" $(ARGS) $(OR)
endef

.PHONY: demo test test-all conformance matrix traces fuzz sanitize coverage coverage-python \
	work memory lint format docs bench venv engine clean help

demo: venv  ## train over a bursting network, beside TCP
	@$(BIN)/gradwire demo $(ARGS)

test: venv  ## run the tests, but for the slow ones (limit: 25 minutes)
	@status=0; $(quick); exit $$status

test-all: venv  ## run all the tests: those of `make test`, then the slow ones (limit: 50 minutes)
	@status=0; $(quick); \
	$(call pytest,900) -m "slow and not netns" -n 2 --dist loadfile $(ARGS) $(OR); \
	$(call pytest,1200) -m "slow and netns" $(ARGS) $(OR); exit $$status

conformance: venv  ## run PyTorch's own suite over the backend, and over Gloo with the hook
	@$(BIN)/python -c 'import expecttest' 2>/dev/null || \
		$(BIN)/python -m pip install -q -c constraints.txt expecttest
	@status=0; for face in backend hook; do \
		$(BIN)/python tests/conformance/suite.py $$face $(ARGS) || status=1; done; exit $$status

matrix: venv  ## build the wheels; test them on the oldest and newest Python and torch (long)
	@$(BIN)/python tools/matrix.py $(ARGS)

traces: venv  ## compare the traces of 99 scenarios in virtual time with the known ones
	@$(BIN)/python engine/tests/traces.py $(ARGS)

fuzz: venv  ## run the fuzz targets for minutes (ARGS="--seconds 1200 wire": one, for longer)
	@$(BIN)/python tools/fuzz.py $(ARGS)

sanitize: venv  ## run tests of the engine with AddressSanitizer, UBSan and ThreadSanitizer
	@$(BIN)/python tools/sanitize.py $(ARGS)

coverage: venv  ## say which lines of the engine its tests reach (minutes)
	@$(BIN)/python -c 'import gcovr' 2>/dev/null || \
		$(BIN)/python -m pip install -q -c constraints.txt gcovr
	@$(BIN)/python tools/line_coverage.py $(ARGS)

coverage-python: venv  ## say which lines of the product's Python its quick tests reach (minutes)
	@$(BIN)/python -c 'import coverage' 2>/dev/null || \
		$(BIN)/python -m pip install -q -c constraints.txt coverage
	@rm -rf out/coverage/python*; mkdir -p out/coverage; status=0; \
	$(BIN)/coverage run -m pytest -q tests engine/tests/test_sim_fuzz.py --dist loadfile -n 2 \
		-m "not slow and not netns" -k "not costs_less_than" $(ARGS) || status=1; \
	$(BIN)/coverage combine -q && $(BIN)/coverage report --skip-covered --sort=cover && \
		$(BIN)/coverage html -q -d out/coverage/python-pages; exit $$status

work: venv  ## count the engine's instructions at 4 and 64 ranks with valgrind (minutes, 8 GB)
	@$(BIN)/python engine/tests/work.py

memory: venv  ## count the bytes that an all-reduce reads and writes, with valgrind
	@$(BIN)/python engine/tests/memory.py $(ARGS)

lint: venv  ## ruff, mypy --strict, clang-format, lizard
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict
	@$(ENGINE_FILES) | xargs -r $(BIN)/clang-format --dry-run -Werror
	@$(BIN)/lizard -C 15 -l cpp -w engine/proto

format: venv  ## put everything in form
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(ENGINE_FILES) | xargs -r $(BIN)/clang-format -i

docs: venv  ## build the pages into out/docs, strictly; the tests check links and snippets
	@$(BIN)/python -c 'import material, mkdocstrings_handlers.python' 2>/dev/null || \
		$(BIN)/python -m pip install -q -c constraints.txt mkdocs-material mkdocstrings-python
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "gradwire: the pages are in out/docs/index.html"

bench: venv  ## the measurements on the standard networks (ARGS="--network A --case …")
	@$(BIN)/gradwire bench net $(ARGS)

venv:  ## set up .venv with the engine built
	@tools/bootstrap

engine:  ## rebuild the engine only, and only what changed
	@tools/bootstrap --engine

clean:  ## remove .venv and everything built
	rm -rf .venv .bootstrap.lock .matrix build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

help:
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 10
