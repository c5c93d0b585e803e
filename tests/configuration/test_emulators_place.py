"""When the image is the Service Bus emulator without a Config.json, and why it is not."""

from pathlib import Path

import pytest

from broker.keys import EMULATOR_KEY, with_root_key
from broker.settings.sources import CLUSTER_FLAGS, FLAGS, Loaded, load
from tests.brokers import REPOSITORY

BUILT_IN = (REPOSITORY / "deploy/container.toml").read_bytes()


class Image:
    """The files of the image below a directory, and its environment."""

    def __init__(self, root: Path) -> None:
        self.own = root / "etc/peeklock/peeklock.toml"
        self.mounted = root / "ServiceBus_Emulator/ConfigFiles/Config.json"
        self.data_dir = root / "data"
        directory = root / "opt/peeklock/image"
        for each in (self.own, self.mounted, directory / "x"):
            each.parent.mkdir(parents=True)
        self.own.write_bytes(BUILT_IN)
        (directory / "peeklock.toml").write_bytes(BUILT_IN)
        (directory / "Config.json").write_bytes((REPOSITORY / "deploy/emulator.json").read_bytes())
        self.data_dir.mkdir()
        self.environment = {
            "ACCEPT_EULA": "Y",
            "PEEKLOCK_IMAGE": str(directory),
            "PEEKLOCK_DATA_DIR": str(self.data_dir),
            "PEEKLOCK_CONFIG": f"{self.mounted}:{self.own}",
        }

    def load(self, flags: dict[str, str | None] | None = None, config: Path | None = None, **more: str) -> Loaded:
        return load(config, flags, self.environment | more)


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path)


def names(loaded: Loaded) -> list[str]:
    return [each.path for each in loaded.settings.entities]


def is_as_before(loaded: Loaded, reason: str) -> None:
    assert not loaded.settings.emulator
    assert names(loaded) == ["orders"]
    assert loaded.not_emulator is not None
    assert reason in loaded.not_emulator


@pytest.mark.parametrize("word", ["Y", "y", " Y "])
def test_with_the_licence_accepted_it_has_the_emulators_key_and_default_entities(image, word):
    loaded = image.load(ACCEPT_EULA=word, EMULATOR_HTTP_PORT="5301")
    assert loaded.settings.emulator
    assert loaded.not_emulator is None
    subscriptions = [f"topic.1/Subscriptions/subscription.{number}" for number in (1, 2, 3, 4)]
    assert names(loaded) == ["queue.1", "topic.1", *subscriptions]
    queue = loaded.settings.queues[0]
    assert (queue.max_delivery_count, queue.lock_duration_ms) == (3, 60_000)
    assert queue.default_message_time_to_live_ms == 3_600_000
    assert {path: [rule.name for rule in rules] for path, rules in loaded.settings.rules.items()} == {
        subscriptions[0].lower(): ["app-prop-filter-1"],
        subscriptions[1].lower(): ["user-prop-filter-1"],
        subscriptions[3].lower(): ["sql-filter-1"],
    }
    assert loaded.settings.http.port == 5301
    assert with_root_key(loaded.settings).security.root_key == EMULATOR_KEY
    assert list(image.data_dir.iterdir()) == []  # so that it is the emulator at its next start, too


def test_the_default_port_of_http_may_be_another_ones_where_the_emulators_variable_moves_it(image):
    loaded = image.load(EMULATOR_HTTP_PORT="5301", PEEKLOCK_AMQP__PORT="5300")
    assert (loaded.settings.amqp.port, loaded.settings.http.port) == (5300, 5301)


@pytest.mark.parametrize("word", ["", "N", "yes", "true", "1"])
def test_without_the_licence_nothing_is_said(image, word):
    loaded = image.load(ACCEPT_EULA=word)
    assert names(loaded) == ["orders"]
    assert not loaded.settings.emulator
    assert loaded.not_emulator is None


def test_it_is_about_the_image_alone(image):
    del image.environment["PEEKLOCK_IMAGE"]
    loaded = image.load()
    assert names(loaded) == ["orders"]
    assert loaded.not_emulator is None


def test_a_changed_file_counts(image):
    image.own.write_bytes(BUILT_IN + b"\n")
    is_as_before(image.load(), f"settings come from {image.own}")


def test_a_file_elsewhere_counts(image, tmp_path):
    other = tmp_path / "other.toml"
    other.write_bytes(BUILT_IN)
    is_as_before(image.load(config=other), f"settings come from {other}")
    other.write_text('[[queues]]\nname = "orders"\n')
    is_as_before(image.load(PEEKLOCK_CONFIG=str(other)), f"settings come from {other}")


def test_the_built_in_file_named_by_an_option_counts_as_it_is(image):
    is_as_before(image.load(config=image.own), f"settings come from {image.own}")


@pytest.mark.parametrize("name", ["root-key", "dangling"])
def test_a_key_in_the_data_directory_counts(image, name):
    key = image.data_dir / "root-key"
    key.write_text("secret\n") if name == "root-key" else key.symlink_to("nowhere")
    loaded = image.load()
    is_as_before(loaded, f"the data directory has a key of its own: {key}")
    assert "secret" not in str(loaded.not_emulator)


def test_so_does_one_where_a_flag_says(image, tmp_path):
    (tmp_path / "root-key").write_text("secret\n")
    is_as_before(image.load({"--data-dir": str(tmp_path)}), "the data directory has a key of its own")


def test_a_key_in_the_settings_counts_and_off_is_none(image):
    is_as_before(image.load(PEEKLOCK_SECURITY__ROOT_KEY="secret"), "security.root_key is set")
    assert image.load(PEEKLOCK_SECURITY__ROOT_KEY="off").settings.emulator


def test_no_emulator_counts_as_flag_and_variable(image):
    is_as_before(image.load({"--emulator": "false"}), "emulator is off")
    is_as_before(image.load(PEEKLOCK_EMULATOR="no"), "emulator is off")
    assert names(image.load({"--emulator": "true"}, PEEKLOCK_EMULATOR="no"))[0] == "queue.1"


def test_a_part_of_a_namespace_on_several_machines_is_no_emulator(image):
    loaded = load(None, {"--workers": "127.0.0.1:5680"}, image.environment, CLUSTER_FLAGS)
    is_as_before(loaded, "a part of a namespace on several machines")
    assert load(None, {"--workers": "2"}, image.environment, FLAGS).settings.emulator


def test_a_config_json_of_the_users_is_the_emulator_as_ever(image):
    image.mounted.write_text('{"UserConfig": {"Namespaces": [{"Name": "sbemulatorns", "Queues": [{"Name": "q"}]}]}}')
    loaded = image.load()
    assert loaded.settings.emulator
    assert loaded.not_emulator is None
    assert "q" in names(loaded)
    assert image.load({"--emulator": "false"}).not_emulator == f"settings come from {image.mounted}"


def test_wrong_values_are_told_as_ever(image):
    with pytest.raises(Exception, match="PEEKLOCK_EMULATOR"):
        image.load(PEEKLOCK_EMULATOR="maybe")
    with pytest.raises(Exception, match="PEEKLOCK_SECURITY__ROOT_KEYS"):
        image.load(PEEKLOCK_SECURITY__ROOT_KEYS="x")
