"""Check the system libraries behind MXNet and OpenCV, which bare machines may lack.

OpenCV's desktop build needs libGL. Where that is missing, its headless build takes its place:
nothing here opens a window. What MXNet lacks can only be named.
"""

import ctypes
import subprocess
import sys
from importlib import metadata

# Library: Debian package.
MXNET_LIBRARIES = {
    "libgomp.so.1": "libgomp1",
    "libquadmath.so.0": "libquadmath0",
    "libstdc++.so.6": "libstdc++6",
}


def missing_packages(libraries):
    """Return the Debian packages of the libraries that cannot be loaded."""
    missing = []
    for library, package in libraries.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(package)
    return missing


def opencv_loads():
    """Return whether cv2 can be imported, tried in a process of its own."""
    done = subprocess.run([sys.executable, "-c", "import cv2"], stderr=subprocess.DEVNULL, check=False)
    return done.returncode == 0


def use_headless_opencv():
    """Put the files of opencv-python-headless where those of opencv-python were."""
    version = metadata.version("opencv-python")
    print(f"OpenCV {version} lacks a system library (libGL?): using its headless build", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall"]
    subprocess.run([*pip, f"opencv-python-headless=={version}"], check=True)


def main():
    """Exit with a message when something is missing that cannot be replaced."""
    packages = missing_packages(MXNET_LIBRARIES)
    if packages:
        names = " ".join(packages)
        sys.exit(f"MXNet needs libraries of the packages {names}. On Debian: apt-get install {names}")
    if not opencv_loads():
        use_headless_opencv()
    if not opencv_loads():
        sys.exit("OpenCV cannot be imported. On Debian: apt-get install libgl1 libglib2.0-0")


if __name__ == "__main__":
    main()
