"""Stands in for torchvision, whose builds do not go with a CPU build of torch. Text models import
it and call nothing of it."""

from __future__ import annotations

import enum

from stand_ins import names_of, stand_in

__version__ = "0.28.0+placeholder"
__path__: list[str] = []


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


stand_in(__name__, InterpolationMode=InterpolationMode)
__getattr__ = names_of(__name__)

from torchvision import io, transforms  # noqa: E402, F401
