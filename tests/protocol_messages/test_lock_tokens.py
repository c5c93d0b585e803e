from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import encode
from protocol.lock_tokens import COMMON_BYTES, TOKEN_BYTES, token_of, uuid_bytes, uuid_of


def test_a_delivery_tag_is_the_guid_in_the_byte_order_of_dotnet():
    tag = bytes.fromhex("33221100 5544 7766 8899aabbccddeeff")
    guid = UUID("00112233-4455-6677-8899-aabbccddeeff")
    assert uuid_of(tag) == guid
    assert token_of(guid) == tag
    assert encode(uuid_of(tag)) == bytes.fromhex("98 00112233 4455 6677 8899aabbccddeeff")


@given(st.binary(min_size=TOKEN_BYTES, max_size=TOKEN_BYTES))
def test_the_two_orders_are_inverse(token):
    assert token_of(uuid_of(token)) == token


@given(st.binary(min_size=TOKEN_BYTES, max_size=TOKEN_BYTES))
def test_tokens_with_a_common_beginning_have_one_in_both_orders(token):
    assert uuid_bytes(token) == uuid_of(token).bytes
    other = token[:COMMON_BYTES] + bytes(COMMON_BYTES)
    assert uuid_bytes(other) == uuid_of(token).bytes[:COMMON_BYTES] + other[COMMON_BYTES:]
