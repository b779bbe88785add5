# make train and make test first create the environment .venv from constraints.txt; once it exists, they work offline.
PYTHON ?= python3
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
BIN := .venv/bin
INSTALLED := .venv/installed
READY_TO_TEST := .venv/installed-dev
PEERS := .venv-peers
LLAMA := .venv-llama
ZIG := .venv-zig
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
OUT ?= gpu-check
BENCH := $(BIN)/python -m kernels.bench
RESULTS := benchmarks/results
GENERATION_1.5B = $(BIN)/python -m benchmarks.generation --generation rwkv7 --shape 24,2048,65536 --dtype bfloat16,int8,int4 \
	--llama $(LLAMA)/bin/python
GENERATION := $(BIN)/python -m benchmarks.generation --peers $(PEERS)/bin/python $(if $(RWKV_CPP),--rwkv-cpp $(RWKV_CPP))
PARALLEL ?= -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
MAIN := conv1d,taichi_v3,reference,torch_scan,taichi_scan,c_v0

.PHONY: llama-server bench-peers train test quick soak lint bench peers parity files native gpu-check clean

train: $(INSTALLED)                      ## train the default model and print a sample; options: make train ARGS="model=small"
	$(BIN)/python train.py $(ARGS)

test: lint                               ## linters, types and all tests except soak
	$(BIN)/python -m pytest $(PARALLEL)

quick: $(READY_TO_TEST)                  ## tests that run no whole program, no compiler and no exhaustive check: a minute on two cores
	$(BIN)/python -m pytest $(PARALLEL) -m "not programs and not compiles and not thorough and not soak"

soak: $(READY_TO_TEST)                   ## tests that take minutes: twenty kills of a run, a thousand damaged files
	$(BIN)/python -m pytest -m soak --timeout 1800 $(ARGS)

lint: $(READY_TO_TEST)                   ## ruff, and mypy for this system and for Windows
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32

bench: $(READY_TO_TEST)                  ## verify and time every kernel; rewrite the tables and figures from what was measured
	$(BENCH) timex --sweep --json $(RESULTS)/timex-cpu.json
	$(BENCH) wkv4 --sweep --json $(RESULTS)/wkv4-cpu.json
	$(BENCH) wkv4 --dtype bfloat16 --shape 8,768,1024 12,128,64 --only $(MAIN) --json $(RESULTS)/wkv4-cpu-bfloat16.json
	$(BENCH) wkv7 --sweep --json $(RESULTS)/wkv7-cpu.json
	$(BENCH) matvec --json $(RESULTS)/matvec-cpu.json
	$(BENCH) pad --json $(RESULTS)/pad-cpu.json
	$(BENCH) softmax --sweep --json $(RESULTS)/softmax-cpu.json
	$(BIN)/python -m kernels.bench.tables
	$(BIN)/python -m kernels.bench.plot benchmarks/plots

peers: $(PEERS)/installed $(LLAMA)/installed     ## install PyPI's rwkv, transformers, peft and llama.cpp in separate environments

bench-peers: $(READY_TO_TEST) peers      ## prefill and decoding compared with other programs; RWKV_CPP=FOLDER adds rwkv.cpp
	$(GENERATION) --json $(RESULTS)/generation-cpu.json
	$(GENERATION) --generation rwkv7 --llama $(LLAMA)/bin/python --json $(RESULTS)/generation-rwkv7-cpu.json
	$(GENERATION_1.5B) --json $(RESULTS)/generation-1.5b-cpu.json
	$(GENERATION_1.5B) --zeros 0.85 --json $(RESULTS)/generation-1.5b-zeros-cpu.json
	$(BIN)/python -m benchmarks.tables

llama-server: $(LLAMA)/llama-server      ## build llama.cpp's server, for benchmarks/serving.py peers --llama-server: minutes

parity: $(READY_TO_TEST) peers           ## compare logits and state with other programs and float64; RWKV_LM=FOLDER adds training
	PYTHONPATH=tests $(BIN)/python -m parity --json benchmarks/results/parity.json
	$(if $(RWKV_LM),PYTHONPATH=tests $(BIN)/python -m parity.training $(RWKV_LM))

files: $(READY_TO_TEST) $(PEERS)/files $(LLAMA)/installed     ## test every kind of file; RWKV_LM=FOLDER adds RWKV-LM's RWKV-7a demo
	PYTHONPATH=tests $(BIN)/python -m parity.files --page --json benchmarks/results/files.json \
		$(if $(RWKV_LM),--rwkv-lm $(RWKV_LM))

native: $(ZIG)/installed                 ## compile the C code for every system into kernels/native/lib; ARGS=linux-x86_64: for one
	$(ZIG)/bin/python -m kernels.native.build $(ARGS)

gpu-check:                               ## every GPU measurement, in ten minutes, with the system's Python; ARGS=--device=cpu: a trial run
	$(PYTHON) -m benchmarks.gpu_check $(OUT) $(ARGS)

ifneq ($(origin PYTHON),file)            # make PYTHON=python3.13: recreate an environment of a different Python version
ifneq ($(shell ($(PYTHON) --version) 2>&1),$(shell ($(BIN)/python --version) 2>&1))
ANEW := --clear
.PHONY: $(INSTALLED)
endif
endif

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c "$(SUPPORTED)" || { echo "timemix needs Python 3.11 to 3.14, and $(PYTHON) is" \
		"$$( ($(PYTHON) --version) 2>&1): install one, and name it, as in make $(or $(MAKECMDGOALS),train) PYTHON=python3.13"; exit 1; }
	$(PYTHON) -m venv $(ANEW) .venv
	$(PIP) -e .
	touch $@

$(READY_TO_TEST): $(INSTALLED)
	$(PIP) -e ".[dev]"
	touch $@

# llama.cpp is built from source: minutes, with cmake and a C++ compiler; CMAKE_ARGS= adds options of cmake
$(LLAMA)/installed: constraints.txt
	$(PYTHON) -m venv $(LLAMA)
	CMAKE_ARGS="-DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF $(CMAKE_ARGS)" $(LLAMA)/bin/python -m pip install -q \
		--disable-pip-version-check -c constraints.txt --no-binary llama-cpp-python llama-cpp-python
	touch $@

$(LLAMA)/llama-server: $(LLAMA)/installed        # from the same source, without the web page, which cmake would download
	mkdir -p $(LLAMA)/source
	$(LLAMA)/bin/python -m pip download -q --disable-pip-version-check -c constraints.txt --no-deps \
		--no-binary llama-cpp-python -d $(LLAMA)/source llama-cpp-python
	tar -xzf $(LLAMA)/source/llama_cpp_python-*.tar.gz -C $(LLAMA)/source --strip-components 1
	cmake -S $(LLAMA)/source/vendor/llama.cpp -B $(LLAMA)/build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
		-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
		-DLLAMA_OPENSSL=OFF
	cmake --build $(LLAMA)/build --target llama-server --parallel 2
	cp $(LLAMA)/build/bin/llama-server $@

$(PEERS)/installed: constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt torch rwkv transformers peft
	touch $@

$(PEERS)/files: $(PEERS)/installed       # importing fla requires Triton, though none of its kernels run here
	$(PEERS)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt rwkv7-hf flash-linear-attention triton
	touch $@

$(ZIG)/installed: kernels/native/build.py        # 411 MB, for those who change C
	$(PYTHON) -m venv $(ZIG)
	$(ZIG)/bin/python -m pip install --disable-pip-version-check \
		ziglang==$(shell sed -n 's/^ZIG = "\(.*\)"/\1/p' kernels/native/build.py)
	touch $@

clean:
	rm -rf .venv $(PEERS) $(LLAMA) $(ZIG) .cache .mypy_cache .ruff_cache .hypothesis
