"""The block that a conversion gives."""
from __future__ import annotations

import os
import warnings
from typing import Any, Mapping, Sequence

import mxnet as mx
from mxnet.gluon import SymbolBlock

from .._mxnet import blocks
from .._mxnet.arrays import cast_arrays
from .._mxnet.symbols import NumpySymbol
from ..dtypes import BFLOAT16, FLOAT32
from ..runtime.devices import require_bfloat16
from .files import save_model
from .graphs import with_fp32_parameters
from .settings import Conversion

__all__ = ["ConvertedBlock"]


class ConvertedBlock(SymbolBlock):
    """A converted network, for inference.

    Made by :func:`gluon_amp.convert_hybrid_block`. It takes and returns what the network that it was made from does.

    Attributes
    ----------
    conversion : Conversion
        What was done.
    """

    def __init__(self, outputs: mx.sym.Symbol, inputs: Sequence[mx.sym.Symbol], conversion: Conversion):
        with warnings.catch_warnings():
            # MXNet asks for the type of the data, which any call may bring in another.
            warnings.simplefilter("ignore", UserWarning)
            super().__init__(outputs, inputs)
        self.conversion = conversion

    def forward(self, x: Any, *args: Any) -> Any:
        """Run the network; arrays in low precision, as from a block around under AMP, are taken as FP32.

        Raises
        ------
        DTypeError
            The network was converted to a type that this machine's CPU cannot run.
        """
        if self.conversion.target_dtype == BFLOAT16 and x.context.device_type != "gpu":
            require_bfloat16()
        return super().forward(*cast_arrays((x, *args), FLOAT32))

    def export(self, path: str | os.PathLike, epoch: int = 0, remove_amp_cast: bool = False) -> tuple[str, str]:
        """Write ``path-symbol.json`` and ``path-NNNN.params``, which MXNet loads and runs without this package.

        Parameters
        ----------
        path : path
            Beginning of both names, in a directory that exists.
        epoch : int
            The number in the second name.
        remove_amp_cast : bool
            Accepted for MXNet's signature. The casts belong to the network: only False has a meaning.

        Returns
        -------
        (str, str)
            The files.

        Raises
        ------
        ValueError
            ``remove_amp_cast=True``.
        OSError
            The directory does not exist or cannot be written to; no file is left behind.
        """
        if remove_amp_cast:
            raise ValueError("expected remove_amp_cast=False: without its casts a converted network does not run. "
                             "Export the FP32 network it was made from instead")
        inputs, symbol = blocks.graph_of(self)
        names = {variable.name for variable in inputs}
        arrays = blocks.parameters_of(self, [name for name in symbol.list_inputs() if name not in names])
        if isinstance(symbol, NumpySymbol):
            # MXNet cannot make a gradient buffer for a bfloat16 parameter of a NumPy-style network when it loads one.
            symbol, arrays = with_fp32_parameters(symbol, arrays)
        return save_model(path, epoch, symbol, *_split(symbol, arrays))


def _split(symbol: mx.sym.Symbol, arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    auxiliary = set(symbol.list_auxiliary_states())
    return ({name: array for name, array in arrays.items() if name not in auxiliary},
            {name: array for name, array in arrays.items() if name in auxiliary})
