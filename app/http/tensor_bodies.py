"""Tensors, and the places they come from, as bodies name them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, StringConstraints

from app.domain.kinds import TensorDtype
from app.domain.tensors import TensorSpec
from app.http.bodies import Body, Count, sequence

ONE_LINE = r"^[^\x00-\x1f\x7f-\x9f]*$"

Path = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=ONE_LINE)]
TensorName = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=ONE_LINE)]
GroupRank = Annotated[int, Field(ge=0, le=65535)]


class TensorSpecBody(Body):
    name: TensorName
    dtype: Annotated[TensorDtype, Field(strict=False)]
    shape: Annotated[tuple[Count, ...], Field(max_length=16), BeforeValidator(sequence)]

    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.dtype, self.shape)
