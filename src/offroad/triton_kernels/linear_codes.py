"""Stored codes to numbers inside Triton kernels: integers, E2M1 and E4M3, without a conversion instruction a weight.

With `ASM`, two codes become two bf16 or fp16 of one register by shifts and masks: a code's bits are put where the float
has its exponent and mantissa, and one packed multiply-add removes the offset, or the difference of exponent biases.
Without, the same numbers come from arithmetic in fp32: for fp32 activations, and for Triton's interpreter, which runs
no inline assembly. All of them are exact.
"""

import triton
import triton.language as tl

_2_126, _2_120 = tl.constexpr(2.0**126), tl.constexpr(2.0**120)

_UNPACK = """{
    .reg .b32 a, b, c, e, f, g, h, x, y;
    shr.u32 a, $8, 4; shr.u32 b, $8, 8; shr.u32 c, $8, 12;
    lop3.b32 e, $8, 0x000F000F, MAGIC, 0xEA; lop3.b32 f, a, 0x000F000F, MAGIC, 0xEA;
    lop3.b32 g, b, 0x000F000F, MAGIC, 0xEA; lop3.b32 h, c, 0x000F000F, MAGIC, 0xEA;
    mov.b32 x, ONE; mov.b32 y, OFFSET;
    FMA e, e, x, y; FMA f, f, x, y; FMA g, g, x, y; FMA h, h, x, y;
    mov.b32 {$0,$1}, e; mov.b32 {$2,$3}, f; mov.b32 {$4,$5}, g; mov.b32 {$6,$7}, h;
}"""
_E2M1 = """{
    .reg .b32 a, b, e, f, g, h, x, y;
    shl.b32 a, $8, 12; and.b32 a, a, 0x80008000; MAG0; lop3.b32 e, b, MASK, a, 0xEA;
    shl.b32 a, $8, 8; and.b32 a, a, 0x80008000; MAG1; lop3.b32 f, b, MASK, a, 0xEA;
    shl.b32 a, $8, 4; and.b32 a, a, 0x80008000; MAG2; lop3.b32 g, b, MASK, a, 0xEA;
    and.b32 a, $8, 0x80008000; MAG3; lop3.b32 h, b, MASK, a, 0xEA;
    mov.b32 x, ONE; mov.b32 y, 0x80008000;
    FMA e, e, x, y; FMA f, f, x, y; FMA g, g, x, y; FMA h, h, x, y;
    mov.b32 {$0,$1}, e; mov.b32 {$2,$3}, f; mov.b32 {$4,$5}, g; mov.b32 {$6,$7}, h;
}"""
_E4M3 = """{
    .reg .b32 a, b, e, f, x, y;
    prmt.b32 e, $4, 0, 0x1404; prmt.b32 f, $4, 0, 0x3424;
    and.b32 a, e, 0x80008000; shr.u32 b, e, SHIFT; lop3.b32 e, b, MASK, a, 0xEA;
    and.b32 a, f, 0x80008000; shr.u32 b, f, SHIFT; lop3.b32 f, b, MASK, a, 0xEA;
    mov.b32 x, ONE; mov.b32 y, 0x80008000;
    FMA e, e, x, y; FMA f, f, x, y;
    mov.b32 {$0,$1}, e; mov.b32 {$2,$3}, f;
}"""
# A byte is the last one of the float 2^23 + u, u = code + 128.
_INT8_BF16 = tl.constexpr("""{
    .reg .b32 u, e, f; .reg .f32 a, b, c, d; .reg .b32 p, q, r, s;
    xor.b32 u, $4, 0x80808080;
    prmt.b32 p, u, 0x4B000000, 0x7440; prmt.b32 q, u, 0x4B000000, 0x7441;
    prmt.b32 r, u, 0x4B000000, 0x7442; prmt.b32 s, u, 0x4B000000, 0x7443;
    mov.b32 a, p; mov.b32 b, q; mov.b32 c, r; mov.b32 d, s;
    add.f32 a, a, 0fCB000080; add.f32 b, b, 0fCB000080; add.f32 c, c, 0fCB000080; add.f32 d, d, 0fCB000080;
    cvt.rn.bf16x2.f32 e, b, a; cvt.rn.bf16x2.f32 f, d, c;
    mov.b32 {$0,$1}, e; mov.b32 {$2,$3}, f;
}""")
# A byte is the last one of the half 1024 + u.
_INT8_F16 = tl.constexpr("""{
    .reg .b32 u, e, f, x, y;
    xor.b32 u, $4, 0x80808080;
    prmt.b32 e, u, 0x64646464, 0x4140; prmt.b32 f, u, 0x64646464, 0x4342;
    mov.b32 x, 0x3C003C00; mov.b32 y, 0xE480E480;
    fma.rn.f16x2 e, e, x, y; fma.rn.f16x2 f, f, x, y;
    mov.b32 {$0,$1}, e; mov.b32 {$2,$3}, f;
}""")


def _filled(text: str, **words: str) -> tl.constexpr:
    for name, word in words.items():
        text = text.replace(name, word)
    return tl.constexpr(text)


# 128 + u or 1024 + u in the mantissa, and 8 more to take away.
_INT4_BF16 = _filled(_UNPACK, MAGIC="0x43004300", ONE="0x3F803F80", OFFSET="0xC308C308", FMA="fma.rn.bf16x2")
_INT4_F16 = _filled(_UNPACK, MAGIC="0x64006400", ONE="0x3C003C00", OFFSET="0xE408E408", FMA="fma.rn.f16x2")
# Magnitude bits at the top of the mantissa and the bottom of the exponent; times 2^126 or 2^14.
_E2M1_BF16 = _filled(
    _E2M1,
    MAG0="shl.b32 b, $8, 6",
    MAG1="shl.b32 b, $8, 2",
    MAG2="shr.u32 b, $8, 2",
    MAG3="shr.u32 b, $8, 6",
    MASK="0x01C001C0",
    ONE="0x7E807E80",
    FMA="fma.rn.bf16x2",
)
_E2M1_F16 = _filled(
    _E2M1,
    MAG0="shl.b32 b, $8, 9",
    MAG1="shl.b32 b, $8, 5",
    MAG2="shl.b32 b, $8, 1",
    MAG3="shr.u32 b, $8, 3",
    MASK="0x0E000E00",
    ONE="0x74007400",
    FMA="fma.rn.f16x2",
)
# A code in the upper byte of a half: 7 bits of magnitude go down by 4 or 1; times 2^120 or 2^8.
_E4M3_BF16 = _filled(_E4M3, SHIFT="4", MASK="0x07F007F0", ONE="0x7B807B80", FMA="fma.rn.bf16x2")
_E4M3_F16 = _filled(_E4M3, SHIFT="1", MASK="0x3F803F80", ONE="0x5C005C00", FMA="fma.rn.f16x2")


@triton.jit
def _nibble(p, shift: tl.constexpr, E2M1: tl.constexpr):
    """The number of the code at bit `shift` of words p, fp32."""
    u = (p >> shift) & 15
    if E2M1:
        bits = ((u & 8) << 28) | ((u & 7) << 22)  # exponent bias 127 against 1
        return bits.to(tl.float32, bitcast=True) * _2_126
    else:
        return u.to(tl.float32) - 8.0


_OUT = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r")
_BF16 = tl.constexpr((tl.bfloat16,) * 8)
_F16 = tl.constexpr((tl.float16,) * 8)
_OUT4 = tl.constexpr("=h,=h,=h,=h,r")
_BF16_4 = tl.constexpr((tl.bfloat16,) * 4)
_F16_4 = tl.constexpr((tl.float16,) * 4)


@triton.jit
def nibbles(p, DTYPE: tl.constexpr, E2M1: tl.constexpr, ASM: tl.constexpr):
    """Eight tensors of numbers from words: those of bits 0, 16, 4, 20, 8, 24, 12, 28. Integers are less 8."""
    if ASM and DTYPE.is_bf16():
        if E2M1:
            return tl.inline_asm_elementwise(_E2M1_BF16, _OUT, [p], dtype=_BF16, is_pure=True, pack=1)
        else:
            return tl.inline_asm_elementwise(_INT4_BF16, _OUT, [p], dtype=_BF16, is_pure=True, pack=1)
    elif ASM:
        if E2M1:
            return tl.inline_asm_elementwise(_E2M1_F16, _OUT, [p], dtype=_F16, is_pure=True, pack=1)
        else:
            return tl.inline_asm_elementwise(_INT4_F16, _OUT, [p], dtype=_F16, is_pure=True, pack=1)
    else:
        return (
            _nibble(p, 0, E2M1),
            _nibble(p, 16, E2M1),
            _nibble(p, 4, E2M1),
            _nibble(p, 20, E2M1),
            _nibble(p, 8, E2M1),
            _nibble(p, 24, E2M1),
            _nibble(p, 12, E2M1),
            _nibble(p, 28, E2M1),
        )


@triton.jit
def e4m3(code):
    """The numbers of E4M3 codes (integers below 256), fp32. Codes of NaN give 480."""
    wide = code.to(tl.int32)
    bits = ((wide & 128) << 24) | ((wide & 127) << 20)
    return bits.to(tl.float32, bitcast=True) * _2_120


@triton.jit
def scale_numbers(code, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The numbers of E4M3 codes without a sign, in DTYPE if ASM, else in fp32."""
    if ASM and DTYPE.is_bf16():
        return (code.to(tl.int16) << 4).to(tl.bfloat16, bitcast=True) * tl.full((1, 1), _2_120, tl.bfloat16)
    elif ASM:
        return (code.to(tl.int16) << 7).to(tl.float16, bitcast=True) * tl.full((1, 1), 256.0, tl.float16)
    else:
        return e4m3(code)


@triton.jit
def _byte(p, shift: tl.constexpr, E4M3: tl.constexpr):
    if E4M3:
        return e4m3((p >> shift) & 255)
    else:
        return ((p << (24 - shift)) >> 24).to(tl.float32)


@triton.jit
def bytes4(p, DTYPE: tl.constexpr, E4M3: tl.constexpr, ASM: tl.constexpr):
    """Four tensors of numbers from words: those of bytes 0, 1, 2, 3."""
    if ASM and DTYPE.is_bf16():
        if E4M3:
            return tl.inline_asm_elementwise(_E4M3_BF16, _OUT4, [p], dtype=_BF16_4, is_pure=True, pack=1)
        else:
            return tl.inline_asm_elementwise(_INT8_BF16, _OUT4, [p], dtype=_BF16_4, is_pure=True, pack=1)
    elif ASM:
        if E4M3:
            return tl.inline_asm_elementwise(_E4M3_F16, _OUT4, [p], dtype=_F16_4, is_pure=True, pack=1)
        else:
            return tl.inline_asm_elementwise(_INT8_F16, _OUT4, [p], dtype=_F16_4, is_pure=True, pack=1)
    else:
        return _byte(p, 0, E4M3), _byte(p, 8, E4M3), _byte(p, 16, E4M3), _byte(p, 24, E4M3)
