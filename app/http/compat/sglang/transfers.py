"""How a trainer says that weights travel, read into what a weight session says."""

from __future__ import annotations

from app.domain.kinds import CollectiveBackend, TensorDtype
from app.domain.tensors import TensorSpec
from app.domain.weight_sessions import NcclTransfer
from app.http.compat.refusals import BadBody
from app.http.compat.sglang.bodies import DistributedBody, GroupBody


def group_of(body: GroupBody) -> NcclTransfer:
    """Raises BadBody, InvalidArgument."""
    return NcclTransfer(
        address=body.master_address,
        port=body.master_port,
        world_size=body.world_size,
        rank_offset=body.rank_offset,
        backend=_backend(body.backend),
        group=_group(body.group_name),
    )


def specs_of(body: DistributedBody) -> tuple[TensorSpec, ...]:
    """Raises BadBody. SGLang takes what it can pair, and says that all went well."""
    if not body.names or not len(body.names) == len(body.dtypes) == len(body.shapes):
        raise BadBody("names, dtypes and shapes must be as many, and not none")
    if any(size < 0 for shape in body.shapes for size in shape):
        raise BadBody("shapes must be of numbers that are not below 0")
    try:
        dtypes = [TensorDtype(name.removeprefix("torch.")) for name in body.dtypes]
    except ValueError:
        raise BadBody("dtypes has one that is not known here") from None
    rows = zip(body.names, dtypes, body.shapes, strict=True)
    return tuple(TensorSpec(name, dtype, shape) for name, dtype, shape in rows)


def _backend(name: str) -> CollectiveBackend:
    try:
        return CollectiveBackend(name)
    except ValueError:
        known = ", ".join(CollectiveBackend)
        raise BadBody(f"backend is not one that is known here: {known}") from None


def _group(name: str) -> str:
    """SGLang ends over a group without a name."""
    if not name or not name.isprintable() or len(name) > 256:
        raise BadBody("group_name must be 1 to 256 printable characters")
    return name
