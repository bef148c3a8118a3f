"""Which kernels the products of matrices take: chosen before the first of them, for good.

What a request is answered must not depend on what shares its step. MKL chooses its kernel by the
number of rows and the alignment of operands, and on Intel's processors their results differ in the
last bits; in its strict mode it takes the same for all, at about a tenth of the speed of a step.
Others' processors get the same kernel from it as it is.
"""

from __future__ import annotations

import os
from pathlib import Path

_PROCESSORS = Path("/proc/cpuinfo")


def choose(processors: Path = _PROCESSORS) -> None:
    """Unless whoever started this process has chosen."""
    try:
        intel = "GenuineIntel" in processors.read_text()
    except OSError:
        return
    if intel:
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
