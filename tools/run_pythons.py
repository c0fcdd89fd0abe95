"""Install the package on every Python that the README names and this machine has, import it, run the README's sample.

    python tools/run_pythons.py ~/.cache/gluon_amp    # the environments stay there, and serve the next time
"""
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator, Sequence

PROJECT = Path(__file__).resolve().parents[1]
WHEELS = PROJECT / "build" / "pythons"
# What runs on the newest Python, and with NumPy 2, beside the sample: imports, training, conversion and files.
TESTS = ("tests/test_numpy_2.py", "tests/test_start.py", "tests/training/test_training.py",
         "tests/training/test_checkpoint.py", "tests/convert/test_symbols.py", "tests/convert/test_convert.py")
# MXNet alone, which NumPy 2 cannot be imported with.
NEEDS_STOCK = "tests/convert/test_convert.py::TestFiles::test_stock_mxnet_loads_and_runs_them"
SAMPLE = PROJECT / "examples" / "three_lines" / "after.py"
# The sample's network and data, as small as they need be here.
SMALLER = {"resnet50_v1": "resnet18_v1", "(16, 3, 224, 224)": "(2, 3, 64, 64)", "arange(16)": "arange(2)",
           "step(16)": "step(2)"}
IMPORTS = """
import importlib, pkgutil
import gluon_amp
for module in pkgutil.walk_packages(gluon_amp.__path__, "gluon_amp."):
    if not module.name.endswith(("__main__", "._core")):  # the latter is a library of MXNet's
        importlib.import_module(module.name)
"""
CONVERTS = """
amp.deinit()
import numpy, os, tempfile
fast = amp.convert_hybrid_block(net)
expected = fast(images).asnumpy()
symbol, parameters = fast.export(os.path.join(tempfile.mkdtemp(), "net"))
again = gluon.SymbolBlock.imports(symbol, ["data"], parameters)(images).asnumpy()
numpy.testing.assert_allclose(again, expected, rtol=1e-4, atol=1e-4)
print(f"NumPy {numpy.__version__}, files read again")
"""


def named() -> list[str]:
    """Return the versions that the README names."""
    first, last = re.search(r"^Python 3\.(\d+) to 3\.(\d+)", (PROJECT / "README.md").read_text(), re.M).groups()
    return [f"3.{minor}" for minor in range(int(first), int(last) + 1)]


def candidates(version: str) -> Iterator[str]:
    """Yield programs that may be a Python of a version: those on the path, and pyenv's."""
    yield shutil.which(f"python{version}") or ""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python")))


def is_python(program: str, version: str) -> bool:
    """Tell whether a program runs, has the version, and can make environments."""
    code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    try:
        return bool(program) and subprocess.run([program, "-c", code], capture_output=True, text=True,
                                                timeout=60).stdout.strip() == version
    except (OSError, subprocess.TimeoutExpired):
        return False


def wheel() -> Path:
    """Build the wheel, which is one for all Pythons."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", WHEELS, PROJECT],
                   env={**os.environ, "PYTHONWARNINGS": "ignore"}, check=True)
    return next(WHEELS.glob("*.whl"))


def sample() -> str:
    """Return the README's sample at a small size, with a conversion behind it."""
    code = SAMPLE.read_text()
    for large, small in SMALLER.items():
        assert large in code, f"{SAMPLE} has no {large} any more"
        code = code.replace(large, small)
    return code + CONVERTS


def try_on(program: str, version: str, package: Path, folder: Path, tests: Sequence[str] = ()) -> bool:
    """Install the package in a version's environment, and try it from outside of the source tree."""
    home, begin = folder / f"venv-python{version}", time.monotonic()
    run = str(home / "bin" / "python")
    install = [run, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    commands = [[program, "-m", "venv", str(home)], [*install, "--no-deps", "mxnet==1.9.1"],
                [*install, f"{package}[cpu,native]"],
                [*install, "--force-reinstall", "--no-deps", str(package)], [run, "-c", IMPORTS], [run, "-c", sample()]]
    if tests:
        commands += [[*install, "pytest", "opencv-python-headless", "scikit-learn"],
                     [run, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--rootdir", str(PROJECT),
                      "-c", str(PROJECT / "pyproject.toml"), *(str(PROJECT / name) for name in tests), "--deselect",
                      NEEDS_STOCK]]
    environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    for command in commands:
        if subprocess.run(command, env={**environ, "PYTHONWARNINGS": "ignore"}, cwd=WHEELS).returncode:
            print(f"Python {version}: FAILED, in {' '.join(command)[:200]}", flush=True)
            return False
    print(f"Python {version}: passed in {time.monotonic() - begin:.0f} s", flush=True)
    return True


def main(folder: Path) -> int:
    """Try every Python; say which are not here."""
    found = {version: next((program for program in candidates(version) if is_python(program, version)), None)
             for version in named()}
    package = wheel()
    passed = [try_on(program, version, package, folder, TESTS if version == list(found)[-1] else ())
              for version, program in found.items() if program]
    for version in [version for version, program in found.items() if not program]:
        print(f"NOT TRIED: Python {version}, which the README names, is not on this machine", flush=True)
    return 0 if passed and all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).expanduser().resolve()))
