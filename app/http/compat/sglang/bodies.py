"""What clients of SGLang send. Read as leniently as it reads: fields that nobody knows are passed
over, a number may come as a text, `null` is absent where it may be. A body has to be there, if
only `{}`. Refusals name the place and never what stood there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.http.compat.asked import BIGGEST, Asked
from app.http.compat.refusals import Invalid

Number = Annotated[int, Field(ge=-BIGGEST, le=BIGGEST)]
_GROUP = "weight_update_group"


class Body(BaseModel):
    """Pydantic converts as there: `"29500"` is a number, a number is no text."""

    model_config = ConfigDict(frozen=True, extra="ignore")


B = TypeVar("B", bound=Body)


def body_of(model: type[B], *, optional: bool = False) -> Callable[[Asked], B]:
    def read(asked: Asked) -> B:
        """Raises Invalid."""
        found = asked.model(optional=optional)
        try:
            return model.model_validate(found)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = ".".join(["body", *map(str, first["loc"])])
            raise Invalid(place, first["type"], first["msg"]) from None

    return read


def timeout_asked(asked: Asked) -> float:
    """Seconds, 0 or more. Raises Invalid."""
    given = asked.text("timeout")
    try:
        seconds = float(given) if given is not None else 0.0
    except ValueError:
        said = "Input should be a valid number, unable to parse string as a number"
        raise Invalid("query.timeout", "float_parsing", said) from None
    if not math.isfinite(seconds):
        raise Invalid("query.timeout", "finite_number", "Input should be a finite number")
    if not 0 <= seconds <= BIGGEST:
        said = "Input should be greater than or equal to 0"
        raise Invalid("query.timeout", "greater_than_equal", said)
    return seconds


class PauseBody(Body):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueBody(Body):
    torch_empty_cache: bool = True


class TagsBody(Body):
    tags: tuple[str, ...] | None = None


class AbortBody(Body):
    rid: str | None = ""
    abort_all: bool = False


class DiskBody(Body):
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    recapture_cuda_graph: bool = False
    flush_cache: bool = True
    manifest: dict[str, Any] | None = None


class GroupBody(Body):
    master_address: str
    master_port: Number
    rank_offset: Number
    world_size: Number
    group_name: str = _GROUP
    backend: str = "nccl"


class GroupNameBody(Body):
    group_name: str = _GROUP


class BeginBody(Body):
    selector: Literal["target", "draft", "all"] = "all"


class EndBody(Body):
    pass


class DistributedBody(Body):
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[Number, ...], ...]
    group_name: str = _GROUP
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: str | None = None
    selector: Literal["target", "draft", "all"] = "all"


class TensorBody(Body):
    serialized_named_tensors: Annotated[tuple[str, ...], Field(min_length=1, max_length=4096)]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    selector: Literal["target", "draft", "all"] = "all"


class VersionBody(Body):
    new_version: str


class LoadBody(Body):
    lora_name: str
    lora_path: str
    pinned: bool = False


class UnloadBody(Body):
    lora_name: str


class ProfileBody(Body):
    output_dir: str | None = None
    start_step: Number | None = None
    num_steps: Number | None = None
    activities: tuple[str, ...] | None = None
    profile_by_stage: bool = False
    with_stack: bool | None = None
    record_shapes: bool | None = None
    merge_profiles: bool = False
    profile_stages: tuple[str, ...] | None = None
    detailed_annotations: bool = False


class RoleBody(Body):
    new_role: Literal["prefill", "decode"]
    prepare_only: bool = False
    decode_cuda_graph_bs: tuple[Number, ...] | None = None
    decode_cuda_graph_memory_gb: float | None = None


class ScaleBody(Body):
    new_ep_size: Any = None
