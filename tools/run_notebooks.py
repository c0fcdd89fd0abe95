"""Execute the notebooks from start to end, each in a kernel of its own, and check what came out.

    python tools/run_notebooks.py                       # sizes for this machine; results in build/notebooks/
    python tools/run_notebooks.py --small               # as small as makes sense, in a few minutes
    python tools/run_notebooks.py --in-place numerics   # renew the outputs that are in the repository
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Iterator, Sequence

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from traitlets.config import Config

PROJECT = Path(__file__).resolve().parents[1]
NOTEBOOKS = PROJECT / "notebooks"
RESULTS = PROJECT / "build" / "notebooks"
FINDINGS = "application/vnd.gluon-amp.findings+json"

_CELL_SECONDS = 1800
_UNMET = "does not hold"
_PATH = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|work|usr|opt|mnt|private|Users)/[\w./-]*")
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def names() -> list[str]:
    """Return the names of all notebooks, without directory and suffix."""
    return sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


def load(name: str) -> nbformat.NotebookNode:
    """Return a notebook as it is in the repository."""
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def execute(name: str, small: bool = False) -> nbformat.NotebookNode:
    """Execute a notebook and return it with its outputs; what follows a cell with an error does not run.

    Parameters
    ----------
    name : str
        One of `names`.
    small : bool
        Use the small sizes.
    """
    notebook = load(name)
    with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(CellExecutionError):  # an output holds the error
        # sockets in a directory rather than ports that everybody on the machine can reach
        transport = Config({"KernelManager": {"transport": "ipc", "ip": f"{scratch}/kernel"}})
        options = {"timeout": _CELL_SECONDS, "kernel_name": "python3", "record_timing": False, "config": transport}
        client = NotebookClient(notebook, resources={"metadata": {"path": str(NOTEBOOKS)}}, **options)
        client.execute(env=_environment(small, scratch))
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def _environment(small: bool, scratch: str) -> dict[str, str]:
    """Return the kernel's environment: this Python's kernel and nobody's start-up files."""
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    return {
        **os.environ,
        "GLUON_AMP_NOTEBOOKS": "small" if small else "",
        "IPYTHONDIR": scratch,
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }


def problems(notebook: nbformat.NotebookNode) -> list[str]:
    """Return what is wrong with an executed notebook, in words."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    found = [] if _is_complete(cells) else ["its code cells were not all executed, once, from first to last"]
    for output in _outputs(cells):
        if output.output_type == "error":
            found.append(f"{output.ename}: {output.evalue}")
        if output.get("name") == "stderr":
            found.append(f"standard error: {output.text.strip()}")
        found += [f"a path of the machine: {path}" for path in _PATH.findall(_text(output))]
    if not any("image/png" in output.get("data", {}) for output in _outputs(cells)):
        found.append("it has no picture")
    claims = findings(notebook)
    if not claims:
        found.append("it makes no claims")
    return found + [f"{_UNMET}: {each['claim']} ({each['measured']})" for each in claims if each["holds"] is False]


def findings(notebook: nbformat.NotebookNode) -> list[dict[str, Any]]:
    """Return the claims of an executed notebook: dicts with ``claim``, ``measured`` and ``holds``."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [each for output in _outputs(cells) for each in output.get("data", {}).get(FINDINGS, [])]


def _only_claims_fail(notebook: nbformat.NotebookNode) -> bool:
    wrong = problems(notebook)
    return bool(wrong) and all(text.startswith(_UNMET) for text in wrong)


def _is_complete(cells: Sequence[Any]) -> bool:
    return [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))


def _outputs(cells: Sequence[Any]) -> Iterator[Any]:
    return (output for cell in cells for output in cell.outputs)


def _text(output: Any) -> str:
    data = output.get("data", {})
    return "\n".join([output.get("text", ""), data.get("text/plain", ""), data.get("text/html", ""),
                      *output.get("traceback", [])])


def _run(name: str, small: bool, target: Path, report_claims: bool = False) -> bool:
    """Execute a notebook, write it, print what it found; return whether all is well.

    With `report_claims` claims that do not hold are printed only: on a machine that others use they may not.
    """
    print(f"{name}: running", flush=True)
    begin = time.monotonic()
    notebook = execute(name, small)
    if _only_claims_fail(notebook):
        print(f"{name}: again, because other work on the machine spoils measurements of speed", flush=True)
        notebook = execute(name, small)
    target.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target / f"{name}.ipynb")
    for each in findings(notebook):
        verdict = {True: "holds", False: "DOES NOT HOLD", None: "not on this machine"}[each["holds"]]
        print(f"  {each['claim']}: {each['measured']} ({verdict})")
    wrong = problems(notebook)
    for text in wrong:
        print(f"error: {name}: {text}", file=sys.stderr)
    print(f"{name}: {time.monotonic() - begin:.0f} s; {target / name}.ipynb", flush=True)
    return all(report_claims and text.startswith(_UNMET) for text in wrong)


def main(argv: Sequence[str] | None = None) -> int:
    """Execute notebooks and return the exit code: 1 when something is wrong with one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(names())}")
    parser.add_argument("--small", action="store_true", help="small sizes")
    parser.add_argument("--in-place", action="store_true", help="overwrite the notebooks themselves")
    parser.add_argument("--report-claims", action="store_true", help="print claims that do not hold, and go on")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.names) - set(names()))
    if unknown:
        parser.error(f"expected names among {', '.join(names())}, received {', '.join(unknown)}")
    if args.small and args.in_place:
        parser.error("--in-place goes without --small: the repository has the full sizes")
    target = NOTEBOOKS if args.in_place else RESULTS
    results = [_run(name, args.small, target, args.report_claims) for name in args.names or names()]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
