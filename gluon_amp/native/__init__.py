"""Operators in C++, where MXNet's own CPU kernels are slow or missing; everything works without them.

The libraries are loaded once, and when first asked for.
"""
from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import sys
import threading
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Callable, Iterator, Mapping, Sequence

import mxnet as mx
from mxnet.base import MXNetError

from .._mxnet.arrays import bring_to_plain_layout, load_library
from .._mxnet.invoke import invoke, original_invoke, run_operator

VARIABLE = "GLUON_AMP_NATIVE"
_CORE = frozenset({"_gluon_amp_layer_norm", "_gluon_amp_clip", "_gluon_amp_dropout", "_gluon_amp_gelu",
                   "_gluon_amp_prelu", "_gluon_amp_scale_rows", "_gluon_amp_pooling", "_gluon_amp_batch_norm",
                   "_gluon_amp_resize", "_gluon_amp_softmax", "_gluon_amp_log_softmax", "_gluon_amp_all_finite",
                   "_gluon_amp_box_nms", "_gluon_amp_hard_swish", "_gluon_amp_swish", "_gluon_amp_sum",
                   "_gluon_amp_mean", "_gluon_amp_channel_means", "_gluon_amp_scale_channels", "_gluon_amp_sgd",
                   "_gluon_amp_sgd_momentum", "_gluon_amp_nag", "_gluon_amp_adam", "_gluon_amp_adamw",
                   "_gluon_amp_lamb"})
_ONEDNN = frozenset({"_gluon_amp_attention", "_gluon_amp_batch_dot", "_gluon_amp_convolution", "_gluon_amp_dense",
                     "_gluon_amp_rnn"})
OPERATORS = _CORE | _ONEDNN  # registered names of all operators that there may be
_ONEDNN_PACKAGE, _ONEDNN_FILE = "onednn-cpu-gomp", "libdnnl.so.3"
_INSTALL = f"pip install {_ONEDNN_PACKAGE}==2023.2.0, which gluon_amp[native] asks for"
_lock = threading.RLock()
_logger = logging.getLogger("gluon_amp")


@dataclass(frozen=True)
class Library:
    """What became of a library of operators."""

    name: str  # ``'core'``, or ``'onednn'`` for those operators of it that need oneDNN
    operators: frozenset[str]  # registered names of the operators that MXNet has from it now
    missing: str = ""  # why there are none, and what to do; empty when the library is loaded


def load() -> tuple[Library, ...]:
    """Load the libraries once, and return for each whether it loaded and why not."""
    # ``GLUON_AMP_NATIVE=0`` in the environment, at the first call, leaves them alone; the path of a folder takes them
    # from there.
    return _core(), _onednn()


def is_available(op: str) -> bool:
    """Tell whether an operator of the libraries can be used, which loads the library that it needs."""
    # oneDNN takes 14 MB, which networks without such operators do not spend.
    return op in _core().operators or (op in _ONEDNN and op in _onednn().operators)


def any_is_available() -> bool:
    """Tell whether there are operators that can be used; oneDNN is not loaded to find out."""
    return bool(_core().operators)


def obstacle_to(op: str) -> str:
    """Say why an operator of the libraries cannot be used; nothing where it can, and of other operators."""
    if op not in OPERATORS:
        return ""
    return _core().missing if op in _CORE else _onednn().missing


def say_what_is_missing() -> None:
    """Log what is missing and what to do; a oneDNN that seems to be in order is not loaded to find out."""
    if not _seems_in_order():
        _say(_onednn())


def _seems_in_order() -> bool:
    return not _core().missing and next(onednn_files(), None) is not None


def _say(library: Library) -> None:
    if library.missing:
        _logger.info("The CPU does without some operators in C++, which make networks faster: %s", library.missing)


def _once(load_library: Callable[[], Library]) -> Callable[[], Library]:
    """Let the first of several threads load a library, and the others wait."""
    cached = functools.lru_cache(maxsize=None)(load_library)

    @functools.wraps(load_library)
    def loaded() -> Library:
        with _lock:
            return cached()
    return loaded


@_once
def _core() -> Library:
    setting = os.environ.get(VARIABLE, "")
    folder = Path(setting) if os.path.isdir(setting) else Path(__file__).parent
    return _load("core", folder / "_core.so", _CORE)


@_once
def _onednn() -> Library:
    library = _load_onednn(_core())
    if _seems_in_order():
        _say(library)
    return library


def _load(name: str, path: Path, operators: frozenset[str]) -> Library:
    missing = _obstacle(path)
    if not missing:
        try:
            load_library(path)
            missing = _of_another_version(path, operators)
        except (MXNetError, OSError, AttributeError) as error:
            missing = f"{path.name} does not load: {_last_line(error)}"
    return Library(name, frozenset() if missing else operators, missing)


def _of_another_version(path: Path, operators: frozenset[str]) -> str:
    """Say that a library lacks operators; nothing where it has all."""
    lacking = sorted(operators.difference(mx.operator.get_all_registered_operators()))
    return f"{path.name} is of another version, without {lacking[0]}: build gluon_amp again" if lacking else ""


def _load_onednn(core: Library) -> Library:
    """Load oneDNN for the core library alone, because MXNet has another version."""
    missing = core.missing
    if not missing:
        path = next(onednn_files(), None)
        try:
            version = _onednn_version(ctypes.CDLL(str(path or _ONEDNN_FILE), mode=os.RTLD_LOCAL))
        except (OSError, AttributeError) as error:
            missing = f"{error}: {_INSTALL}"
        else:
            if not (3, 2) <= version < (4, 0):
                missing = f"expected oneDNN 3.2 or later 3, received {'.'.join(map(str, version))}: {_INSTALL}"
    return Library("onednn", frozenset() if missing else _ONEDNN, missing)


def _onednn_version(library: ctypes.CDLL) -> tuple[int, int]:
    library.dnnl_version.restype = ctypes.POINTER(ctypes.c_int)  # of a struct that begins with both
    found = library.dnnl_version()
    return found[0], found[1]


def onednn_files() -> Iterator[Path]:
    """Find the library of the oneDNN package, which lies outside of the folders of Python packages."""
    try:
        files = metadata.files(_ONEDNN_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    paths = [Path(str(file.locate())).resolve() for file in files if file.name == _ONEDNN_FILE]
    yield from (path for path in [*paths, Path(sys.prefix) / "lib" / _ONEDNN_FILE] if path.exists())


def _obstacle(path: Path) -> str:
    if os.environ.get(VARIABLE) == "0":
        return f"switched off by {VARIABLE}=0"
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"made for Linux on x86-64, not for {platform.system()} on {platform.machine()}"
    if not path.exists():
        return (f"{path.name} was not built: no C++17 compiler with OpenMP was found when gluon_amp was installed. "
                "Install one (such as the package g++) and install gluon_amp again")
    return ""


def _last_line(error: Exception) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


# Each with the number of states that a weight has.
UPDATES: Mapping[str, int] = {"sgd": 0, "sgd_momentum": 1, "nag": 1, "adam": 2, "adamw": 2, "lamb": 2}


def update(kind: str, weights: Sequence[mx.nd.NDArray], grads: Sequence[mx.nd.NDArray],
           states: Sequence[Sequence[mx.nd.NDArray]], lrs: Sequence[float], wds: Sequence[float],
           **options: object) -> None:
    """Update weights and states in place, as MXNet's operators for one weight do."""
    # Weights are waited for: ask for the update when the gradients are known, as after the check of an overflow.
    bring_to_plain_layout(weights)
    arrays = [array for group in zip(weights, grads, *states) for array in group]
    attrs = {"num_weights": len(weights), "lrs": list(map(float, lrs)), "wds": list(map(float, wds)), **options}
    invoke(f"_gluon_amp_{kind}", arrays, {name: str(value) for name, value in attrs.items()})


def all_finite(arrays: Sequence[mx.nd.NDArray]) -> mx.nd.NDArray:
    """Compute 1 where all values of float32 arrays are finite, 0 otherwise."""
    return run_operator(original_invoke, "_gluon_amp_all_finite", arrays, {"num_arrays": str(len(arrays))})
