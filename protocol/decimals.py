"""AMQP's decimal types (1.6.15 to 1.6.17): IEEE 754-2008 in the binary integer encoding, as decimal.Decimal.

The SDK for .NET (Microsoft.Azure.Amqp) shifts the exponent of a decimal128 by two bits too many, and reads what it has
written only because it keeps eight bits of an exponent. So 12.345 comes as 12345E-4611. `decode_decimal` reads it as
12.345: no other number that .NET's decimal can have begins so, and a number that is as small is hardly meant.
"""

from decimal import Context, Decimal, DivisionByZero, InvalidOperation, Overflow
from typing import Final, NamedTuple

from protocol.codec import Decimal32, Decimal64, Decimal128

# Arithmetic on decimals has the digits and the range of decimal128, and raises if there is no result.
CONTEXT: Final = Context(prec=34, Emin=-6143, Emax=6144, clamp=1, traps=[InvalidOperation, DivisionByZero, Overflow])


class _Format(NamedTuple):
    bits: int
    exponent_bits: int
    bias: int
    digits: int


# What .NET writes for the exponents -28 to 0, and how many bits the coefficient of a .NET decimal has.
_DOTNET_EXPONENTS: Final = range(1540, 1569)
_DOTNET_COEFFICIENT_BITS: Final = 96

_FORMATS: Final = {4: _Format(32, 8, 101, 7), 8: _Format(64, 10, 398, 16), 16: _Format(128, 14, 6176, 34)}


def decode_decimal(octets: Decimal32 | Decimal64 | Decimal128) -> Decimal | float:
    """The number; infinities and NaN become floats, because they compare like floats."""
    form = _FORMATS[len(octets)]
    bits = int.from_bytes(octets, "big")
    sign = bits >> (form.bits - 1)
    top = bits >> (form.bits - 6) & 0b11111
    if top >= 0b11110:
        return float("nan") if top & 1 else float("-inf" if sign else "inf")
    coefficient_bits = form.bits - 1 - form.exponent_bits
    implied = 0
    if top >= 0b11000:  # the second form: two bits that mark it, then the exponent; the coefficient begins with 100
        coefficient_bits -= 2
        implied = 0b100 << coefficient_bits
    exponent = bits >> coefficient_bits & ((1 << form.exponent_bits) - 1)
    coefficient = implied | bits & ((1 << coefficient_bits) - 1)
    if coefficient >= 10**form.digits:
        coefficient = 0  # a coefficient that is not canonical counts as zero (IEEE 754-2008, 3.5.2)
    bias = form.bias
    if exponent in _DOTNET_EXPONENTS and form.bits == 128 and not coefficient >> _DOTNET_COEFFICIENT_BITS:
        bias = _DOTNET_EXPONENTS[-1]
    return Decimal(f"{'-' if sign else ''}{coefficient}E{exponent - bias}")


def encode_decimal(number: Decimal) -> Decimal128:
    """The decimal128 nearest to a finite number."""
    sign, digits, exponent = CONTEXT.plus(number).as_tuple()
    assert isinstance(exponent, int)
    coefficient = int("".join(map(str, digits)) or "0")
    form = _FORMATS[16]
    bits = sign << 127 | (exponent + form.bias) << (127 - form.exponent_bits) | coefficient
    return Decimal128(bits.to_bytes(16, "big"))
