"""Import, drivers and devices that do not fit, on the null GPU: dispatch is verified, numbers never."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import device
import pytest

INIT = """
import warnings
warnings.simplefilter("ignore")
import gluon_amp as amp, mxnet as mx
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    amp.init()
print(*(each.message for each in caught), sep="\\n")
print("active", amp.active_dtype("gpu"), mx.nd.ones(3).sum().asscalar())
"""
NET = """
import gluon_amp as amp, mxnet as mx
class Chain(mx.gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.relu(x * 3 - 1) * (x + 2)
net = Chain()
net.hybridize(static_alloc=True, static_shape=True)
amp.init()
net(mx.nd.ones((2, 3), ctx=mx.gpu(0))).asnumpy()
print("ran")
"""


def without_device(code, **environ):
    others = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300,
                          env={**others, **environ})


class TestImport:
    def test_without_a_driver_the_error_says_what_to_do(self):
        done = without_device("import gluon_amp")
        assert "ImportError: MXNet's CUDA build needs the library of NVIDIA's driver, libcuda.so.1" in done.stderr
        assert "--gpus all" in done.stderr

    def test_with_a_driver_nothing_else_is_needed(self):
        done = device.run("import gluon_amp, mxnet; print(mxnet.context.num_gpus())")
        assert done.stdout == "1\n", done.stderr

    def test_with_a_stub_of_the_driver_cuda_is_loaded_from_packages(self, tmp_path):
        code = f"{INIT}print('GPUs', mx.context.num_gpus())"
        done = without_device(code, LD_LIBRARY_PATH=str(device.stub(tmp_path).parent))
        assert done.stdout.endswith("active None 3.0\nGPUs 0\n"), done.stderr
        # CUDA's run-time library takes a driver that does not tell its version for an old one.
        assert "runs on the CPU: CUDA driver version is insufficient for CUDA runtime version" in done.stdout

    def test_mxnet_alone_with_the_line_of_the_documentation(self):
        text = (device.ROOT / "docs" / "gpu.md").read_text()
        line = next(line for line in text.splitlines() if line.startswith("export LD_LIBRARY_PATH="))
        environ = {**device.environment(), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        script = f'{line}\nexec python -c "import mxnet; print(mxnet.context.num_gpus())"'
        done = subprocess.run(["sh", "-c", script], env=environ, capture_output=True, text=True, check=False)
        assert done.stdout == "1\n", done.stderr


class TestDrivers:
    @pytest.mark.parametrize(("code", "said"), [
        (999, "null GPU error (CUDA error 999)"), (804, "null GPU error (CUDA error 804)"),
        (35, "CUDA driver version is insufficient for CUDA runtime version (CUDA error 35)")])
    def test_one_that_does_not_work_leaves_the_cpu(self, code, said):
        done = device.run(INIT, broken=code)
        assert "NVIDIA's driver does not work, so that there are no GPUs and AMP runs on the CPU" in done.stdout
        assert said in done.stdout
        assert "active None 3.0" in done.stdout, done.stderr

    def test_a_machine_without_a_gpu_hears_nothing(self):
        done = device.run(INIT, broken=100)
        assert "driver" not in done.stdout
        assert "active None 3.0" in done.stdout, done.stderr

    def test_a_child_of_a_process_that_uses_the_gpu_has_the_cpu(self):
        # One worker: of two that throw at once, C++ may name neither's error ("terminate called recursively").
        code = """
import os
os.environ["MXNET_GPU_WORKER_NTHREADS"] = "1"
import gluon_amp as amp, mxnet as mx
amp.init()
mx.nd.ones(3, ctx=mx.gpu(0)).wait_to_read()
mx.nd.waitall()
child = os.fork()
if child == 0:
    print("child", mx.nd.ones(3).sum().asscalar(), flush=True)
    mx.nd.ones(3, ctx=mx.gpu(0)).wait_to_read()
    os._exit(0)
print("ended with", os.waitpid(child, 0)[1])
"""
        done = device.run(code)
        assert done.stdout == f"child 3.0\nended with {int(signal.SIGABRT)}\n", done.stderr  # MXNet ends the process
        assert "cudaSuccess" in done.stderr

    def test_one_that_is_too_old_for_fused_operators_is_known_at_init(self):
        done = device.run(NET, driver=11040)
        assert "MXNET_USE_FUSION=0 is set" in done.stderr
        assert done.stdout == "ran\n", done.stderr

    def test_it_fails_where_fusion_is_kept(self):
        done = device.run(NET.replace("amp.init()", ""), driver=11040)
        assert "unsupported toolchain" in done.stderr

    def test_one_that_fits_lets_fused_operators_compile(self):
        done = device.run(NET)
        assert done.stdout == "ran\n", done.stderr
        assert "MXNET_USE_FUSION" not in done.stderr


@pytest.mark.parametrize(("capability", "dtype"), [
    ("3.7", None), ("5.2", "float16"), ("6.1", "float16"), ("7.5", "float16"), ("8.9", "float16"), ("9.0", None)])
def test_what_init_chooses(capability, dtype):
    done = device.run(INIT, capability=capability)
    assert f"active {dtype} 3.0" in done.stdout, done.stderr
    assert ("AMP stays in FP32 on the GPU" in done.stdout) == (dtype is None)


@pytest.mark.parametrize(("setting", "said"), [("memory_fails", "out of memory"), ("launch_fails", "launch failure")])
def test_errors_of_the_device_are_raised_and_leave_the_cpu(setting, said):
    code = f"""
import os
import gluon_amp as amp, mxnet as mx
amp.init()
net = mx.gluon.nn.Dense(4)
net.initialize(ctx=mx.gpu(0))
net.hybridize()
net(mx.nd.ones((8, 4096), ctx=mx.gpu(0))).asnumpy()  # nothing of the start is left to other threads
os.environ["NULLGPU_{setting.upper()}"] = "2"
try:
    net(mx.nd.ones((512, 4096), ctx=mx.gpu(0))).asnumpy()
    net(mx.nd.ones((1024, 4096), ctx=mx.gpu(0))).asnumpy()
except mx.MXNetError as error:
    print("raised", error)
print(mx.nd.ones(3).sum().asscalar())
os._exit(0)
"""
    done = device.run(code)
    assert "raised" in done.stdout, (done.stdout, done.stderr)
    assert said in done.stdout
    assert done.stdout.endswith("3.0\n")
