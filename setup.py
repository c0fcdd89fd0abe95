"""The metadata is in pyproject.toml; what is here builds the C++ operators of gluon_amp/native."""

import glob
import os
import re
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # before setuptools 70.1
    from wheel.bdist_wheel import bdist_wheel

OLDEST_PIP = (19, 3)  # knows manylinux2014 wheels; an older one would not find MXNet

SOURCES = "gluon_amp/native/src"
# No fused multiplications and additions: results are to have the bits that MXNet's operators give.
COMPILE = ["-std=c++17", "-O3", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
           "-fvisibility=hidden", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow"]
# Names are bound within the library: libmxnet.so has C++ symbols of its own.
LINK = ["-fopenmp", "-ldl", "-Wl,-Bsymbolic,-z,defs", f"-Wl,--version-script={SOURCES}/exports.map"]


def check_pip():
    """Stop a pip that cannot install what this package needs, in place of the errors that would follow."""
    program = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    if program.parts[-4:-1] != ("pip", "_vendor", "pep517"):  # where a pip as old as that builds from
        return
    found = re.search(r'__version__ = "((\d+)\.(\d+).*)"', (program.parents[2] / "__init__.py").read_text())
    if found and (int(found[2]), int(found[3])) < OLDEST_PIP:
        raise SystemExit(f"gluon_amp needs pip 19.3 or newer, found {found[1]}.\n"
                         "Run: python -m pip install --upgrade pip")


class BuildLibraries(build_ext):
    """Build shared libraries that MXNet loads: no modules of Python, and of no version of it."""

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"

    def get_libraries(self, ext):
        return ext.libraries

    def get_export_symbols(self, ext):
        return ext.export_symbols


class AnyPython3Wheel(bdist_wheel):
    """A wheel for every Python 3 on this platform."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


def library(name, folder):
    return Extension(f"gluon_amp.native.{name}", sorted(glob.glob(f"{folder}/*.cc")), language="c++",
                     depends=sorted(glob.glob(f"{SOURCES}/*")), extra_compile_args=COMPILE, extra_link_args=LINK,
                     optional=True)  # without a compiler everything else works


check_pip()
setup(ext_modules=[library("_core", SOURCES)], cmdclass={"build_ext": BuildLibraries, "bdist_wheel": AnyPython3Wheel})
