"""How a broker starts, up to its processes: what it refuses, and what it says."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from broker.settings.config import Settings
from broker.settings.security import Security
from broker.supervisor.supervisor import opened_by_known_key, shown_key, start_text
from storage.data_dir import DataDirectory
from storage.lmdb_store import LmdbStore
from storage.log.snapshot import Snapshot
from storage.records import FORMAT_VERSION_KEY, encode_document
from storage.store import Table
from tests.damaged_stores import FREE_PAGES, damage, lone_branch, wild_pointer, zeros
from tests.patience import PATIENCE_S

MIB = 1 << 20
FREE_PORTS = {"amqp": {"port": 0}, "http": {"port": 0}, "ops": {"port": 0}}  # a start tries those it has
RUN = """
import os
import resource
import sys
from broker.supervisor import supervisor
from broker.settings.config import Settings
from broker.settings.sources import Loaded

class Started:  # in place of the processes: the start has come this far
    def __init__(self, groups, directory, stop_seconds, reload):
        self.roles = [role for group in groups for role in group]
    def load(self):
        pass
    def discard(self):
        pass
    def run(self, on_ready):
        print("started", *[role.name for role in self.roles])
        parked = [partition for role in self.roles for partition in role.instructions(0).parked]
        if parked:
            print("parked", *parked)
        return 0

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
supervisor.Processes = Started
if len(sys.argv) > 2:  # the user id to run as
    os.setuid(int(sys.argv[2]))
settings = Settings.model_validate_json(sys.argv[1])
going = tuple((name, "will go") for name in sys.argv[3:])
sys.exit(supervisor.run(Loaded(settings, {}, going=going), supervisor.Part.ALL, lambda: settings))
"""


def start(data_dir, **settings):
    """Run the start in a process of its own: (exit code, stdout, stderr)."""
    defaults = {"data_dir": str(data_dir), "partitions": 2, "workers": 1, "store": {"map_size_bytes": 64 * MIB}}
    settings = defaults | FREE_PORTS | settings
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(settings)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def started(data_dir, **settings):
    """What a start that succeeds says."""
    code, stdout, stderr = start(data_dir, **settings)
    assert code == 0, stderr
    return stdout


def refused(data_dir, **settings):
    """The message of a start that must be refused."""
    code, stdout, stderr = start(data_dir, **settings)
    assert (code, stdout) == (78, "")
    prefix, _, message = stderr.rpartition("peeklock: cannot start: ")
    assert not prefix
    return message


@pytest.fixture
def data_dir(tmp_path):
    """A directory in which a broker has been started before."""
    path = tmp_path / "data"
    started(path, queues=[{"name": "orders"}])
    return path


def data_file(data_dir, partition):
    return data_dir / "partitions" / str(partition) / "data.mdb"


def test_first_start_makes_directory_key_stores_and_queues(tmp_path):
    code, stdout, stderr = start(tmp_path / "new" / "data", queues=[{"name": "orders"}], workers=2)
    assert (code, stdout) == (0, "started gateway worker-0 worker-1\n")
    assert [json.loads(line)["event"] for line in stderr.splitlines()] == ["entity created"]
    key_file = tmp_path / "new" / "data" / "root-key"
    assert key_file.stat().st_mode & 0o777 == 0o600
    assert key_file.read_text().strip() not in stdout + stderr


def test_the_key_and_the_entities_stay_over_a_restart(data_dir):
    key = (data_dir / "root-key").read_text()
    code, _, stderr = start(data_dir, queues=[{"name": "orders"}])
    assert (code, stderr) == (0, "")
    assert (data_dir / "root-key").read_text() == key


def test_a_changed_queue_is_updated_at_the_next_start(data_dir):
    _, _, stderr = start(data_dir, queues=[{"name": "orders", "max_delivery_count": 3}])
    assert json.loads(stderr)["properties"] == ["max_delivery_count"]


def test_an_immutable_difference_names_queue_and_property(data_dir):
    message = refused(data_dir, queues=[{"name": "orders", "requires_session": True}])
    assert "orders" in message
    assert "requires_session" in message


def test_a_directory_that_cannot_be_made_names_the_setting(tmp_path):
    (tmp_path / "file").write_text("")
    message = refused(tmp_path / "file" / "data")
    assert str(tmp_path / "file" / "data") in message
    assert "--data-dir" in message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up rights and have a directory of another user")
def test_an_unwritable_directory_names_the_setting_and_the_user(tmp_path):
    tmp_path.chmod(0o755)
    settings = json.dumps({"data_dir": str(tmp_path / "data")})
    command = [sys.executable, "-c", RUN, settings, "65534"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 78
    assert "cannot be written" in done.stderr
    assert "user id 65534" in done.stderr


def test_a_directory_in_use_names_the_other_process(data_dir):
    with DataDirectory(data_dir, partitions=2):
        message = refused(data_dir)
    assert f"in use by process {os.getpid()}" in message


def test_fewer_partitions_name_the_setting(data_dir):
    assert "Set partitions to 2 or more" in refused(data_dir, partitions=1)


def test_a_root_key_that_others_can_read_is_refused(data_dir):
    (data_dir / "root-key").chmod(0o644)
    assert "chmod 600" in refused(data_dir)


def test_a_root_key_that_is_gone_is_made_anew_with_a_warning(data_dir):
    _, _, said = start(data_dir)
    assert "a new root key was made" not in said
    (data_dir / "root-key").unlink()
    code, _, said = start(data_dir)
    assert code == 0
    assert "a new root key was made" in said


def test_a_store_of_an_unknown_format_is_named_and_left_untouched(data_dir):
    path = data_file(data_dir, 1).parent
    store = LmdbStore(path, partition_id=1, map_size_bytes=64 * MIB, create=False)
    store.put(Table.META, FORMAT_VERSION_KEY, encode_document(99))
    store.commit()
    store.close()
    before = data_file(data_dir, 1).read_bytes()
    message = refused(data_dir)
    assert str(path) in message
    assert "99" in message
    assert data_file(data_dir, 1).read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: b"not a database" * 1000, id="other content"),
        pytest.param(lambda content: content[: len(content) // 2], id="second half lost"),
        pytest.param(lambda content: content[:100], id="all but 100 bytes lost"),
        pytest.param(lambda content: bytes(8192) + content[8192:], id="both roots zeroed"),
    ],
)
@pytest.mark.parametrize("partition", [0, 1])
def test_a_damaged_store_is_named_with_the_way_back(data_dir, partition, damage):
    file = data_file(data_dir, partition)
    file.write_bytes(damaged := damage(file.read_bytes()))
    told_of_damage(data_dir, partition)
    assert file.read_bytes() == damaged


def told_of_damage(data_dir, partition, **settings):
    """A start with a damaged store: of the home it is refused, of another partition that is left out."""
    code, stdout, stderr = start(data_dir, **settings)
    if partition == 0:
        assert (code, stdout) == (78, "")
        [text] = [line for line in stderr.splitlines() if line.startswith("peeklock: cannot start: ")]
    else:
        assert (code, stdout) == (0, f"started gateway worker-0\nparked {partition}\n")
        [text] = [line for line in stderr.splitlines() if '"partition parked' in line]
        assert json.loads(text)["partition"] == partition
    assert str(data_file(data_dir, partition).parent) in text
    assert "peeklock verify" in text
    assert "peeklock restore" in text


@pytest.fixture
def filled_dir(tmp_path):
    """As `data_dir`, with something in each table of the definitions, and with free pages."""
    path = tmp_path / "data"
    for count in (1, 2):
        queues = [{"name": f"queue-{number}"} for number in range(count)]
        started(path, queues=queues, topics=[{"name": "news", "subscriptions": [{"name": "all"}]}])
    return path


@pytest.mark.parametrize("how", [zeros, lone_branch])
@pytest.mark.parametrize("table", ["META", "ENTITIES", "RULES"])
@pytest.mark.parametrize("partition", [0, 1])
def test_damaged_definitions_never_end_the_start_without_a_word(filled_dir, partition, table, how):
    file = data_file(filled_dir, partition)
    damaged = damage(file, table, how)
    told_of_damage(filled_dir, partition)
    assert file.read_bytes() == damaged


@pytest.mark.parametrize("partition", [0, 1])
def test_damage_that_only_a_change_meets_never_ends_the_start_without_a_word(filled_dir, partition):
    damage(data_file(filled_dir, partition), FREE_PAGES, wild_pointer)
    told_of_damage(filled_dir, partition, queues=[{"name": "new"}])


def test_several_damaged_partitions_are_left_out(tmp_path):
    path = tmp_path / "data"
    queues = [{"name": "orders"}]
    started(path, partitions=4, queues=queues)
    for partition in (1, 3):
        damage(data_file(path, partition), "META", lone_branch)
    code, stdout, _ = start(path, partitions=4, workers=2, queues=[*queues, {"name": "new"}])
    assert (code, stdout) == (0, "started gateway worker-0 worker-1\nparked 1 3\n")
    for partition in (0, 2):
        with Snapshot(data_file(path, partition).parent) as snapshot:
            assert len([*snapshot.items(Table.ENTITIES)]) == 2


def test_swapped_stores_are_noticed(data_dir):
    stores = data_dir / "partitions"
    (stores / "0").rename(stores / "2")
    (stores / "1").rename(stores / "0")
    (stores / "2").rename(stores / "1")
    assert "own numbers" in refused(data_dir)


def test_a_store_another_process_has_open_is_named(data_dir):
    path = data_file(data_dir, 0).parent
    with ExitStack() as stack:
        store = LmdbStore(path, partition_id=0, map_size_bytes=64 * MIB, create=False)
        stack.callback(store.close)
        assert str(path) in refused(data_dir)


def text(*, key="c2VjcmV0", is_new=True, is_given=False, data_dir=Path("/var/lib/peeklock"), host="127.0.0.1", **ports):
    given = Settings.model_validate(
        {"data_dir": data_dir, "security": {"root_key": key if is_given else None}, "amqp": {"host": host}}
    )
    settings = given.model_copy(update={"security": Security(root_key=key)})
    answer = {"ready": True, "amqp_port": 5672, "amqps_port": None, "ops_port": 9464} | ports
    return start_text(settings, answer, shown_key(given, settings, is_new=is_new))


def test_a_setting_that_will_go_is_warned_of_once(tmp_path):
    settings = {"data_dir": str(tmp_path / "data"), "partitions": 1, "workers": 0, **FREE_PORTS}
    settings["store"] = {"map_size_bytes": 64 * MIB}
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(settings), str(os.getuid()), "amqp.sender_credit"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("amqp.sender_credit") == done.stderr.count("will go") == 1


def test_the_start_text_has_the_connection_string():
    assert (
        "  Endpoint=sb://localhost;SharedAccessKeyName=RootManageSharedAccessKey;SharedAccessKey=c2VjcmV0;"
        "UseDevelopmentEmulator=true;\n" in text()
    )


def test_the_start_text_names_the_ports_that_were_taken():
    shown = text(amqp_port=40001, ops_port=40002)
    assert "amqp://127.0.0.1:40001\n" in shown
    assert "http://127.0.0.1:40002/metrics" in shown
    assert "Endpoint=sb://localhost:40001;" in shown


def test_without_plain_tcp_the_connection_string_is_for_tls():
    shown = text(amqp_port=None, amqps_port=5671, host="broker.example")
    assert "amqp://" not in shown
    assert "amqps://broker.example:5671\n" in shown
    assert "Endpoint=sb://broker.example;" in shown
    assert "UseDevelopmentEmulator" not in shown


def test_the_start_text_says_where_a_kept_key_is(data_dir):
    key = (data_dir / "root-key").read_text().strip()
    shown = text(key=key, is_new=False, data_dir=data_dir)
    assert key not in shown
    assert str(data_dir / "root-key") in shown


def test_the_start_text_says_where_a_given_key_is_whatever_is_kept(data_dir):
    shown = text(key="c2VjcmV0", is_new=False, is_given=True, data_dir=data_dir)
    assert "c2VjcmV0" not in shown
    assert "<the key in security.root_key>" in shown


def test_the_emulators_key_is_no_secret():
    assert "SharedAccessKey=SAS_KEY_VALUE;" in text(is_new=False, key="SAS_KEY_VALUE")


@pytest.mark.parametrize(
    ("sections", "host"),
    [
        ({}, None),
        ({"amqp": {"host": "0.0.0.0"}}, "0.0.0.0"),
        ({"http": {"host": "::"}}, "::"),
        ({"amqp": {"host": "127.0.0.2"}}, None),
    ],
)
def test_the_emulators_key_beyond_this_machine_is_noticed(sections, host):
    with_key = {"security": {"root_key": "SAS_KEY_VALUE"}}
    assert opened_by_known_key(Settings(**sections, **with_key)) == host
    assert opened_by_known_key(Settings(**sections, security={"root_key": "own"})) is None
