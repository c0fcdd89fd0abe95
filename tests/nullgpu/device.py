"""Build the null GPU for the libmxnet.so that is installed, run programs on it, and read what they sent to it.

    python tests/nullgpu/device.py PROGRAM ARGUMENT...   run a program with two null GPUs, or NULLGPU_DEVICES=...

The null GPU answers CUDA's calls, runs no kernel and writes everything down: dispatch is real, numbers are not.
"""
from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCE = HERE / "null_device.c"
# What libmxnet.so imports of NVIDIA's libraries. NVRTC, the compiler, and NVTX, the profiler's marks, are real.
IMPORTED = re.compile(r"_*(cuda|cublas|cudnn|curand|cusolver|cufft|nccl|cu[A-Z])")
CREATES = re.compile(r"cudnnCreate|cusolverDnCreate|curandCreate|cublasCreate")
# Called all the time, and telling nothing.
QUIET = re.compile(r"cudaEvent|cudaStreamWait|cudnnSet|cublasSet|curandSet|cusolverDnSet|cudnnDestroy|__cuda")
# What NVIDIA's header of types, in the runtime's package, says to nvcc only.
ATTRIBUTES = ("__device_builtin__", "__device_builtin_texture_type__", "__device_builtin_surface_type__", "CUDARTAPI",
              "__align__(bytes) __attribute__((aligned(bytes)))", "__builtin_align__(bytes) __align__(bytes)")
STUB = 34  # CUDA_ERROR_STUB_LIBRARY
DEFINED = re.compile(r"^[\w ]+?[ *]+(\w+)\(|^(?:ALGORITHM|COUNT|WORKSPACE)\((\w+)\)", re.M)


def missing() -> str | None:
    """Say what the null GPU lacks here; None where it can be built."""
    if cuda_wheel() is None:
        return "no CUDA build of MXNet is installed: `make test-gpu` runs these tests"
    if compiler() is None:
        return "there is no C compiler: the null GPU is compiled when its tests run"
    if shutil.which("nm") is None:
        return "there is no nm (binutils), which tells what libmxnet.so needs"
    return None


def cuda_wheel() -> Path | None:
    """Return the libmxnet.so of the CUDA wheel that is installed, None without one."""
    for distribution in metadata.distributions():
        if (distribution.metadata["Name"] or "").startswith("mxnet-cu"):
            library = Path(str(distribution.locate_file("mxnet/libmxnet.so")))
            return library if library.exists() else None
    return None


def compiler() -> str | None:
    return shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")


def build(folder: Path | None = None) -> Path:
    """Compile the null GPU, unless it has been; return the library, which is called libcuda.so.1."""
    library = cuda_wheel()
    if library is None or compiler() is None:
        raise RuntimeError(missing())
    identity = hashlib.sha256(SOURCE.read_bytes() + Path(__file__).read_bytes()
                              + f"{library} {library.stat().st_size}".encode()).hexdigest()[:16]
    folder = folder or Path(tempfile.gettempdir()) / f"nullgpu-{os.getuid()}"
    target = folder / identity / "libcuda.so.1"
    if target.exists():
        return target
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        work = Path(name)
        (work / "generated.h").write_text(generated(needed(library)))
        (work / "crt").mkdir()  # of the compiler nvcc, which is not installed
        (work / "crt/host_defines.h").write_text("".join(f"#define {line}\n" for line in ATTRIBUTES))
        headers = library.parents[1] / "nvidia/cuda_runtime/include"
        made = work / "libcuda.so.1"
        subprocess.run([str(compiler()), "-shared", "-fPIC", "-O1", "-w", f"-I{work}", f"-I{headers}",
                        "-Wl,-soname,libcuda.so.1", "-o", str(made), str(SOURCE), "-lpthread", "-lm"], check=True)
        target.parent.mkdir(exist_ok=True)
        made.rename(target)
    return target


def stub(folder: Path) -> Path:
    """Compile a driver's library in which every function answers that it is a stub, as in images without a GPU."""
    library = cuda_wheel()
    if library is None:
        raise RuntimeError(missing())
    names = [name for name in needed(library) if re.match("cu[A-Z]", name)] + ["cuGetProcAddress", "cuGetExportTable"]
    source, made = folder / "stub.c", folder / "libcuda.so.1"
    source.write_text("".join(f"int {name}(void) {{ return {STUB}; }}\n" for name in names))
    subprocess.run([str(compiler()), "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", str(made),
                    str(source)], check=True)
    return made


def needed(library: Path) -> list[str]:
    """Name the functions of NVIDIA's libraries that libmxnet.so imports."""
    listed = subprocess.run(["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True)
    names = {line.split()[-1].split("@")[0] for line in listed.stdout.splitlines() if line.split()}
    return sorted(name for name in names if IMPORTED.match(name))


def generated(names: list[str]) -> str:
    """Write C functions for those that the source lacks."""
    defined = {first or second for first, second in DEFINED.findall(SOURCE.read_text())}
    return "".join(f"{_function(name)}\n" for name in names if name not in defined)


def _function(name: str) -> str:
    if CREATES.match(name):
        return f"int {name}(void **made) {{ *made = new_descriptor(); return 0; }}"
    note = "" if QUIET.match(name) else f'trace("CALL {name}"); '
    return f"int {name}() {{ {note}return 0; }}"


def environment(**settings: Any) -> dict[str, str]:
    """Return the environment of a process with a null GPU; ``capability='7.5'`` and the like are its settings."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("NULLGPU_")}
    paths = os.pathsep.join(filter(None, [str(ROOT), str(HERE), os.environ.get("PYTHONPATH")]))
    return {**others, "LD_PRELOAD": str(build()), "PYTHONPATH": paths, "MXNET_CUDNN_AUTOTUNE_DEFAULT": "0",
            **{f"NULLGPU_{name.upper()}": str(value) for name, value in settings.items()}}


def run(code: str, timeout: float = 300, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run Python code on a null GPU with these settings, in a process of its own."""
    return subprocess.run([sys.executable, "-c", code], env=environment(**settings), capture_output=True, text=True,
                          timeout=timeout, check=False)


class Trace:
    """What is sent to the device while a block of code runs.

    Examples
    --------
    >>> with Trace() as trace:  # doctest: +SKIP
    ...     net(data).wait_to_read()
    >>> trace.of('CUDNN')  # doctest: +SKIP
    ['CUDNN ConvolutionForward data=float16 compute=float32 tensor_cores=1 in=3 out=64']
    """

    def __enter__(self) -> Trace:
        _finish()
        handle, self._path = tempfile.mkstemp(prefix="nullgpu-trace-")
        os.close(handle)
        os.environ["NULLGPU_TRACE"] = self._path
        self.lines: list[str] = []
        return self

    def __exit__(self, *details: object) -> None:
        try:
            _finish()
        finally:
            del os.environ["NULLGPU_TRACE"]
            self.lines = Path(self._path).read_text().splitlines()
            os.unlink(self._path)

    def of(self, *starts: str) -> list[str]:
        """Return the lines that begin with one of these."""
        return [line for line in self.lines if line.startswith(starts)]

    def kernels(self, part: str = "") -> list[str]:
        """Return the names of launched kernels, as the compiler mangles them, that hold a text."""
        return [line.split(" ", 1)[1] for line in self.of("KERNEL ") if part in line]

    def counts(self, *starts: str) -> Counter[str]:
        """Count equal lines that begin with one of these."""
        return Counter(self.of(*starts))

    def bytes_to_host(self) -> list[int]:
        """Return the size of each copy to the host."""
        return [int(line.rpartition("=")[2]) for line in self.of("COPY to_host")]


def _finish() -> None:
    import mxnet as mx

    mx.nd.waitall()


if __name__ == "__main__":
    problem = missing()
    if problem:
        sys.exit(problem)
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    path = sysconfig.get_path("scripts")
    command = shutil.which(sys.argv[1], path=path + os.pathsep + os.environ["PATH"]) or sys.argv[1]
    os.execve(command, [command, *sys.argv[2:]], environment(devices=os.environ.get("NULLGPU_DEVICES", "2")))
