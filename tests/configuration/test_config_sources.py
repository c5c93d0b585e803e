import json

import pytest

from broker.namespace.entities import QueueDescription, SubscriptionDescription, TopicDescription
from broker.namespace.rule_descriptions import (
    DEFAULT_RULE,
    FalseFilter,
    RuleDescription,
    RuleValue,
    SqlAction,
    SqlFilter,
)
from broker.settings.config import ConfigurationError, Settings
from broker.settings.internal import ADVICE, INTERNAL
from broker.settings.log import LogLevel
from broker.settings.sources import FLAGS, MAX_FILE_BYTES, leaves, load, variable
from protocol.codec import Long


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "peeklock.toml"
        path.write_text(text)
        return path

    return write


def problems(config=None, flags=None, environment=None) -> list[str]:
    with pytest.raises(ConfigurationError) as raised:
        load(config, flags, environment)
    return str(raised.value).splitlines()


def test_without_sources_all_is_default():
    assert load().settings == Settings()


def test_flags_go_over_environment_over_file_over_default(toml):
    file = toml("[amqp]\nport = 1\nsender_credit = 11\nmax_connections = 111\n")
    environment = {"PEEKLOCK_AMQP__PORT": "2", "PEEKLOCK_AMQP__SENDER_CREDIT": "22"}
    loaded = load(file, {"--amqp-port": "3"}, environment)
    amqp = loaded.settings.amqp
    assert (amqp.port, amqp.sender_credit, amqp.max_connections) == (3, 22, 111)
    assert amqp.max_frame_size_bytes == 65536
    assert loaded.origins["amqp", "port"].spelling == "--amqp-port"
    assert loaded.origins["amqp", "sender_credit"].spelling == "PEEKLOCK_AMQP__SENDER_CREDIT"
    assert loaded.origins["amqp", "max_connections"].spelling == f"{file}: amqp.max_connections"


def test_the_file_may_be_named_by_the_environment(toml):
    file = toml("partitions = 7")
    assert load(None, {}, {"PEEKLOCK_CONFIG": str(file)}).settings.partitions == 7


def test_a_file_named_by_flag_goes_over_one_named_by_the_environment(toml):
    assert load(toml("partitions = 7"), {}, {"PEEKLOCK_CONFIG": "/nowhere"}).settings.partitions == 7


def text_of(place, value) -> str:
    if value is None:
        return "off"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, list | tuple) else str(value)


@pytest.mark.parametrize("place", leaves())
def test_every_setting_can_be_given_by_its_variable(place):
    document = Settings().model_dump(mode="json")
    value = document[place[0]] if len(place) == 1 else document[place[0]][place[1]]
    loaded = load(environment={variable(place): text_of(place, value)})
    assert loaded.settings == Settings()
    assert list(loaded.origins) == [place]


def test_values_from_the_environment_have_the_type_of_their_setting():
    settings = load(
        environment={
            "PEEKLOCK_DATA_DIR": "/var/lib/peeklock",
            "PEEKLOCK_EMULATOR": "Yes",
            "PEEKLOCK_WORKERS": "2",
            "PEEKLOCK_OPS__PORT": "OFF",
            "PEEKLOCK_STORE__SEND_WATERMARK": "0.5",
            "PEEKLOCK_LOG__LEVEL": "WARNING",
            "PEEKLOCK_QUEUES": '[{"name": "orders", "max_delivery_count": 3}]',
        }
    ).settings
    assert str(settings.data_dir) == "/var/lib/peeklock"
    assert settings.emulator is True
    assert settings.workers == 2
    assert settings.ops.port is None
    assert settings.store.send_watermark == 0.5
    assert settings.log.level is LogLevel.WARNING
    assert settings.queues[0].max_delivery_count == 3


def test_an_empty_variable_counts_as_not_set(toml):
    file = toml("partitions = 7")
    assert load(file, {}, {"PEEKLOCK_PARTITIONS": "", "PEEKLOCK_CONFIG": ""}).settings.partitions == 7


def test_off_in_a_file_is_no_value(toml):
    assert load(toml('[ops]\nport = "off"')).settings.ops.port is None


def test_host_is_for_all_listeners():
    settings = load(flags={"--host": "0.0.0.0"}).settings
    assert settings.amqp.host == settings.ops.host == "0.0.0.0"


def test_flags_name_settings_that_exist():
    for places in FLAGS.values():
        for place in places:
            assert tuple(place.split(".")) in leaves()


def test_a_byte_order_mark_is_no_part_of_the_file(toml):
    assert load(toml("\ufeffpartitions = 2")).settings.partitions == 2


def test_variables_of_a_kubernetes_service_of_our_name_are_ignored():
    load(
        environment={
            "PEEKLOCK_SERVICE_HOST": "10.0.0.1",
            "PEEKLOCK_SERVICE_PORT": "5672",
            "PEEKLOCK_SERVICE_PORT_AMQP": "5672",
            "PEEKLOCK_PORT": "tcp://10.0.0.1:5672",
            "PEEKLOCK_PORT_5672_TCP": "tcp://10.0.0.1:5672",
            "PEEKLOCK_PORT_5672_TCP_ADDR": "10.0.0.1",
            "PEEKLOCK_OPS_SERVICE_HOST": "10.0.0.1",
            "PEEKLOCK_OPS_PORT": "tcp://10.0.0.1:9464",
        }
    )


# Each wrong value: how it is given, and what the message must say.


@pytest.mark.parametrize(
    ("flag", "value", "text"),
    [
        ("--amqp-port", "x", '--amqp-port: "x" must be a whole number from 0 to 65535, or off'),
        ("--amqp-port", "70000", '--amqp-port: "70000" is out of range; it must be from 0 to 65535, or off'),
        ("--partitions", "0", '--partitions: "0" is out of range; it must be from 1 to 64'),
        ("--partitions", "off", '--partitions: "off" must be a whole number from 1 to 64'),
        ("--workers", "9", '--workers: "9" is more than the 4 partitions; lower it, or leave it out'),
        ("--workers", "-1", '--workers: "-1" is out of range; it must be from 0 to 64, or off'),
        ("--log-level", "loud", "--log-level: \"loud\" must be 'debug', 'info', 'warning' or 'error'"),
        ("--emulator", "perhaps", '--emulator: "perhaps" must be true or false'),
    ],
)
def test_a_wrong_flag_is_named_with_value_and_limits(flag, value, text):
    assert problems(flags={flag: value}) == [text]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("PEEKLOCK_AMQP__PORT", "1.5", '"1.5" must be a whole number from 0 to 65535, or off'),
        ("PEEKLOCK_AMQP__HOST", "a b", '"a b" must be an IP address or a host name'),
        ("PEEKLOCK_STORE__SEND_WATERMARK", "1", '"1" is out of range; it must be above 0 and below 1'),
        ("PEEKLOCK_STORE__SEND_WATERMARK", "x", '"x" must be a number above 0 and below 1'),
        (
            "PEEKLOCK_AMQP__IDLE_TIME_OUT_MS",
            "5",
            '"5" is out of range; it must be from 1000 to 86400000 ms (from PT1S to P1D)',
        ),
        ("PEEKLOCK_NAMESPACE", "a_b", '"a_b" must be 2 to 50 letters, digits and -, beginning with a letter and'),
        ("PEEKLOCK_QUEUES", "[", "must be a list (in a variable: as JSON)"),
        ("PEEKLOCK_TLS__KEY", "k.pem", '"k.pem" has no effect without tls.certificate; set both'),
        ("PEEKLOCK_TLS__CERTIFICATE", "c.pem", '"c.pem" has no effect without tls.key; set both'),
        ("PEEKLOCK_TLS__CLIENT_CA", "c.pem", '"c.pem" has no effect without tls.certificate and tls.key; set them'),
        ("PEEKLOCK_AMQP__TLS_PORT", "5671", '"5671" needs tls.certificate and tls.key; set them, or turn it off'),
        ("PEEKLOCK_HTTP__TLS_PORT", "443", '"443" needs tls.certificate and tls.key; set them, or turn it off'),
        ("PEEKLOCK_AMQP__TLS_KEY", "k.pem", "is PEEKLOCK_TLS__KEY now"),
        ("PEEKLOCK_AMQP__PORT", "off", '"off" is off, and so is tls_port: nobody could connect'),
        (
            "PEEKLOCK_AMQP__MAX_CONNECTIONS_BYTES",
            "1",
            '"1" is out of range; it must be from 67108864 to 2199023255552 bytes',
        ),
        ("PEEKLOCK_AMQP__PROT", "1", "no such setting; did you mean PEEKLOCK_AMQP__PORT?"),
        ("PEEKLOCK_WHAT", "1", "no such setting; docs/configuration.md lists them"),
    ],
)
def test_a_wrong_variable_is_named_with_value_and_limits(name, value, text):
    [problem] = problems(environment={name: value})
    assert problem.startswith(f"{name}: {text}")


def test_limits_of_memory_that_contradict_each_other_are_refused():
    names = ("PEEKLOCK_AMQP__MAX_CONNECTIONS_BYTES", "PEEKLOCK_AMQP__MAX_UNFINISHED_BYTES")
    [problem] = problems(environment=dict.fromkeys(names, "67108864"))
    assert problem == (
        f'{names[1]}: "67108864" is more than half of amqp.max_connections_bytes, which is 67108864; set it lower, or '
        "that higher"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("partitions = true", "partitions: true must be a whole number from 1 to 64"),
        ("partitions = '4'", 'partitions: "4" must be a whole number from 1 to 64'),
        ("emulator = 1", "emulator: 1 must be true or false"),
        ("log = 3", "log: 3 must be a table"),
        ("partition = 3", "partition: no such setting; did you mean partitions?"),
        ("[amqp]\nprot = 3", "amqp.prot: no such setting; did you mean port?"),
        ("queues = 3", "queues: must be a list (in a variable: as JSON)"),
        ("data_dir = 2020-01-01", "data_dir: must be a "),
        ("[[queues]]\nname = 'a'\nlock_duration_ms = 1", "queues[0].lock_duration_ms: 1 is out of range; it must be "),
        ("[[queues]]\nname = 'a b'", 'queues[0].name: "a b" must be 1 to 260 letters, digits and . _ - / ~, with '),
        ("[[queues]]\nname = 'a'\nforward_to = '/'", 'queues[0].forward_to: "/" must be the name of a queue'),
        ("[[queues]]\nmax_delivery_count = 1", "queues[0].name: is missing; add it"),
        ("[[queues]]\nname = 'a'\nlock = 1", "queues[0].lock: no such setting; "),
        ("[[queues]]\nname = 'a'\n[[queues]]\nname = 'A'", "queues: queue 'a' is declared twice; remove one"),
        (
            "[[queues]]\nname = 'a'\nuser_metadata = '" + "m" * 1025 + "'",
            'queues[0].user_metadata: "' + "m" * 98 + "… must have at most 1024 characters",
        ),
        (
            "[[queues]]\nname = 'a'\nauthorization_rules = ["
            + "{key_name='k', primary_key='p', rights=['Send']}," * 2
            + "]",
            "queues[0].authorization_rules: authorization rule 'k' is declared twice; remove one",
        ),
        (
            "[[security.authorization_rules]]\nkey_name = 'RootManageSharedAccessKey'\nprimary_key = 'p'\nrights = []",
            "security.authorization_rules: authorization rule 'RootManageSharedAccessKey' is declared twice",
        ),
    ],
)
def test_a_wrong_value_in_a_file_is_named_by_its_path(toml, text, problem):
    file = toml(text)
    [found] = problems(file)
    assert found.startswith(f"{file}: {problem}")


RULE = "[[topics]]\nname = 't'\n[[topics.subscriptions]]\nname = 's'\n[[topics.subscriptions.rules]]\nname = 'r'\n"
AT_RULE = "topics[0].subscriptions[0].rules[0]"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[topics]]\nname = 'a b'", 'topics[0].name: "a b" must be 1 to 260 letters, digits and . _ - / ~, with '),
        (
            "[[topics]]\nname = 'a/Subscriptions/b'",
            'topics[0].name: "a/Subscriptions/b" has no address: it must not hold // or end in /Subscriptions/ and a ',
        ),
        ("[[queues]]\nname = 'a//b'", 'queues[0].name: "a//b" has no address: '),
        (
            "[[topics]]\nname = 't'\nstatus = 'ReceiveDisabled'",
            "topics[0].status: \"ReceiveDisabled\" must be 'Active', 'Disabled' or 'SendDisabled'",
        ),
        (
            "[[topics]]\nname = 't'\nlock_duration_ms = 5000",
            "topics[0].lock_duration_ms: no such setting; known: name, ",
        ),
        ("[[topics]]\nname = 'a'\n[[topics]]\nname = 'A'", "topics: topic 'a' is declared twice; remove one"),
        (
            "[[queues]]\nname = 'a'\n[[topics]]\nname = 'A'",
            'topics[0].name: "A" is the name of a queue, too; queues and topics share their names, so rename one',
        ),
        (
            "[[topics]]\nname = 't'\n[[topics.subscriptions]]\nname = 'a/b'",
            'topics[0].subscriptions[0].name: "a/b" must be 1 to 50 letters, digits and . _ - ~, with a letter',
        ),
        (
            f"[[topics]]\nname = 't'\n[[topics.subscriptions]]\nname = '{'s' * 51}'",
            f'topics[0].subscriptions[0].name: "{"s" * 51}" must be 1 to 50 letters, ',
        ),
        (
            "[[topics]]\nname = 't'\n[[topics.subscriptions]]\nname = 's'\nstatus = 'SendDisabled'",
            "topics[0].subscriptions[0].status: \"SendDisabled\" must be 'Active', 'Disabled' or 'ReceiveDisabled'",
        ),
        (
            "[[topics]]\nname = 't'\nsubscriptions = [{ name = 's' }, { name = 'S' }]",
            "topics[0].subscriptions: subscription 's' is declared twice; remove one",
        ),
        (
            "[[topics]]\nname = 't'\nauthorization_rules = ["
            "{ key_name = 'k', primary_key = 'p', rights = [] }, { key_name = 'k', primary_key = 'q', rights = [] }]",
            "topics[0].authorization_rules: authorization rule 'k' is declared twice; remove one",
        ),
        (
            RULE + "[[topics.subscriptions.rules]]\nname = 'R'",
            "topics[0].subscriptions[0].rules: rule 'r' is declared",
        ),
        (
            RULE.replace("'r'", "'a/b'"),
            f'{AT_RULE}.name: "a/b" must be 1 to 50 characters other than / \\ @',
        ),
        (RULE + "filter = { kind = 'sql' }", f"{AT_RULE}.filter.expression: is missing; add it"),
        (
            RULE + "filter = { kind = 'x' }",
            f"{AT_RULE}.filter: must have a kind, which is true, ",
        ),
        (
            RULE + "filter = { label = 'x' }",
            f"{AT_RULE}.filter: must have a kind, which is true, ",
        ),
        (
            RULE + "filter = { kind = 'correlation' }",
            f"{AT_RULE}.filter: has no condition; give it a ",
        ),
        (
            RULE + "filter = { kind = 'correlation', labels = 'x' }",
            f"{AT_RULE}.filter.labels: no such setting; did you mean label?",
        ),
        (
            RULE + "filter = { kind = 'correlation', label = 1 }",
            f"{AT_RULE}.filter.label: 1 must be a string",
        ),
        (
            RULE + "filter = { kind = 'correlation', properties = { a = 2026-01-31 } }",
            f"{AT_RULE}.filter.properties.a: must be a string, a number, true or false, or a table with type and value",
        ),
        (
            RULE + "filter = { kind = 'correlation', properties = { a = { type = 'x', value = 1 } } }",
            f"{AT_RULE}.filter.properties.a.type: \"x\" must be 'string', 'int', 'long', ",
        ),
        (RULE + "filter = { kind = 'correlation', properties = 1 }", f"{AT_RULE}.filter.properties: 1 must be a table"),
        (RULE + "action = { expression = '' }", f'{AT_RULE}.action.expression: "" must not be empty'),
        (
            "[[queues]]\nname = 'a'\nforward_to = 'A'",
            'queues[0].forward_to: "A" is the queue itself; name another',
        ),
        (
            "[[queues]]\nname = 'a'\nforward_dead_lettered_messages_to = 'a'",
            'queues[0].forward_dead_lettered_messages_to: "a" is the queue itself; name another',
        ),
    ],
)
def test_errors_of_topics_and_forwarding_are_named_by_their_paths(toml, text, problem):
    path = toml(text)
    [found] = problems(path)
    assert found.startswith(f"{path}: {problem}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "filter = { kind = 'sql', expression = 'amount >' }",
            f"{AT_RULE}.filter.expression: There was an error parsing the SQL expression. [Token line=1, column=9, "
            "Token in error=end of expression, Additional details=",
        ),
        ("filter = { kind = 'sql', expression = 'a = @b' }", f"{AT_RULE}.filter.expression: "),
        ("filter = { kind = 'sql', expression = 'sys.Color = 1' }", f"{AT_RULE}.filter.expression: "),
        ("filter = { kind = 'correlation', properties = { a = 1, A = 2 } }", f"{AT_RULE}.filter.properties: "),
        (
            "action = { expression = 'SET a = 1; SEND b' }",
            f"{AT_RULE}.action.expression: There was an error parsing the SQL expression. [Token line=1, column=12, "
            "Token in error=SEND, ",
        ),
    ],
)
def test_a_wrong_expression_is_named_with_its_path_position_and_what_was_expected(toml, text, problem):
    path = toml(RULE + text)
    [found] = problems(path)
    assert found.startswith(f"{path}: {problem}")


def test_all_wrong_expressions_are_told_at_once(toml):
    text = RULE + "filter = { kind = 'sql', expression = 'a =' }\naction = { expression = 'SET' }\n"
    assert len(problems(toml(text + RULE.replace("'t'", "'u'") + "action = { expression = 'x' }"))) == 3


def test_topics_subscriptions_and_rules_are_read(toml):
    settings = load(
        toml(
            """
            [[queues]]
            name = "q"

            [[topics]]
            name = "Prices"
            max_size_mb = 5

            [[topics.subscriptions]]
            name = "All"

            [[topics.subscriptions]]
            name = "Large"
            max_delivery_count = 3

            [[topics.subscriptions.rules]]
            name = "large"
            filter = { kind = "sql", expression = "amount > @limit", parameters = { "@limit" = 1000 } }
            action = { expression = "SET priority = 'high'" }

            [[topics.subscriptions.rules]]
            name = "$Default"
            """
        )
    ).settings
    assert settings.entities == [
        QueueDescription(name="q"),
        TopicDescription(name="Prices", max_size_mb=5),
        SubscriptionDescription(topic="Prices", name="All"),
        SubscriptionDescription(topic="Prices", name="Large", max_delivery_count=3),
    ]
    limit = SqlFilter(expression="amount > @limit", parameters={"@limit": RuleValue.of_amqp(Long(1000))})
    action = SqlAction(expression="SET priority = 'high'")
    large = RuleDescription(name="large", filter=limit, action=action)
    assert settings.rules == {"prices/subscriptions/large": (large, DEFAULT_RULE)}


def test_topics_can_be_given_by_their_variable():
    text = '[{"name": "t", "subscriptions": [{"name": "s", "rules": [{"name": "r", "filter": {"kind": "false"}}]}]}]'
    settings = load(environment={"PEEKLOCK_TOPICS": text}).settings
    assert settings.rules["t/subscriptions/s"][0].filter == FalseFilter()


def test_all_mistakes_are_told_at_once(toml):
    file = toml("partitions = 0\n[ops]\nport = -1\n")
    found = problems(file, {"--workers": "x"}, {"PEEKLOCK_GATEWAYS": "0", "PEEKLOCK_NO": "1"})
    assert sorted(line.split(": ")[0] for line in found) == sorted(
        [str(file), str(file), "--workers", "PEEKLOCK_GATEWAYS", "PEEKLOCK_NO"]
    )


def test_several_gateways_need_a_process_for_the_partitions():
    assert problems(None, {"--workers": "0"}, {"PEEKLOCK_GATEWAYS": "2"}) == [
        '--workers: "0" leaves no process for the partitions of 2 gateways; set gateways to 1, or this to 1'
    ]


def test_open_access_is_only_for_loopback():
    anonymous = {"PEEKLOCK_SECURITY__ALLOW_ANONYMOUS": "true"}
    assert load(environment=anonymous).settings.security.allow_anonymous
    [problem] = problems(None, {"--host": "0.0.0.0"}, anonymous)
    assert problem.startswith("PEEKLOCK_SECURITY__ALLOW_ANONYMOUS: would open the namespace to everybody")


def test_tls_without_a_port_and_certificates_without_an_authority_have_no_effect(tmp_path):
    (tmp_path / "c.pem").write_text("")
    files = {"PEEKLOCK_TLS__CERTIFICATE": str(tmp_path / "c.pem"), "PEEKLOCK_TLS__KEY": str(tmp_path / "c.pem")}
    [problem] = problems(environment=files)
    assert problem.endswith("has no effect without amqp.tls_port, usually 5671, or http.tls_port, usually 443")
    held = {"PEEKLOCK_SECURITY__CERTIFICATES": '[{"name": "a", "rights": ["Send"]}]'}
    [problem] = problems(environment=files | held | {"PEEKLOCK_AMQP__TLS_PORT": "0"})
    assert problem.endswith("has no effect without tls.client_ca; set that")


def test_a_setting_with_a_new_name_says_so(tmp_path):
    config = tmp_path / "peeklock.toml"
    config.write_text("[amqp]\ntls_certificate = 'c.pem'\n")
    assert problems(config) == [f"{config}: amqp.tls_certificate: is tls.certificate now"]


@pytest.mark.parametrize("place", sorted(INTERNAL))
def test_an_internal_setting_is_taken_from_a_variable_with_one_warning(place):
    field = leaves()[place]
    value = field.default * 2
    loaded = load(environment={variable(place): str(value)})
    at = loaded.settings
    for name in place:
        at = getattr(at, name)
    assert at == value != field.default
    assert loaded.going == ((variable(place), ADVICE),)


@pytest.mark.parametrize("place", sorted(INTERNAL))
def test_an_internal_setting_is_taken_from_a_file_with_one_warning(toml, place):
    field = leaves()[place]
    value = field.default * 2
    *section, name = place
    file = toml(f"{''.join(f'[{each}]' for each in section)}\n{name} = {value}\n")
    loaded = load(file)
    at = loaded.settings
    for each in place:
        at = getattr(at, each)
    assert at == value != field.default
    assert loaded.going == ((f"{file}: {'.'.join(place)}", ADVICE),)


def test_an_internal_setting_in_file_and_variable_is_warned_of_where_it_has_its_effect(toml):
    loaded = load(toml("[amqp]\nsender_credit = 5"), {}, {"PEEKLOCK_AMQP__SENDER_CREDIT": "6"})
    assert loaded.settings.amqp.sender_credit == 6
    assert loaded.going == (("PEEKLOCK_AMQP__SENDER_CREDIT", ADVICE),)


def test_other_settings_are_not_warned_of(toml):
    limits = (
        "cbs_timeout_ms = 1000\nmax_links_per_session = 5\nmax_links_per_connection = 5\nmax_unsettled_per_link = 5"
    )
    assert load(toml(f"[amqp]\n{limits}")).going == ()


def test_internal_settings_are_not_offered_in_place_of_unknown_ones(toml):
    [problem] = problems(environment={"PEEKLOCK_AMQP__SENDER_CREDITS": "1"})
    assert problem.startswith("PEEKLOCK_AMQP__SENDER_CREDITS: no such setting; ")
    assert "SENDER_CREDIT" not in problem.split(";")[1]
    [problem] = problems(toml("[amqp]\nsender_credits = 1"))
    assert "amqp.sender_credits: no such setting; " in problem
    assert "sender_credit" not in problem.split(";")[1]


def test_a_wrong_value_of_an_internal_setting_is_refused():
    [problem] = problems(environment={"PEEKLOCK_AMQP__SENDER_CREDIT": "0"})
    assert problem == 'PEEKLOCK_AMQP__SENDER_CREDIT: "0" is out of range; it must be from 1 to 100000'


def test_tls_files_must_be_there(tmp_path):
    (tmp_path / "c.pem").write_text("")
    environment = {
        "PEEKLOCK_AMQP__TLS_PORT": "0",
        "PEEKLOCK_TLS__CERTIFICATE": str(tmp_path / "c.pem"),
        "PEEKLOCK_TLS__KEY": str(tmp_path / "k.pem"),
    }
    assert problems(environment=environment) == [
        f"PEEKLOCK_TLS__KEY: '{tmp_path / 'k.pem'}' is not a file; name a PEM file"
    ]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"partitions = ", "is not valid TOML: "),
        (b"{", "is not valid JSON: "),
        (b"a = " + b"[" * 100_000, "is not valid TOML: "),
        (b'{"a": ' * 100_000, "is not valid JSON: "),
        (b'{"partitions": 4}', "is JSON without UserConfig, so not the emulator's Config.json; write other settings"),
        (b"\xff\xfe", "is not UTF-8 text; save it as UTF-8"),
        pytest.param(b"#" * (MAX_FILE_BYTES + 1), "is larger than 16 MiB", id="large"),
        (b'{"UserConfig": {"Namespaces": [{"Name": "\\ud800"}]}}', "has characters that are no text"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path, content, text):
    file = tmp_path / "config"
    file.write_bytes(content)
    [problem] = problems(file)
    assert problem.startswith(f"{file}: {text}")


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_a_file_that_cannot_be_opened_is_named(tmp_path, name):
    [problem] = problems(tmp_path / name)
    assert problem.startswith(f"{tmp_path / name}: cannot be read (")


@pytest.mark.parametrize(
    "environment",
    [
        {"PEEKLOCK_SECURITY__ROOT_KEY": "hunter2" * 50},
        {"PEEKLOCK_SECURITY__AUTHORIZATION_RULES": "[{'primary_key': 'hunter2'}]"},
        {"PEEKLOCK_SECURITY__AUTHORIZATION_RULES": '[{"primary_key": "hunter2"}]'},
        {"PEEKLOCK_SECURITY__AUTHORIZATION_RULES": '[{"primary_key": 7, "key_name": "hunter2"}]'},
        {"PEEKLOCK_SECURITY__AUTHORIZATION_RULES": '{"primary_key": "hunter2"}'},
        {"PEEKLOCK_QUEUES": "[{'primary_key': 'hunter2'}]"},
        {"PEEKLOCK_QUEUES": '[{"name": "q", "authorization_rules": ["hunter2"]}]'},
        {"PEEKLOCK_QUEUES": '[{"name": "q", "primary_key": "hunter2"}]'},
        {"PEEKLOCK_ROOT_KEY": "hunter2"},
    ],
)
def test_no_message_shows_a_key(environment):
    assert "hunter2" not in "\n".join(problems(environment=environment))


@pytest.mark.parametrize("text", ["root_key = 'hunter2'", "[security]\nrootkey = 'hunter2'", "security = 'hunter2'"])
def test_no_message_shows_a_key_in_the_wrong_place_of_a_file(toml, text):
    assert "hunter2" not in "\n".join(problems(toml(text)))


@pytest.mark.parametrize(
    ("name", "text"),
    [("PEEKLOCK_NAMESPACE", "a\udcff"), ("PEEKLOCK_QUEUES", r'[{"name": "\ud800"}]'), ("PEEKLOCK_DATA_DIR", "\udcff")],
)
def test_a_variable_that_is_no_text_is_refused(name, text):
    """The system gives bytes that are not UTF-8 as halves of surrogate pairs."""
    [problem] = problems(environment={name: text})
    assert problem.startswith(f"{name}: has characters that are no text")
