"""Turn what users exclude from a conversion into names of nodes."""
from __future__ import annotations

import fnmatch
from typing import Any, Callable, Iterable, Iterator, Sequence

from mxnet.gluon import Block

from ..errors import PolicyError, closest, expected
from ..graph import Graph
from ..graph.attrs import REGION, REGION_OFF
from ..rules import Policy

__all__ = ["Exclusions"]


class Exclusions:
    """Nodes, blocks and classes of blocks to keep in FP32.

    Parameters
    ----------
    targets : sequence
        Names of nodes or blocks, which may hold wildcards, blocks, classes of blocks, and policies for what they
        exclude.

    Raises
    ------
    PolicyError
        For anything else.
    """

    def __init__(self, *targets: Any):
        flat = [item for target in targets for item in _listed(target)]
        for target in flat:
            if not (isinstance(target, (str, Block)) or (isinstance(target, type) and issubclass(target, Block))):
                raise PolicyError(expected("names of nodes or blocks, blocks, or classes of blocks", "exclude", target))
        self.names = [target for target in flat if isinstance(target, str)]
        self.blocks = [target for target in flat if not isinstance(target, str)]
        self._found: set[int] = set()

    def predicate(self) -> Callable[[Block], bool] | None:
        """Return what says of a block whether it is excluded; None when no block can be."""
        return self._matches if self.names or self.blocks else None

    def _matches(self, block: Block) -> bool:
        found = [target for target in self.blocks
                 if (isinstance(block, target) if isinstance(target, type) else block is target)]
        found += [name for name in self.names if fnmatch.fnmatchcase(block.name, name)]
        self._found.update(map(id, found))
        return bool(found)

    def nodes(self, graph: Graph) -> frozenset[str]:
        """Return the nodes to keep in FP32; call it once a block, if there is one, was traced.

        Raises
        ------
        PolicyError
            Something excluded is not in the network; the message gives the closest names.
        """
        operators = [node.name for node in graph.operators()]
        chosen: set[str] = {node.name for node in graph.operators() if node.attrs.get(REGION) == REGION_OFF}
        for name in self.names:
            matching = fnmatch.filter(operators, name)
            if not matching and id(name) not in self._found:
                raise PolicyError(f"exclude: the network has no node or block {name!r}.{closest(name, operators)}")
            chosen.update(matching)
        missing = next((block for block in self.blocks if id(block) not in self._found), None)
        if missing is not None:
            what = missing.__name__ if isinstance(missing, type) else missing.name
            raise PolicyError(f"exclude: the network holds no block {what!r}, or it runs none of its operators")
        return frozenset(chosen)


def _listed(target: Any) -> Iterator[Any]:
    if target is None:
        return
    if isinstance(target, Policy):
        yield from target.excluded
    elif isinstance(target, Iterable) and not isinstance(target, (str, Block)):
        yield from target
    else:
        yield target


def excluded(sequence: Sequence[Any] | None, names: Sequence[str] | None) -> Exclusions:
    """Read the arguments ``exclude`` and ``excluded_sym_names``."""
    if isinstance(names, str):
        raise PolicyError(expected("a list of names", "excluded_sym_names", names))
    return Exclusions(sequence, names)
