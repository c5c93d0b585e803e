import json
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import trustme
from typer.testing import CliRunner

from broker import __version__
from broker.catalog.catalog import reconcile
from broker.child import PERMANENT_FAULT
from broker.cli.all_commands import app
from broker.namespace.entities import QueueDescription
from broker.settings.config import ConfigurationError, Settings
from broker.settings.internal import ADVICE
from broker.settings.reference import document
from storage.data_dir import DataDirectory
from storage.lmdb_store import DATA_FILE, LmdbStore
from storage.log.recovery import log_directory
from storage.log.segments import segment_path
from tests.logs import crash, open_log
from tests.patience import PATIENCE_S
from tests.ports import free_ports

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def peeklock(monkeypatch, tmp_path):
    """Run a command, in an empty directory and without settings in the environment."""
    for name in list(os.environ):
        if name.startswith("PEEKLOCK_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def any_ports(monkeypatch):
    """`config check` tries the ports, and a broker may run here."""
    for section in ("AMQP", "HTTP", "OPS"):
        monkeypatch.setenv(f"PEEKLOCK_{section}__PORT", "0")


@pytest.fixture
def data_dir(tmp_path) -> Path:
    """A data directory of two partitions with one queue."""
    path = tmp_path / "data"
    with DataDirectory(path, partitions=2) as directory:
        stores = [
            LmdbStore(directory.partition_path(number), partition_id=number, map_size_bytes=1 << 24, create=True)
            for number in range(2)
        ]
        reconcile(stores, [QueueDescription(name="orders")], 0)
        for store in stores:
            store.close()
    return path


@pytest.fixture
def served(monkeypatch) -> list[Settings]:
    """What serve hands to the supervisor, which does not run."""
    calls: list[Settings] = []
    monkeypatch.setattr("broker.supervisor.supervisor.run", lambda loaded, part, _: calls.append(loaded.settings) or 0)
    return calls


def test_serve_hands_all_its_flags_to_the_supervisor(peeklock, served, tmp_path):
    (tmp_path / "peeklock.toml").write_text("gateways = 2\npartitions = 9")
    result = peeklock(
        "serve", "--config", "peeklock.toml", "--data-dir", "d", "--host", "::1", "--amqp-port", 0, "--ops-port", "off",
        "--http-port", 7, "--partitions", 8, "--workers", 3, "--emulator", "--log-level", "debug",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    [settings] = served
    expected = Settings(
        data_dir="d", partitions=8, workers=3, gateways=2, emulator=True,
        amqp={"host": "::1", "port": 0}, http={"host": "::1", "port": 7},
        ops={"host": "::1", "port": None}, log={"level": "debug"},
    )  # fmt: skip
    assert settings == expected


def test_serve_reads_the_environment(peeklock, served, monkeypatch):
    monkeypatch.setenv("PEEKLOCK_EMULATOR", "true")
    monkeypatch.setenv("PEEKLOCK_AMQP__PORT", "7")
    peeklock("serve")
    peeklock("serve", "--no-emulator", "--amqp-port", "8")
    assert [(settings.emulator, settings.amqp.port) for settings in served] == [(True, 7), (False, 8)]


@pytest.mark.parametrize(("ended", "code"), [(0, 0), (1, 1), (PERMANENT_FAULT, PERMANENT_FAULT)])
def test_the_exit_code_of_serve_tells_failure_from_wrong_settings(peeklock, monkeypatch, ended, code):
    monkeypatch.setattr("broker.supervisor.supervisor.run", lambda loaded, part, _: ended)
    assert peeklock("serve").exit_code == code


def test_a_wrong_setting_starts_nothing_and_is_one_message(peeklock, served):
    result = peeklock("serve", "--amqp-port", "70000")
    assert (result.exit_code, result.stdout, served) == (78, "", [])
    assert result.stderr == 'peeklock: --amqp-port: "70000" is out of range; it must be from 0 to 65535, or off\n'


def test_several_wrong_settings_are_a_list(peeklock, served):
    result = peeklock("serve", "--amqp-port", "70000", "--workers", "-1")
    assert result.exit_code == 78
    first, *rest = result.stderr.splitlines()
    assert first == "peeklock: 2 things are wrong:"
    assert {line.split(":")[0] for line in rest} == {"  --amqp-port", "  --workers"}


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigurationError("queue 'a' is odd"), 78, "queue 'a' is odd"),
        (PermissionError(13, "Permission denied", "/data"), 1, "/data: Permission denied"),
        (OSError("odd"), 1, "odd"),
    ],
)
def test_a_failure_of_serve_is_one_message(peeklock, monkeypatch, error, code, text):
    def run(*_):
        raise error

    monkeypatch.setattr("broker.supervisor.supervisor.run", run)
    result = peeklock("serve")
    assert (result.exit_code, result.stderr) == (code, f"peeklock: {text}\n")


@pytest.mark.parametrize("arguments", [["serve", "--port", "1"], ["sevre"], ["backup"], ["config", "what"]])
def test_a_wrong_command_is_exit_code_two(peeklock, arguments):
    result = peeklock(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_config_check_counts_what_is_given(peeklock, any_ports, tmp_path):
    (tmp_path / "peeklock.toml").write_text("partitions = 2\n[[queues]]\nname = 'a'\n")
    result = peeklock("config", "check", "--config", "peeklock.toml")
    expected = "ok: 5 settings given; declared: 1 queue, 0 topics, 0 subscriptions\n"
    assert (result.exit_code, result.stdout) == (0, expected)


QUEUES = "[[queues]]\nname = 'a'\n{}\n[[queues]]\nname = 'b'\n{}\n"
CHAIN = "".join(f"[[queues]]\nname = 'q{n}'\nforward_to = 'q{n + 1}'\n" for n in range(5)) + "[[queues]]\nname = 'q5'\n"
BY_A_TOPIC = """
[[queues]]
name = "a"
forward_to = "t"
[[topics]]
name = "t"
[[topics.subscriptions]]
name = "s"
forward_to = "a"
"""


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        (
            QUEUES.format("forward_to = 'B'", "forward_to = 'a'"),
            ["queue 'a': forward_to 'B' leads back to it", "queue 'b': forward_to 'a' leads back to it"],
        ),
        (
            BY_A_TOPIC,
            [
                "queue 'a': forward_to 't' leads back to it",
                "subscription 't/Subscriptions/s': forward_to 'a' leads back",
            ],
        ),
        (CHAIN, ["queue 'q0': forward_to 'q1' begins a chain of more than 4 hops"]),
        (QUEUES.format("forward_to = 'c'", ""), ["queue 'a': forward_to 'c' is no queue or topic"]),
        (
            QUEUES.format("", "forward_dead_lettered_messages_to = 'c'"),
            ["queue 'b': forward_dead_lettered_messages_to 'c' is no queue or topic"],
        ),
        ("[amqp]\nport = 7\n[ops]\nport = 7", ["peeklock.toml: ops.port: 7 is amqp.port, too"]),
        (
            "[amqp]\ntls_port = 1\n[tls]\ncertificate = 'pem'\nkey = 'pem'",
            ["tls.certificate pem with"],
        ),
    ],
)
def test_config_check_finds_what_cannot_work(peeklock, tmp_path, settings, texts):
    (tmp_path / "pem").write_text("not a certificate")
    (tmp_path / "peeklock.toml").write_text(settings)
    result = peeklock("config", "check", "--config", "peeklock.toml")
    assert (result.exit_code, result.stdout) == (78, "")
    for text in texts:
        assert text in result.stderr
    assert not (tmp_path / "peeklock-data").exists()


@pytest.mark.parametrize(
    "settings",
    [
        QUEUES.format("forward_dead_lettered_messages_to = 'b'", "forward_to = 'a'"),
        CHAIN.replace("forward_to = 'q5'", ""),
        "[amqp]\nhost = '127.0.0.1'\nport = {port}\n[ops]\nhost = '127.0.0.2'\nport = {port}",
    ],
)
def test_config_check_lets_pass_what_works(peeklock, any_ports, monkeypatch, tmp_path, settings):
    if "{port}" in settings:
        settings = settings.format(port=free_ports(1)[0])
        for section in ("AMQP", "OPS"):
            monkeypatch.delenv(f"PEEKLOCK_{section}__PORT")
    (tmp_path / "peeklock.toml").write_text(settings)
    result = peeklock("config", "check", "--config", "peeklock.toml")
    assert (result.exit_code, result.stderr) == (0, "")


def test_config_check_warns_of_ports_in_use_unless_a_broker_runs_on_the_data_directory(
    peeklock, data_dir, monkeypatch, tmp_path
):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for section, text in (("AMQP", str(port)), ("HTTP", "0"), ("OPS", "0")):
            monkeypatch.setenv(f"PEEKLOCK_{section}__PORT", text)
        monkeypatch.setenv("PEEKLOCK_DATA_DIR", str(data_dir))
        monkeypatch.setenv("PEEKLOCK_PARTITIONS", "2")
        warning = f"peeklock: warning: cannot listen on 127.0.0.1 port {port} (amqp.port): Address already"
        result = peeklock("config", "check")
        assert (result.exit_code, result.stderr.startswith(warning)) == (0, True)
        with DataDirectory(data_dir, partitions=2):
            assert peeklock("config", "check").stderr == ""
            result = peeklock("config", "check", "--data-dir", tmp_path / "another")
            assert (result.exit_code, result.stderr.startswith(warning)) == (0, True)
        monkeypatch.setenv("PEEKLOCK_QUEUES", '[{"name": "a", "forward_to": "nowhere"}]')
        result = peeklock("config", "check")
        assert (result.exit_code, "'nowhere' is no queue or topic" in result.stderr) == (78, True)
        monkeypatch.delenv("PEEKLOCK_QUEUES")
        monkeypatch.setenv(
            "PEEKLOCK_CLUSTER__WORKERS", '["127.0.0.1:1"]'
        )  # of a gateway, whose ports may be in use by itself
        assert peeklock("config", "check").stderr == ""


def test_config_check_refuses_an_address_that_this_machine_does_not_have(peeklock, any_ports, monkeypatch):
    monkeypatch.setenv("PEEKLOCK_AMQP__HOST", "192.0.2.1")
    monkeypatch.setenv("PEEKLOCK_AMQP__PORT", "5672")
    result = peeklock("config", "check")
    assert (result.exit_code, "This machine has no such address" in result.stderr) == (78, True)


def test_config_check_of_a_data_directory_that_cannot_be_one(peeklock, any_ports, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PEEKLOCK_DATA_DIR", str(tmp_path / "file"))
    result = peeklock("config", "check")
    assert (result.exit_code, "Not a directory" in result.stderr) == (78, True)


def test_config_check_compares_with_what_is_stored(peeklock, any_ports, data_dir, monkeypatch, tmp_path):
    monkeypatch.setenv("PEEKLOCK_DATA_DIR", str(data_dir))
    monkeypatch.setenv("PEEKLOCK_PARTITIONS", "2")
    monkeypatch.setenv("PEEKLOCK_QUEUES", '[{"name": "a", "forward_to": "orders"}]')
    assert peeklock("config", "check").exit_code == 0
    monkeypatch.setenv("PEEKLOCK_QUEUES", '[{"name": "orders", "requires_session": true}]')
    result = peeklock("config", "check")
    assert (result.exit_code, "requires_session" in result.stderr) == (78, True)
    monkeypatch.setenv("PEEKLOCK_PARTITIONS", "1")
    result = peeklock("config", "check")
    assert (result.exit_code, "Set partitions to 2 or more" in result.stderr) == (78, True)
    monkeypatch.setenv("PEEKLOCK_PARTITIONS", "3")
    monkeypatch.setenv("PEEKLOCK_QUEUES", '[{"name": "a", "forward_to": "orders"}]')
    assert peeklock("config", "check").exit_code == 0


def test_config_check_compares_with_what_a_killed_broker_left_in_its_log(peeklock, data_dir, monkeypatch):
    log = open_log(data_dir, (0, 1))
    reconcile([log.stores[0], log.stores[1]], [QueueDescription(name="young")], 0)
    log.commit()
    crash(log)
    monkeypatch.setenv("PEEKLOCK_DATA_DIR", str(data_dir))
    monkeypatch.setenv("PEEKLOCK_PARTITIONS", "2")
    monkeypatch.setenv("PEEKLOCK_QUEUES", '[{"name": "young", "requires_session": true}]')
    result = peeklock("config", "check")
    assert (result.exit_code, "requires_session" in result.stderr) == (78, True)
    segment_path(log_directory(data_dir, 0), 0).unlink()
    result = peeklock("config", "check")
    assert (result.exit_code, "no segment of a log is here" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    ("name", "value", "known"),
    [
        ("PEEKLOCK_AMQP_PORT", "5", "PEEKLOCK_AMQP__PORT"),
        ("PEEKLOCK_OPS_PORT", "5", "PEEKLOCK_OPS__PORT"),
        ("PEEKLOCK_AMQP__PROT", "5", "PEEKLOCK_AMQP__PORT"),
        ("PEEKLOCK_DATADIR", "d", "PEEKLOCK_DATA_DIR"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest_known_one(peeklock, monkeypatch, name, value, known):
    monkeypatch.setenv(name, value)
    result = peeklock("config", "check")
    assert result.exit_code == 78
    assert result.stderr == f"peeklock: {name}: no such setting; did you mean {known}?\n"


def test_config_check_says_what_is_wrong(peeklock, tmp_path):
    (tmp_path / "peeklock.toml").write_text("partitions = 65")
    result = peeklock("config", "check", "--config", "peeklock.toml")
    assert result.exit_code == 78
    assert result.stderr == "peeklock: peeklock.toml: partitions: 65 is out of range; it must be from 1 to 64\n"


def test_config_show_is_a_file_that_says_the_same_with_places_and_without_keys(peeklock, monkeypatch, tmp_path):
    (tmp_path / "peeklock.toml").write_text(
        "[[queues]]\nname = 'a \"quoted\" name'".replace(' "quoted" ', "-")
        + "\nuser_metadata = 'with \"quotes\" # and €'\n"
        + "authorization_rules = [{key_name = 'k', primary_key = 'hunter2', rights = ['Send']}]\n"
        + "[security]\nroot_key = 'hunter2'\n[amqp]\nport = 'off'\ntls_port = 0\n"
        + "[tls]\ncertificate = 'peeklock.toml'\nkey = 'peeklock.toml'\n"
    )
    monkeypatch.setenv("PEEKLOCK_GATEWAYS", "3")
    result = peeklock("config", "show", "--config", "peeklock.toml")
    assert result.exit_code == 0, result.output
    assert "hunter2" not in result.stdout
    assert "gateways = 3  # PEEKLOCK_GATEWAYS\n" in result.stdout
    assert 'port = "off"  # peeklock.toml: amqp.port\n' in result.stdout
    shown = tomllib.loads(result.stdout)
    assert shown["security"]["root_key"] == shown["queues"][0]["authorization_rules"][0]["primary_key"] == "***"
    (tmp_path / "shown.toml").write_text(result.stdout)
    again = peeklock("config", "show", "--config", "shown.toml").stdout
    assert tomllib.loads(again) == shown


def test_config_reference_is_the_page_of_settings(peeklock):
    assert peeklock("config", "reference").stdout == document()


def test_version_is_the_packages(peeklock):
    assert peeklock("version").stdout == f"{__version__}\n"
    assert peeklock("--version").stdout == f"{__version__}\n"


# Connection strings


def test_the_emulators_connection_string_is_the_well_known_one(peeklock):
    assert peeklock("connection-string", "--emulator").stdout == (
        "Endpoint=sb://localhost;SharedAccessKeyName=RootManageSharedAccessKey;SharedAccessKey=SAS_KEY_VALUE;"
        "UseDevelopmentEmulator=true;\n"
    )


def test_the_connection_string_has_the_kept_root_key(peeklock, tmp_path):
    (tmp_path / "root-key").write_text("kept")
    (tmp_path / "root-key").chmod(0o600)
    result = peeklock("connection-string", "--data-dir", tmp_path, "--host", "broker.example", "--amqp-port", 5673)
    assert result.stdout == (
        "Endpoint=sb://broker.example:5673;SharedAccessKeyName=RootManageSharedAccessKey;SharedAccessKey=kept;"
        "UseDevelopmentEmulator=true;\n"
    )


def test_the_connection_string_of_another_rule_needs_no_root_key(peeklock, tmp_path):
    (tmp_path / "peeklock.toml").write_text(
        "[[security.authorization_rules]]\nkey_name = 'k'\nprimary_key = 'p'\nrights = ['Send']\n"
        "[amqp]\ntls_port = 5671\n[tls]\ncertificate = 'server.pem'\nkey = 'server.pem'\n"
    )
    trustme.CA().issue_cert("localhost").cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    result = peeklock("connection-string", "--config", "peeklock.toml", "--key-name", "k", "--tls")
    assert result.stdout == "Endpoint=sb://localhost;SharedAccessKeyName=k;SharedAccessKey=p;\n"
    assert not (tmp_path / "peeklock-data").exists()


@pytest.mark.parametrize("part", ["key_name", "primary_key"])
@pytest.mark.parametrize("text", ["a;Endpoint=sb://elsewhere", "a\nb", "a\x1b[2J"], ids=ascii)
def test_a_key_that_would_be_another_part_makes_no_connection_string(peeklock, tmp_path, part, text):
    rule = {"key_name": "k", "primary_key": "p", "rights": ["Send"], part: text}
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in rule.items())
    (tmp_path / "peeklock.toml").write_text(f"[[security.authorization_rules]]\n{lines}")
    name = rule["key_name"]
    result = peeklock("connection-string", "--config", "peeklock.toml", "--key-name", name)
    assert (result.exit_code, result.stdout) == (78, "")
    assert "has characters that cannot be in a connection string" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "peeklock-data/root-key: there is no root key yet; start the broker once, or name its --data-dir"),
        (["--emulator", "--key-name", "k"], "--key-name: 'k' is no authorization rule of the namespace"),
        (["--key-name", "k"], "--key-name: 'k' is no authorization rule of the namespace"),
        (["--emulator", "--tls"], "amqp.tls_port is off; set it"),
        (["--emulator", "--amqp-port", "0"], "amqp.port is 0, any free port, and the broker does not run; start it"),
    ],
)
def test_a_connection_string_that_cannot_be_made_says_why(peeklock, tmp_path, arguments, text):
    result = peeklock("connection-string", *arguments)
    assert (result.exit_code, result.stdout) == (78, "")
    assert result.stderr.startswith(f"peeklock: {text}")
    assert list(tmp_path.iterdir()) == []


# Maintenance


def test_a_sound_data_directory_verifies(peeklock, data_dir):
    result = peeklock("verify", "--data-dir", data_dir)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "partition 0: 0 messages, 0 entries in queues, 0 in quarantine, 0 problems",
        "partition 1: 0 messages, 0 entries in queues, 0 in quarantine, 0 problems",
        f"{data_dir}: ok",
    ]
    assert peeklock("verify", data_dir).stdout == result.stdout


def test_a_damaged_data_directory_is_exit_code_one_and_says_where(peeklock, data_dir):
    os.truncate(data_dir / "partitions" / "1" / DATA_FILE, 100)
    result = peeklock("verify", data_dir)
    assert result.exit_code == 1
    assert "  unreadable-store: " in result.stdout
    assert f"{data_dir}: 1 problem\n" in result.stdout


def test_a_backup_can_be_restored(peeklock, data_dir, tmp_path):
    backup, restored = tmp_path / "backup", tmp_path / "restored"
    result = peeklock("backup", backup, "--data-dir", data_dir)
    assert (result.exit_code, f"bytes backed up from {data_dir}" in result.stdout) == (0, True)
    result = peeklock("restore", backup, "--data-dir", restored)
    assert (result.exit_code, f"bytes restored from {backup}" in result.stdout) == (0, True)
    assert peeklock("verify", restored).exit_code == 0


@pytest.mark.parametrize("command", [["verify", "nothing"], ["backup", "there"], ["restore", "nothing"]])
def test_a_directory_that_is_none_is_exit_code_one_with_its_name(peeklock, command):
    result = peeklock(*command)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("peeklock: ")
    assert "Traceback" not in result.stderr


def test_restoring_over_data_is_refused(peeklock, data_dir, tmp_path):
    peeklock("backup", tmp_path / "backup", "--data-dir", data_dir)
    result = peeklock("restore", tmp_path / "backup", "--data-dir", data_dir)
    assert result.exit_code == 1
    assert str(data_dir) in result.stderr


# Time to start


def test_settings_are_loaded_without_what_serving_alone_needs():
    script = (
        "import sys, broker.cli.commands\n"
        "late = {'rich', 'asyncio', 'aiohttp', 'uvloop', 'structlog', 'lmdb', 'cproton_ffi', 'prometheus_client'}\n"
        "print(*sorted(late & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert result.stdout == "\n"


EMULATORS = '{"UserConfig": {"Namespaces": [{"Name": "ns", "Queues": [{"Name": "q", %s}]}]}}'
AT_QUEUE = "Config.json: UserConfig.Namespaces[0].Queues[0]"


def test_config_check_names_the_keys_that_have_no_effect(peeklock, any_ports, tmp_path):
    (tmp_path / "Config.json").write_text(EMULATORS % '"Colour": "red"')
    result = peeklock("config", "check", "--config", "Config.json")
    assert result.exit_code == 0
    assert result.stderr == (
        f"peeklock: warning: {AT_QUEUE}.Colour: unknown; known here: Name, Properties; it has no effect\n"
    )


def test_config_check_warns_of_internal_settings(peeklock, any_ports, monkeypatch, tmp_path):
    (tmp_path / "peeklock.toml").write_text("worker_restart_wait_bytes = 4194304")
    monkeypatch.setenv("PEEKLOCK_AMQP__SENDER_CREDIT", "7")
    result = peeklock("config", "check", "--config", "peeklock.toml")
    assert result.exit_code == 0
    assert sorted(result.stderr.splitlines()) == [
        f"peeklock: warning: PEEKLOCK_AMQP__SENDER_CREDIT: {ADVICE}",
        f"peeklock: warning: peeklock.toml: worker_restart_wait_bytes: {ADVICE}",
    ]


def test_config_show_has_an_internal_setting_only_if_it_is_set(peeklock, monkeypatch):
    assert "sender_credit" not in peeklock("config", "show").stdout
    monkeypatch.setenv("PEEKLOCK_AMQP__SENDER_CREDIT", "7")
    assert "sender_credit = 7  # PEEKLOCK_AMQP__SENDER_CREDIT\n" in peeklock("config", "show").stdout


def test_a_missing_forward_target_is_named_where_the_emulators_file_has_it(peeklock, any_ports, tmp_path):
    (tmp_path / "Config.json").write_text(EMULATORS % '"Properties": {"ForwardTo": "x"}, "Colour": "red"')
    text = f"{AT_QUEUE}.Properties.ForwardTo: 'x' is no queue or topic. Declare it, or name another\n"
    result = peeklock("config", "check", "--config", "Config.json")
    assert (result.exit_code, text in result.stderr) == (78, True)
    serve = [sys.executable, "-m", "broker.cli", "serve", "--config", "Config.json", "--data-dir", "data"]
    done = subprocess.run(
        serve,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 78
    assert f"peeklock: cannot start: {text}" in done.stderr
    assert "UserConfig.Namespaces[0].Queues[0].Colour" in done.stdout + done.stderr
