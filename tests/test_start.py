"""gluon_amp.machine.start: what is refused and how, NumPy's aliases, the CUDA libraries."""

import ast
import importlib.util
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest

import gluon_amp
from gluon_amp.machine import start

START = Path(start.__file__)
REPOSITORY = Path(gluon_amp.__file__).parents[1]
PREPARE = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("start", {str(START)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.prepare()
"""


def add_distribution(folder, name, version, module=None, code=""):
    """Make `name` look installed in `folder`, with a module that would run `code`, and MXNet's file of its version."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    package = folder / (module or name)
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n{code}")
    (package / "libinfo.py").write_text(f'x = 1\n__version__ = "{version}"\n')


def isolated(code, *folders):
    """Run `code` in a Python that sees the standard library and `folders` only."""
    path = os.pathsep.join(str(folder) for folder in folders)
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)


@pytest.fixture
def site(tmp_path):
    """Return a folder of fake packages that holds a NumPy and distutils fit for MXNet."""
    add_distribution(tmp_path, "numpy", "1.23.5")
    (tmp_path / "distutils").mkdir()
    (tmp_path / "distutils" / "__init__.py").touch()
    return tmp_path


class TestPython:
    @pytest.mark.parametrize("minor", range(8, 14))
    def test_supported(self, minor):
        start.check_python((3, minor, 1))

    @pytest.mark.parametrize("version", [(3, 7, 16), (3, 14, 0), (4, 0, 0), (2, 7, 18)])
    def test_others_are_refused_with_the_way_out(self, version):
        with pytest.raises(ImportError) as caught:
            start.check_python(version)
        message = str(caught.value)
        assert "found Python {}.{}.{}.".format(*version) in message
        assert "3.8 to 3.13" in message
        assert "python3.11 -m venv .venv && .venv/bin/python -m pip install mxnet==1.9.1" in message

    def test_older_pythons_can_read_the_module(self):
        # Python 3.6 and 3.7 must get as far as check_python.
        ast.parse(START.read_text(encoding="utf-8"), feature_version=(3, 6))
        assert "from __future__ import annotations" not in START.read_text(encoding="utf-8")

    def test_no_file_needs_a_newer_python(self):
        files = [*REPOSITORY.glob("*.py"), *(path for name in ("gluon_amp", "tools", "tests", "benchmarks", "examples",
                                                               "notebooks", "docs")
                                             for path in (REPOSITORY / name).rglob("*.py"))]
        assert len(files) > 100
        for path in files:
            ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 8))


class TestNumPyVersion:
    @pytest.mark.parametrize("version", ["1.17.0", "1.23.5", "1.26.4", "2.0.0rc1", "2.5.5"])
    def test_supported(self, version):
        start.check_numpy(version, (3, 11, 7))

    @pytest.mark.parametrize(
        ("version", "python", "found", "wanted"),
        [
            ("3.0.0", (3, 11, 7), "found NumPy 3.0.0.", '"numpy<1.24"'),
            (None, (3, 12, 1), "found no NumPy.", '"numpy<2"'),
            (None, (3, 13, 0), "found no NumPy.", '"numpy<3"'), (None, (3, 8, 18), "found no NumPy.", '"numpy<1.24"')])
    def test_others_are_refused_with_the_command(self, version, python, found, wanted):
        with pytest.raises(ImportError) as caught:
            start.check_numpy(version, python)
        assert found in str(caught.value)
        assert f"python -m pip install {wanted}" in str(caught.value)

    def test_missing_numpy(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "numpy", None)
        assert start.numpy_version() is None


class TestMXNetVersion:
    def test_module_in_memory_counts(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "mxnet", types.SimpleNamespace(__version__="2.0.0"))
        assert start.mxnet_version() == "2.0.0"
        monkeypatch.setitem(sys.modules, "mxnet", object())
        assert start.mxnet_version() == "of unknown version"

    def test_what_import_would_find(self, tmp_path, monkeypatch):
        add_distribution(tmp_path, "mxnet", "1.9.1", code="raise RuntimeError('imported')")
        monkeypatch.delitem(sys.modules, "mxnet", raising=False)
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        importlib.invalidate_caches()
        assert start.mxnet_version() == "1.9.1"
        (tmp_path / "mxnet" / "libinfo.py").unlink()
        assert start.mxnet_version() == "of unknown version"
        (tmp_path / "mxnet" / "__init__.py").unlink()
        importlib.invalidate_caches()
        assert start.mxnet_version() is None  # an empty folder of that name

    @pytest.mark.parametrize("version", ["1.9.0", "1.9.1", "1.9.1.post0"])
    def test_supported(self, version):
        start.check_mxnet(version)

    def test_missing(self):
        with pytest.raises(ImportError) as caught:
            start.check_mxnet(None)
        assert "found no MXNet" in str(caught.value)
        assert f"\nRun: {start.INSTALL_MXNET}\n" in str(caught.value)
        assert "mxnet-cu112==1.9.1" in str(caught.value)

    @pytest.mark.parametrize("version", ["2.0.0b1", "1.19.1", "1.8.0.post0", "of unknown version"])
    @pytest.mark.parametrize("installed", [[], ["mxnet"], ["mxnet-cu112", "mxnet"], ["mxnet-native"]])
    def test_others_are_refused_with_the_command(self, version, installed, tmp_path, monkeypatch):
        for name in (*installed, "mxnet-model-server"):
            add_distribution(tmp_path, name, version)
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        with pytest.raises(ImportError) as caught:
            start.check_mxnet(version)
        message = str(caught.value)
        assert f"found MXNet {version}." in message
        names = " ".join(sorted(installed)) or "mxnet"
        assert f"python -m pip uninstall -y {names} && {start.INSTALL_MXNET}" in message


def test_missing_distutils(monkeypatch):
    start.check_distutils()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="python -m pip install setuptools"):
        start.check_distutils()


def fake_numpy(version="1.26.4"):
    """Return a module in the place of NumPy."""
    numpy = types.ModuleType("numpy")
    numpy.__version__ = version
    return numpy


class TestNumPyAliases:
    def test_absent_ones_are_set(self):
        numpy = fake_numpy()
        absent = ["bool", "object", "int", "float", "complex", "str"]
        assert start.add_numpy_aliases(numpy) == absent
        assert (numpy.bool, numpy.object, numpy.int) == (bool, object, int)
        assert (numpy.float, numpy.complex, numpy.str) == (float, complex, str)
        assert start.add_numpy_aliases(numpy) == []

    def test_deprecated_ones_are_set_without_a_warning(self):
        # As NumPy 1.20 to 1.23 have them: found by getattr, with a warning.
        numpy = fake_numpy()
        numpy.__getattr__ = lambda name: warnings.warn(name, DeprecationWarning, stacklevel=2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(start.add_numpy_aliases(numpy)) == 6
            assert numpy.bool is bool

    def test_names_that_numpy_2_dropped(self):
        numpy = fake_numpy("2.5.5")
        vars(numpy).update({name: np.__dict__[name] for name in ("inf", "nan", "all", "any", "prod", "round", "isin",
                                                                 "sort")}, trapezoid="NumPy's own", rate="NumPy's own")
        names = start.add_numpy_aliases(numpy)
        assert {"Inf", "NINF", "alltrue", "trapz", "in1d", "compat", "mirr"} <= set(names)
        assert "rate" not in names
        assert numpy.rate == numpy.trapz == "NumPy's own"
        assert numpy.NINF == -numpy.Inf == -np.inf
        assert numpy.in1d([[1, 2]], [2]).tolist() == [False, True]
        assert numpy.msort(np.array([[2, 1], [1, 2]])).tolist() == [[1, 1], [2, 2]]
        assert numpy.compat.basestring is str
        with pytest.raises(NotImplementedError, match=r"no mirr since 1\.20: use the package numpy-financial"):
            numpy.mirr([1, 2], 0.1, 0.1)

    def test_the_installed_numpy(self):
        import numpy

        start.prepare()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert numpy.bool in (bool, numpy.bool_)  # NumPy 2 has a type of that name again
            assert numpy.zeros(1, dtype=numpy.float).dtype == numpy.float64


PARTS = [name.replace("*", "8") for name in start.CUDA_LIBRARIES if name not in start.CUDA_PACKAGES]


class TestCudaLibraries:
    @pytest.fixture
    def roots(self, tmp_path):
        """Return roots: all libraries are spread over the last."""
        for number, name in enumerate((*start.CUDA_PACKAGES, *PARTS)):
            folder = tmp_path / "second" / "nvidia" / f"part{99 - number}" / "lib"
            folder.mkdir(parents=True)
            (folder / name).touch()
        (tmp_path / "first" / "nvidia" / "cudnn" / "lib").mkdir(parents=True)
        return [str(tmp_path / "first"), str(tmp_path / "absent"), str(tmp_path / "second")]

    def test_loaded_after_what_they_need(self, roots):
        paths = []
        loaded = start.load_cuda(roots, paths.append)
        assert paths[0] == "libcuda.so.1"
        assert [str(path) for path in loaded] == paths[1:]
        names = [path.name for path in loaded]
        assert sorted(names) == sorted((*start.CUDA_PACKAGES, *PARTS))
        order = {name: names.index(name) for name in names}
        assert order["libnvrtc-builtins.so.11.8"] < order["libnvrtc.so.11.2"]
        assert order["libcublasLt.so.11"] < order["libcublas.so.11"] < order["libcusolver.so.11"]
        assert order["libcudnn_ops_infer.so.8"] < order["libcudnn_cnn_infer.so.8"] < order["libcudnn.so.8"]

    def test_every_package_is_in_the_extra(self):
        extra = (REPOSITORY / "pyproject.toml").read_text().split("cu112 = [")[1].split("]")[0]
        assert [name for name in start.CUDA_PACKAGES.values() if f'"{name}"' not in extra] == []

    def test_broken_one_is_reported_and_the_rest_loaded(self, roots, caplog):
        def load(path):
            if "cufft" in path:
                raise OSError("file too short")

        loaded = start.load_cuda(roots, load)
        assert len(loaded) == len(start.CUDA_PACKAGES) + len(PARTS) - 1
        assert "libcufft.so.10" in caplog.text
        assert "file too short" in caplog.text

    def test_the_system_serves_what_no_package_provides(self, tmp_path):
        asked = []
        assert start.load_cuda([str(tmp_path)], asked.append) == []
        assert asked == ["libcuda.so.1", *(name for name in start.CUDA_LIBRARIES if name in start.CUDA_PACKAGES)]

    def test_what_is_nowhere_is_named_with_its_package(self, tmp_path):
        with pytest.raises(ImportError, match=r"needs libnvToolsExt\.so\.1, which neither") as caught:
            start.load_cuda([str(tmp_path)], lambda name: self.refuse(name) if "nvTools" in name else None)
        assert 'python -m pip install "nvidia-nvtx-cu11>=11.7,<12"' in str(caught.value)

    def test_no_driver(self):
        with pytest.raises(ImportError, match=r"NVIDIA's driver, libcuda\.so\.1") as caught:
            start.load_cuda([], self.refuse)
        for way_out in ("install NVIDIA's driver", "--gpus all", "pip uninstall -y mxnet", "pip install mxnet==1.9.1"):
            assert way_out in str(caught.value)

    def refuse(self, name):
        raise OSError(f"{name}: cannot open shared object file")

    def test_the_loader_makes_symbols_global(self, monkeypatch, roots):
        calls = []
        monkeypatch.setattr(start.ctypes, "CDLL", lambda path, mode: calls.append((Path(path).name, mode)))
        start.load_cuda(roots)
        assert ("libcufft.so.10", start.ctypes.RTLD_GLOBAL) in calls

    @pytest.mark.parametrize("needs_cuda", [False, True])
    def test_only_for_cuda_builds(self, needs_cuda, monkeypatch, tmp_path):
        loaded = []
        (tmp_path / f"mxnet{'_cu112' * needs_cuda}-1.9.1.dist-info").mkdir()
        monkeypatch.delitem(sys.modules, "mxnet", raising=False)
        monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
        monkeypatch.setattr(start, "load_cuda", loaded.append)
        start.prepare()
        assert loaded == ([sys.path] if needs_cuda else [])


class TestPrepareInAnotherProcess:
    def test_accepts_fakes_of_the_right_versions(self, site):
        add_distribution(site, "mxnet", "1.9.1", code="raise RuntimeError('imported')")
        done = isolated(PREPARE + "import sys, numpy; print(numpy.bool, 'mxnet' in sys.modules)", site)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split("\n")[0] == "<class 'bool'> False"

    @pytest.mark.parametrize(("version", "found"), [(None, "no NumPy"), ("3.0.0", "NumPy 3.0.0")])
    def test_refuses_numpy(self, tmp_path, version, found):
        if version:
            add_distribution(tmp_path, "numpy", version)
        assert f"found {found}." in isolated(PREPARE, tmp_path).stderr

    @pytest.mark.parametrize(("version", "found"), [("2.0.0b1", "MXNet 2.0.0b1"), (None, "no MXNet")])
    def test_import_of_the_package(self, site, version, found):
        if version:
            add_distribution(site, "mxnet", version, code="raise RuntimeError('imported')")
        done = isolated("import gluon_amp", site, REPOSITORY)
        assert done.stderr.splitlines()[-3].startswith("ImportError: gluon_amp needs MXNet 1.9.1")
        assert f"found {found}." in done.stderr
        assert "RuntimeError" not in done.stderr


@pytest.mark.parametrize(("version", "refused"), [("19.2.3", True), ("19.3", False), ("20.0.2", False), ("9.0", True)])
def test_a_pip_that_does_not_know_the_wheels_is_told_so(version, refused, tmp_path):
    """Pips up to 20 build by a script of theirs, which runs setup.py in its own process."""
    script = tmp_path / "pip" / "_vendor" / "pep517" / "_in_process.py"
    script.parent.mkdir(parents=True)
    script.write_text(f"import runpy; runpy.run_path({str(REPOSITORY / 'setup.py')!r})")
    (tmp_path / "pip" / "__init__.py").write_text(f'__version__ = "{version}"')
    done = subprocess.run([sys.executable, "-W", "ignore", script, "--version"], cwd=REPOSITORY, capture_output=True,
                          text=True, check=False)
    assert ("Run: python -m pip install --upgrade pip" in done.stderr) is refused
    assert done.returncode == refused
    assert refused or done.stdout.split()[-1] == gluon_amp.__version__


def test_extras_do_not_lift_numpy_beyond_what_mxnet_imports():
    """Before NumPy 1.24 the names that MXNet uses were there; what needs NumPy would take the newest."""
    extras = (REPOSITORY / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    for extra in extras.split("\n]"):
        if any(f'"{name}' in extra for name in ("matplotlib", "onnx", "scikit-learn", "opencv", "gluoncv")):
            assert "\"numpy<1.24; python_version < '3.12'\"" in extra or '"onednn' in extra, extra
