"""Make ``import mxnet`` possible, or say what to install.

:func:`prepare` runs before anything else of the package. It must therefore be readable by
Pythons older than the supported ones, and import neither MXNet nor the rest of the package.
"""

import ctypes
import importlib
import importlib.util
import logging
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

logger = logging.getLogger(__name__)

PYTHON_MIN = (3, 8)
PYTHON_MAX = (3, 13)
INSTALL_MXNET = "python -m pip install mxnet==1.9.1"
if sys.version_info >= (3, 13):  # MXNet's metadata forbids NumPy 2, and there is no other: pip must not look at it
    INSTALL_MXNET = 'python -m pip install --no-deps mxnet==1.9.1 "graphviz<0.9" "requests<3"'
CUDA_HINT = "With a CUDA GPU install mxnet-cu112==1.9.1 instead."

# Names that NumPy dropped, their meaning, and the modules that need them: first until NumPy 1.24, then until NumPy 2.
PYTHON_TYPES = {"bool": bool, "object": object, "int": int, "float": float, "complex": complex, "str": str}
RENAMED = {
    "Inf": "inf",  # mxnet.gluon.contrib.estimator, gluoncv.auto
    "NAN": "nan", "NaN": "nan", "PINF": "inf",  # mxnet.numpy.utils
    "alltrue": "all", "trapz": "trapezoid",  # mxnet.numpy.fallback
    "product": "prod", "round_": "round", "sometrue": "any",  # mxnet.numpy_dispatch_protocol
}
CONSTANTS = {"NINF": float("-inf"), "NZERO": -0.0, "PZERO": 0.0}  # mxnet.numpy.utils
FINANCIAL = ("mirr", "npv", "pmt", "ppmt", "pv", "rate")  # mxnet.numpy.fallback hands them on

# Of NVIDIA's libraries: where pip has them, for CUDA 11.
CUDA_PACKAGES = {
    "libcudart.so.11.0": "nvidia-cuda-runtime-cu11>=11.7,<12",
    "libnvrtc.so.11.2": "nvidia-cuda-nvrtc-cu11>=11.7,<12",
    "libnvToolsExt.so.1": "nvidia-nvtx-cu11>=11.7,<12",
    "libcublas.so.11": "nvidia-cublas-cu11>=11.10,<12",
    "libcufft.so.10": "nvidia-cufft-cu11>=10.7,<11",
    "libcurand.so.10": "nvidia-curand-cu11>=10.2,<11",
    "libcusolver.so.11": "nvidia-cusolver-cu11>=11.4,<12",
    "libnccl.so.2": "nvidia-nccl-cu11>=2.13,<3",
    "libcudnn.so.8": "nvidia-cudnn-cu11>=8.5,<9",
}
# Each behind the libraries that it needs. Some are opened by name at first use, which finds what is loaded already.
CUDA_LIBRARIES = (
    "libcudart.so.11.0", "libnvrtc-builtins.so.11.*", "libnvrtc.so.11.2", "libnvToolsExt.so.1", "libcublasLt.so.11",
    "libcublas.so.11", "libcufft.so.10", "libcurand.so.10", "libcusolver.so.11", "libnccl.so.2",
    "libcudnn_ops_infer.so.8", "libcudnn_cnn_infer.so.8", "libcudnn_adv_infer.so.8", "libcudnn_ops_train.so.8",
    "libcudnn_cnn_train.so.8", "libcudnn_adv_train.so.8", "libcudnn.so.8")
DRIVER = "libcuda.so.1"
NO_DRIVER = (
    "MXNet's CUDA build needs the library of NVIDIA's driver, {driver}, even on the CPU: {error}.\n"
    "On a machine with a GPU install NVIDIA's driver; start a container with `docker run --gpus all`. Without a GPU, "
    "as on a login node or while an image is built, use the CPU build:\n"
    "python -m pip uninstall -y {builds} && python -m pip install mxnet==1.9.1"
)


def prepare() -> None:
    """Check Python, NumPy and MXNet, then make MXNet importable; ImportError says what to install."""
    check_python(sys.version_info[:3])
    check_numpy(numpy_version(), sys.version_info[:3])
    check_mxnet(mxnet_version())
    check_distutils()
    add_numpy_aliases(importlib.import_module("numpy"))
    if "mxnet" not in sys.modules and any(True for root in sys.path for _ in Path(root).glob("mxnet_cu*.dist-info")):
        load_cuda(sys.path)


def check_python(version: Tuple[int, ...]) -> None:
    """Raise ImportError unless MXNet 1.9.1 runs on this Python."""
    if PYTHON_MIN <= tuple(version[:2]) <= PYTHON_MAX:
        return
    raise ImportError(f"gluon_amp needs Python {_dotted(PYTHON_MIN)} to {_dotted(PYTHON_MAX)}, "
                      f"found Python {_dotted(version)}.\nInstall Python 3.11, then: "
                      'python3.11 -m venv .venv && .venv/bin/python -m pip install mxnet==1.9.1 "numpy<1.24"')


def numpy_version() -> Optional[str]:
    """Return the version of the NumPy that ``import numpy`` gives, None without one."""
    try:
        return str(importlib.import_module("numpy").__version__)
    except ModuleNotFoundError:
        return None


def check_numpy(version: Optional[str], python: Tuple[int, ...]) -> None:
    """Raise ImportError unless MXNet 1.9.1 works with this NumPy."""
    if version is not None and int(version.split(".")[0]) <= 2:
        return
    wanted = "numpy<1.24" if tuple(python[:2]) < (3, 12) else "numpy<2" if tuple(python[:2]) < (3, 13) else "numpy<3"
    found = "no NumPy" if version is None else f"NumPy {version}"
    raise ImportError(f'gluon_amp needs NumPy 1 or 2, found {found}.\nRun: python -m pip install "{wanted}"')


def mxnet_version() -> Optional[str]:
    """Return the version of the MXNet that ``import mxnet`` gives, without importing it; None without one."""
    loaded = sys.modules.get("mxnet")
    if loaded is not None:
        return str(getattr(loaded, "__version__", "of unknown version"))
    spec = importlib.util.find_spec("mxnet")
    if spec is None or spec.origin is None:  # an empty folder of that name has no origin
        return None
    libinfo = Path(spec.origin).with_name("libinfo.py")
    text = libinfo.read_text(encoding="utf-8") if libinfo.is_file() else ""
    match = re.search(r"""^__version__ = ['"](.+?)['"]""", text, re.MULTILINE)
    return "of unknown version" if match is None else match.group(1)


def _builds() -> str:
    """Name the installed distributions of MXNet, which pip is to remove."""
    from importlib import metadata  # not in Python 3.7, which must get as far as check_python

    names = {str(each.metadata["Name"]) for each in metadata.distributions()}
    return " ".join(sorted(name for name in names if re.match(r"mxnet(-native|-cu\d+)?$", name))) or "mxnet"


def check_mxnet(version: Optional[str]) -> None:
    """Raise ImportError unless this version of MXNet is of the 1.9 series."""
    if version is None:
        raise ImportError(f"gluon_amp needs MXNet 1.9.1, found no MXNet.\nRun: {INSTALL_MXNET}\n{CUDA_HINT}")
    if version.split(".")[:2] != ["1", "9"]:
        raise ImportError(f"gluon_amp needs MXNet 1.9.1, found MXNet {version}.\n"
                          f"Run: python -m pip uninstall -y {_builds()} && {INSTALL_MXNET}\n{CUDA_HINT}")


def check_distutils() -> None:
    """Raise ImportError when distutils is missing, which MXNet imports: from Python 3.12 on setuptools provides it."""
    if importlib.util.find_spec("distutils") is None:
        raise ImportError(f"MXNet 1.9.1 imports distutils, which Python {_dotted(sys.version_info[:3])} "
                          "does not have.\nRun: python -m pip install setuptools")


def add_numpy_aliases(numpy: ModuleType) -> List[str]:
    """Set what NumPy no longer has and MXNet 1.9.1 uses; what NumPy has stays as it is."""
    names = {**PYTHON_TYPES, **(_names_of_numpy_1(numpy) if is_numpy_2(numpy) else {})}
    # Not hasattr: NumPy 1.20 to 1.23 answer it with a DeprecationWarning for each name.
    absent = [name for name in names if name not in vars(numpy)]
    for name in absent:
        setattr(numpy, name, names[name])
    return absent


def is_numpy_2(numpy: ModuleType) -> bool:
    """Tell whether a NumPy has the promotion and the ``repr`` of NumPy 2."""
    return int(numpy.__version__.split(".")[0]) >= 2


def _names_of_numpy_1(numpy: ModuleType) -> Dict[str, Any]:
    compat = ModuleType("numpy.compat")  # mxnet.numpy.pad asks it for one name
    vars(compat)["basestring"] = str
    return {
        **CONSTANTS,
        **{old: getattr(numpy, new) for old, new in RENAMED.items()},
        **{name: partial(_gone, name) for name in FINANCIAL},
        "in1d": lambda values, *args, **kwargs: numpy.isin(values, *args, **kwargs).ravel(),  # mxnet.numpy.fallback
        "msort": lambda values: numpy.sort(values, axis=0),  # mxnet.numpy.fallback
        "compat": compat,
    }


def _gone(name: str, *args: Any, **kwargs: Any) -> Any:
    """Say where a function went that NumPy no longer has."""
    raise NotImplementedError(f"NumPy has no {name} since 1.20: use the package numpy-financial")


def load_cuda(roots: Iterable[str],
              load: Callable[[str], object] = lambda path: ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)) -> List[Path]:
    """Load the libraries that a CUDA build of MXNet needs from the nvidia-*-cu11 packages: it needs no system CUDA."""
    # What no package provides is left for the system's CUDA to serve.
    try:
        load(DRIVER)
    except OSError as error:
        raise ImportError(NO_DRIVER.format(driver=DRIVER, error=error, builds=_builds())) from error
    directories = [path for root in roots for path in sorted(Path(root).glob("nvidia/*/lib"))]
    loaded: List[Path] = []
    for name in CUDA_LIBRARIES:
        path = next((path for directory in directories for path in sorted(directory.glob(name))), None)
        try:
            if path is not None:
                load(str(path))
                loaded.append(path)
            elif name in CUDA_PACKAGES:
                load(name)
        except OSError as error:
            if path is None:
                raise ImportError(f"MXNet's CUDA build needs {name}, which neither a package nor the system provides "
                                  f'({error}).\nRun: python -m pip install "{CUDA_PACKAGES[name]}", or install '
                                  "gluon_amp with the extra cu112, which brings all such libraries") from error
            logger.warning("Could not load %s (%s); MXNet will look for a system copy.", path, error)
    return loaded


def _dotted(version: Tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)
