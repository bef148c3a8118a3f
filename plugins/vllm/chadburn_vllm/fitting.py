"""Whether a checkpoint is one of this very model."""

from __future__ import annotations

from collections.abc import Mapping

from .header import Tensor
from .payload import Refused

SHOWN = 5


def must_fit(new: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> None:
    """Every tensor of the model with its shape and dtype, and no other.

    vLLM's own loaders skip what is missing, cast what has another dtype, and find another shape
    only half-way: a model that is partly another is the worst end an update can have.

    Raises: Refused, naming up to five tensors of each kind of fault.
    """
    faults = [
        *_names("missing", [name for name in model if name not in new]),
        *_names("unknown to the model", [name for name in new if name not in model]),
        *_names(
            "of another form",
            [
                f"{name} ({new[name].form}, the model's is {model[name].form})"
                for name in new
                if name in model and new[name].form != model[name].form
            ],
        ),
    ]
    if faults:
        raise Refused("this checkpoint is not one of the served model: " + "; ".join(faults))


def _names(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return [f"{what}: {', '.join(sorted(names)[:SHOWN])}{more}"]
