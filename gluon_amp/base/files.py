"""Files that are written whole or not at all."""
from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from contextlib import contextmanager
from typing import Iterator

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_MXNET_WROTE_A_PART = "FileStream.Write incomplete"  # MXNet's whole message on a full disk


@contextmanager
def replacing(*paths: str | os.PathLike) -> Iterator[list[str]]:
    """Give temporary files to write, which replace ``paths`` together when the body succeeds."""
    # Symbolic links stay, and the file behind one is replaced; devices and pipes, as ``/dev/stdout``, are written to.
    temporary: list[str] = []
    targets = [os.fspath(path) if _is_device(path) else os.path.realpath(path) for path in paths]
    where = targets[0] if len(targets) == 1 else os.path.dirname(targets[0]) if targets else ""
    try:
        for target in targets:
            temporary.append(_made_beside(target))
        try:
            yield temporary
        except Exception as error:
            number = errno.ENOSPC if _MXNET_WROTE_A_PART in str(error) else getattr(error, "errno", None)
            if number in _FULL and getattr(error, "filename", None) is None:  # errors of writing name no file
                raise OSError(number, os.strerror(number), where) from error
            raise
        for target in targets:
            if os.path.isdir(target):
                raise IsADirectoryError(f"cannot write the file {target!r}: there is a directory of that name. "
                                        "Give another name")
        for name, target in zip(temporary, targets):
            _publish(name, target)
    finally:
        for name in temporary:
            if os.path.exists(name):
                os.unlink(name)


def _is_device(path: str | os.PathLike) -> bool:
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _made_beside(target: str) -> str:
    directory = None if _is_device(target) else os.path.dirname(target)
    try:
        handle, name = tempfile.mkstemp(dir=directory, prefix=os.path.basename(target))
    except OSError as error:  # it is about a name that nobody has given
        said = "its folder does not exist" if isinstance(error, FileNotFoundError) else error.strerror
        raise OSError(error.errno, said, target) from error
    os.close(handle)
    return name


def _publish(name: str, target: str) -> None:
    if _is_device(target):
        with open(name, "rb") as file, open(target, "wb") as device:
            shutil.copyfileobj(file, device)
        return
    with open(name, "rb") as file:
        os.fsync(file.fileno())
    try:  # temporary files are private: the permissions that plain writing leaves
        mode = stat.S_IMODE(os.stat(target).st_mode)
    except FileNotFoundError:
        umask = os.umask(0)
        os.umask(umask)
        mode = 0o666 & ~umask
    os.chmod(name, mode)
    os.replace(name, target)
