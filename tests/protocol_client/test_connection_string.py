import pytest

from protocol.client.connection_string import (
    Anonymous,
    ConnectionString,
    InvalidConnectionString,
    SharedAccessKey,
    SharedAccessSignature,
)

KEY = "SharedAccessKeyName=root;SharedAccessKey=a+b/c=="


def test_the_emulators_string_is_plain_tcp():
    parsed = ConnectionString.parse(f"Endpoint=sb://localhost;{KEY};UseDevelopmentEmulator=true;")
    assert parsed == ConnectionString("localhost", 5672, False, SharedAccessKey("root", "a+b/c=="))


def test_the_clouds_string_is_tls():
    parsed = ConnectionString.parse(f"Endpoint=sb://name.servicebus.windows.net/;{KEY};EntityPath=orders")
    assert (parsed.host, parsed.port, parsed.tls) == ("name.servicebus.windows.net", 5671, True)
    assert parsed.entity_path == "orders"


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("sb://h:1234", ("h", 1234, True)),
        ("sb://h:1234/", ("h", 1234, True)),
        ("amqp://h", ("h", 5672, False)),
        ("amqps://h", ("h", 5671, True)),
        ("sb://[::1]:5672", ("::1", 5672, True)),
    ],
)
def test_endpoints(endpoint, expected):
    parsed = ConnectionString.parse(f"Endpoint={endpoint};{KEY}")
    assert (parsed.host, parsed.port, parsed.tls) == expected


def test_names_are_read_in_any_case_and_order_and_unknown_ones_passed_over():
    parsed = ConnectionString.parse(f"  {KEY} ; TransportType=Amqp; usedevelopmentemulator=TRUE; endpoint=sb://h ")
    assert parsed == ConnectionString("h", 5672, False, SharedAccessKey("root", "a+b/c=="))


def test_a_signature_stands_for_a_key():
    token = "SharedAccessSignature sr=sb%3A%2F%2Fh&sig=x%3D&se=1&skn=root"
    parsed = ConnectionString.parse(f"Endpoint=sb://h;SharedAccessSignature={token}")
    assert parsed.credentials == SharedAccessSignature(token)


def test_without_a_key_it_is_nobody():
    assert ConnectionString.parse("Endpoint=amqp://h").credentials == Anonymous()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no Endpoint"),
        (KEY, "no Endpoint"),
        ("Endpoint=host", "not a URL"),
        ("Endpoint=http://host", "not a URL"),
        ("Endpoint=sb://", "not a URL"),
        ("Endpoint=sb://h:port", "not a URL"),
        ("Endpoint=sb://h:99999", "not a URL"),
        ("Endpoint=sb://[::1", "not a URL"),
        ("Endpoint=sb://h;SharedAccessKeyName=root", "both"),
        ("Endpoint=sb://h;SharedAccessKey=secret", "both"),
        ("Endpoint=sb://h;secret", "no '='"),
        (f"Endpoint=sb://h;{KEY};sharedaccesskey=secret", "twice"),
    ],
)
def test_errors_are_told_without_the_key(text, problem):
    with pytest.raises(InvalidConnectionString, match=problem) as caught:
        ConnectionString.parse(text)
    assert "secret" not in str(caught.value)


def test_keys_are_not_shown():
    parsed = ConnectionString.parse("Endpoint=sb://h;SharedAccessKeyName=root;SharedAccessKey=secret")
    assert "secret" not in repr(parsed)
