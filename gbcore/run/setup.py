"""Settings of the whole process of a run: random seeds, torch, memory."""

import contextlib
import ctypes
import os
import random
from typing import Any

import numpy as np
import torch


def seed_everything(args: Any) -> tuple[np.random.Generator, torch.device]:
    """Seed all chance, set up torch. Returns the run's NumPy generator, torch's device."""
    flush_denormals()
    random.seed(args.seed)
    np.random.seed(args.seed)  # noqa: NPY002, for code that users paste
    torch.manual_seed(args.seed)
    if args.torch_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # none is read
    torch.set_num_threads(args.threads)
    _keep_freed_memory()
    on_gpu = args.cuda and torch.cuda.is_available()  # a run may go on without its GPU
    if on_gpu:  # work is captured on the stream that it was warmed up on, not the default one
        torch.cuda.set_stream(torch.cuda.Stream())
    return np.random.default_rng(args.seed), torch.device("cuda" if on_gpu else "cpu")


def flush_denormals() -> None:
    """Set the arithmetic of this process: before anything is played, evaluated or restored.

    Sparse rewards fill Adam's moments with denormals, which are slow. An environment in float32
    with friction has other states with them than without.
    """
    for dtype in (np.float16, np.float32, np.float64, np.longdouble):
        np.finfo(dtype)  # found and kept with denormals: without, imports of NumPy's would warn
    torch.set_flush_denormal(True)


def _keep_freed_memory():
    """Have glibc reuse large freed blocks: given back, they are zeroed page by page each time."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        m_trim_threshold, m_mmap_threshold = -1, -3  # of malloc.h
        mallopt(m_mmap_threshold, 2**25)  # the largest that it takes
        mallopt(m_trim_threshold, 2**30)
