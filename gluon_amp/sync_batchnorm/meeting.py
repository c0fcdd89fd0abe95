"""Sums over the contexts of this process and over processes, for operators that run in threads of their own."""
from __future__ import annotations

import threading
from typing import Callable

from mxnet.ndarray import NDArray

from ..errors import StateError
from ..parallel.groups import total_of

Allreduce = Callable[..., NDArray]
PATIENCE = 600.0  # seconds to wait for the other contexts, which may have most of a network to compute before


class Meeting:
    """Where the contexts of a process add up a vector each, again and again; the last one sums over processes."""

    def __init__(self, name: str, num_devices: int, allreduce: Allreduce | None):
        self.name = name
        self._num_devices = num_devices
        self._allreduce = allreduce
        self._arrived: dict[str, NDArray] = {}
        self._closed = 0  # meetings so far
        self._total: NDArray | None = None  # of the last one; all have read it before the next can close
        self._change = threading.Condition()

    def sum(self, vector: NDArray, place: str) -> NDArray:
        """Return the sum of the vectors of all contexts and processes, on this one's context."""
        if self._num_devices == 1:
            return self._over_processes(vector)
        with self._change:
            meeting = self._closed
            self._arrive(vector, place)
            if len(self._arrived) == self._num_devices:
                self._close()
            elif not self._change.wait_for(lambda: self._closed > meeting, PATIENCE):
                came = ", ".join(self._arrived)
                raise StateError(f"{self.name}: only {came} of num_devices={self._num_devices} came in {PATIENCE:.0f} "
                                 f"seconds. {_ADVICE}")
            if self._total is None:
                raise StateError(f"{self.name}: the sum failed on another context, whose error says why")
            return self._total.as_in_context(vector.context)

    def _arrive(self, vector: NDArray, place: str) -> None:
        if place in self._arrived:
            raise StateError(f"{self.name}: {place} came twice before the others of num_devices={self._num_devices}. "
                             f"{_ADVICE}")
        self._arrived[place] = vector

    def _close(self) -> None:
        vectors = [self._arrived[place] for place in sorted(self._arrived)]  # in one order: the same bits every time
        self._arrived = {}
        self._total = None
        try:
            self._total = self._over_processes(total_of(vectors))
        finally:
            self._closed += 1
            self._change.notify_all()

    def _over_processes(self, vector: NDArray) -> NDArray:
        return vector if self._allreduce is None else self._allreduce(vector, name=self.name)


_ADVICE = ("In training every context must run the network, before any result is read: give convert_sync_batchnorm "
           "their number as num_devices. CPU contexts need MXNET_CPU_TEMP_COPY above the number of operators in a step")
