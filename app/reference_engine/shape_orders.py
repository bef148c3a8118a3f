"""How ranks are told to serve in another shape. Frozen values, no torch.

Limits change within a group. Another number of ranks is another group: each rank writes its live
weights to a file of memory that the front end made, and the new ranks put theirs together from all
of these.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.reference_engine import change_orders


@dataclass(frozen=True, slots=True)
class LiveWeights:
    """What the ranks of an earlier group serve, in rank order: ``paths`` of their parts, and the
    ``sha256`` of each as its rank reported it when its weights were committed.

    A part has the rank's share of every tensor, in the order of the configuration, as float32,
    row-major, without a gap.
    """

    paths: tuple[str, ...]
    sha256: tuple[str, ...]


# ---- orders ----


@dataclass(frozen=True, slots=True)
class WriteWeights:
    """Each rank to the path of its own. Refused where the live weights are not there, or are not
    what they were."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLimits:
    """In requests and tokens; refused where one contradicts the other."""

    max_running: int
    max_batched_tokens: int


# ---- results ----


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsWritten:
    """``sha256`` of the weights, computed from their bytes as they are now."""

    bytes: int
    sha256: str


ShapeOrder = WriteWeights | SetLimits
BesideSteps = change_orders.BesideSteps | WriteWeights  # carried out in a thread of its own
