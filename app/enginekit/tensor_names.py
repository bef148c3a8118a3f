"""Types of elements, as headers of safetensors files name them."""

from __future__ import annotations

from app.domain.kinds import TensorDtype

SAFETENSORS = {
    TensorDtype.FLOAT64: "F64",
    TensorDtype.FLOAT32: "F32",
    TensorDtype.FLOAT16: "F16",
    TensorDtype.BFLOAT16: "BF16",
    TensorDtype.FLOAT8_E4M3FN: "F8_E4M3",
    TensorDtype.FLOAT8_E5M2: "F8_E5M2",
    TensorDtype.INT64: "I64",
    TensorDtype.INT32: "I32",
    TensorDtype.INT16: "I16",
    TensorDtype.INT8: "I8",
    TensorDtype.UINT8: "U8",
    TensorDtype.BOOL: "BOOL",
}
