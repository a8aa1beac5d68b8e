"""Repairs of Triton's interpreter that every test of kernels needs."""

from kernel_device import DEVICE

from benchmarks.gpu_suite.interpreter import mend_interpreter

if DEVICE == "cpu":
    mend_interpreter()
