"""Constants of the GGUF format: value types, tensor types, names of split files. Reads nothing."""

from __future__ import annotations

import re
from enum import IntEnum

SPLIT_FILE_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class ValueType(IntEnum):
    """Stored type of a metadata value."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


# NumPy type of each value type of fixed size. Any non-zero byte is a true BOOL.
NUMPY_TYPES = {
    ValueType.UINT8: "u1", ValueType.INT8: "i1", ValueType.UINT16: "<u2", ValueType.INT16: "<i2",
    ValueType.UINT32: "<u4", ValueType.INT32: "<i4", ValueType.UINT64: "<u8", ValueType.INT64: "<i8",
    ValueType.FLOAT32: "<f4", ValueType.FLOAT64: "<f8", ValueType.BOOL: "u1",
}  # fmt: skip

# Name, elements per block, bytes per block. The missing numbers were withdrawn; no reader accepts them.
# (`gguf.constants.GGML_QUANT_SIZES` lacks Q2_0 and has a different size for Q8_1 than ggml.)
TENSOR_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}  # fmt: skip
