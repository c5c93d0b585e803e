import re
from uuid import UUID

from protocol import error_texts

ID = UUID("01234567-89ab-cdef-0123-456789abcdef")


def test_a_text_ends_with_where_and_when():
    text = error_texts.tracked(error_texts.LOCK_LOST, ID, 1704067199_999, error_texts.entity_tracker("ns", "q1"), 2, 7)
    assert text == (
        "The lock supplied is invalid. Either the lock expired, or the message has already been removed from the "
        "queue. TrackingId:01234567-89ab-cdef-0123-456789abcdef_G2_B7, SystemTracker:ns:Queue:q1, "
        "Timestamp:2023-12-31T23:59:59"
    )


def test_the_text_of_a_missing_entity_is_the_one_that_java_and_javascript_look_for():
    text = error_texts.tracked(error_texts.entity_not_found("ns", "q1"), ID, 0)
    assert re.search(r"The messaging entity .* could not be found", text)
    assert "'ns:queue:q1'" in text
    assert text.endswith("SystemTracker:NoSystemTracker, Timestamp:1970-01-01T00:00:00")


def test_the_texts_of_attach_say_what_the_contract_says():
    assert error_texts.claim_required("Send", "sb://host/q") == (
        "Unauthorized access. 'Send' claim(s) are required to perform this operation. Resource: 'sb://host/q'."
    )
    assert "non-sessionful message receiver" in error_texts.SESSION_RECEIVER_REQUIRED
    assert "Ensure RequiresSession is set to true" in error_texts.SESSION_RECEIVER_NOT_SUPPORTED


def test_the_texts_of_sending_say_what_the_contract_says():
    assert error_texts.message_too_large(3, 300_000, 262_144) == (
        "The received message (delivery-id:3, size:300000 bytes) exceeds the limit (262144 bytes) currently allowed "
        "on the link."
    )
    assert "Error code : 50009" in error_texts.SERVER_BUSY
